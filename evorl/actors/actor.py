"""The process of an actor: it waits for a slot, fetches parameters, acts, and hands the slot to the learner."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from evorl.actors.board import Board
from evorl.actors.collectors import KINDS, Collector, Slot, note_counts, slots
from evorl.actors.memory import SharedMemory
from evorl.algorithms import SETTINGS, make_algorithm
from evorl.config import validate
from evorl.envs import Environments
from evorl.population import Policy
from evorl.randomness import derive_seed
from evorl.types import UserError

NUMBER = struct.Struct("<q")
"""The number of a slot, as the learner hands it out."""
MESSAGE = struct.Struct("<3q")
"""A slot that is full, and the generation and version of what acted; so few bytes never arrive in parts."""
FAILED = -1
"""In place of a slot: a mistake of the user follows, in words."""


def run(context: Mapping[str, Any], index: int, attempt: int, descriptors: Sequence[int]) -> None:
    """Act until the learner closes its end of the pipe. Tells it what of the user's is wrong, if something is."""
    torch.set_num_threads(1)
    board, memory, reader, writer = descriptors
    try:
        Actor(context, index, attempt, board, memory).work(reader, writer)
    except UserError as error:
        os.write(writer, MESSAGE.pack(FAILED, 0, 0) + str(error).encode())
    except BrokenPipeError:  # The learner is gone, or no longer wants this actor.
        return


class Actor:
    """One actor of a rank: its environments, and in each generation a policy of all of the rank's agents."""

    def __init__(self, context: Mapping[str, Any], index: int, attempt: int, board: int, memory: int) -> None:
        """Make the environments. Raises UserError where that fails."""
        self._config = config = validate(yaml.safe_load(context["config"]), SETTINGS)
        assert config.actors is not None
        self._actors, self._steps = config.actors, config.algorithm.sent_steps
        self._index, self._attempt, self._rank = index, attempt, context["rank"]
        self._mine = range(index * self._actors.queue, (index + 1) * self._actors.queue)
        self._board = Board(self._actors.count, SharedMemory(board))
        self._memory = SharedMemory(memory)
        self._environments = Environments(config.environment, context["agents"], config.environment.num_envs)
        self._algorithm = make_algorithm(config, self._environments.interface)
        count = context["ranks"] * self._actors.count
        own = self._algorithm.actor_state(self._rank * self._actors.count + index, count)
        self._own_state = {name: torch.full((context["agents"],), value).double() for name, value in own.items()}
        self._generation = 0
        self._version = 0
        self._since_fetch = 0
        self._policy: Policy
        self._states: Tensor
        self._collector: Collector
        self._slots: Mapping[int, Slot] = {}

    def work(self, reader: int, writer: int) -> None:
        """Fill the slots whose numbers come from one pipe, and send them through the other."""
        while number := os.read(reader, NUMBER.size):
            (slot,) = NUMBER.unpack(number)
            self._beat()
            while not self._is_up_to_date():
                self._begin()
            names = self._algorithm.initial_state()
            self._policy.set_acting_states(dict(zip(names, self._states, strict=True)) | self._own_state)
            self._collector.collect(self._slots[slot], self._beat)
            note_counts(self._slots[slot], self._environments)
            os.write(writer, MESSAGE.pack(slot, self._generation, self._version))

    def _beat(self) -> None:
        self._board.beats[self._index] = time.monotonic()

    def _is_up_to_date(self) -> bool:
        """Fetch parameters if that is due; return whether the policy is of the generation that is published."""
        if self._board.generation != self._generation:
            return False
        self._since_fetch += self._steps
        if self._since_fetch < self._actors.fetch_steps + self._steps:
            return True
        return self._fetch(self._policy.flat)

    def _fetch(self, flat: Tensor) -> bool:
        """Fetch parameters into `flat` [D]; return whether the generation goes on."""
        version = self._board.fetch(flat, self._states, self._generation)
        self._since_fetch = self._steps
        self._version = version or 0
        return version is not None

    def _begin(self) -> None:
        """Begin the generation that is published, with a policy of its agents; another one may come meanwhile."""
        config, described = self._config, self._board.read_description()
        self._generation = described.generation
        who = f"actor {self._index}, attempt {self._attempt}"

        def seed(purpose: str) -> int:
            purpose = f"{purpose} of {who}"
            return derive_seed(config.seed, generation=self._generation, rank=self._rank, purpose=purpose)

        flat, self._states = self._board.empty()
        if not self._fetch(flat):
            return
        generator = torch.Generator().manual_seed(seed("acting"))
        self._policy = policy = Policy(described.agents, self._algorithm, generator, lambda size: flat)
        kind = KINDS[config.algorithm.sends]
        self._slots = slots(self._memory, kind.slot(policy, config), self._mine)
        self._environments.begin(seed("environments"), policy.agents, described.carries_over)
        self._collector = kind.collector(policy, self._environments, config)
