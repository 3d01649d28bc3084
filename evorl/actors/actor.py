"""The actor process: it waits for a message, fetches parameters, acts, and sends the filled message to the learner."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import yaml

from evorl.actors.collectors import COLLECTORS, Acting, Message, messages_in, note_counts
from evorl.actors.memory import Board, SharedMemory
from evorl.algorithms import make_algorithm
from evorl.config import validate
from evorl.envs import Environments
from evorl.envs.vector import for_actor
from evorl.population import Policy
from evorl.population.learner import split_states
from evorl.seeding import derive_seed, seed_process
from evorl.system.closing import Closeable
from evorl.system.console import warnings_on_one_line
from evorl.system.plugins import described
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

NUMBER = struct.Struct("<q")
"""Wire format of the number of a message, which the learner sends to have it filled."""
ARRIVAL = struct.Struct("<3q")
"""Wire format of (number of a filled message, generation, parameter version), which no pipe splits."""
FAILED = -1
"""Sent in place of a message number to report a UserError, whose text follows; its size is in the generation field."""
LEAVE = signal.SIGUSR2
"""Tells an actor to close its environments and exit; actors ignore the signals that launchers send."""


def run(context: Mapping[str, Any], index: int, attempt: int, descriptors: Sequence[int]) -> None:
    """Act until the learner closes its end of the pipe or sends LEAVE. Reports a UserError to the learner."""
    torch.set_num_threads(1)
    # Blocked while environments are made or closed, where an exception would leave some of them open.
    signal.pthread_sigmask(signal.SIG_BLOCK, [LEAVE])
    signal.signal(LEAVE, _leave)
    board, lock, memory, reader, writer = descriptors
    try:
        with (
            warnings_on_one_line(f" (in actor {context['first_actor'] + index})"),
            Actor(context, index, attempt, board, lock, memory) as actor,
        ):
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [LEAVE])
                actor.work(reader, writer)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, [LEAVE])
    except (BrokenPipeError, _Leave):  # The learner is gone, or no longer wants this actor.
        return
    except UserError as error:
        _report(writer, str(error))
    except (SystemExit, KeyboardInterrupt) as left:
        _report(writer, f"{described(left)} ended the run")


def _report(writer: int, text: str) -> None:
    with open(writer, "wb", closefd=False) as pipe:
        pipe.write(ARRIVAL.pack(FAILED, len(text.encode()), 0) + text.encode())


class _Leave(KeyboardInterrupt):
    """Raised by the handler of LEAVE to end this actor; as an interrupt it is no fault of an environment in a step."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise _Leave


class Actor(Closeable):
    """One actor of a rank: its environments, and a policy of all the rank's agents, rebuilt in each generation."""

    def __init__(
        self, context: Mapping[str, Any], index: int, attempt: int, board: int, lock: int, memory: int
    ) -> None:
        """Create the environments. Raises UserError if that fails."""
        self._config = config = validate(yaml.safe_load(context["config"]))
        assert config.actors is not None
        self._settings = config.actors
        self._index, self._attempt, self._rank = index, attempt, context["rank"]
        self._mine = range(index * self._settings.queue, (index + 1) * self._settings.queue)
        self._board = Board(self._settings.count, SharedMemory(board), lock)
        self._memory = SharedMemory(memory)
        seed_process(config.seed, self._rank, f"actor {index}, attempt {attempt}")
        environment = for_actor(config.environment, self._settings.count)
        self._environments = Environments(environment, context["agents"], environment.num_envs, continued=False)
        try:
            self._algorithm = make_algorithm(config, self._environments.interface)
            self._own_state = self._exploration(context["agents"], context["copies"])
        except BaseException:
            self.close()
            raise
        self._generation = -1
        self._since_fetch = 0
        self._learner_device = torch.device(context["learner_device"])
        self._acting: Acting
        self._collector: Any
        self._messages: Mapping[int, Message] = {}

    def close(self) -> None:
        self._environments.close()

    def _exploration(self, agents: int, copies: int) -> Tensors:
        """This actor's part of the acting states, each [P]: how much it explores, for each of its `agents`."""
        count = self._settings.count
        # Exploration varies over all actors of the same agents, on every rank that holds a copy of them.
        before = self._rank * count if copies > 1 else 0
        acting_state = self._algorithm.actor_state(before + self._index, copies * count)
        return {name: value.double().expand(agents, *value.shape).clone() for name, value in acting_state.items()}

    def work(self, reader: int, writer: int) -> None:
        """Fill the messages whose numbers arrive on `reader` and report them on `writer`, until `reader` ends."""
        while request := os.read(reader, NUMBER.size):
            (number,) = NUMBER.unpack(request)
            while not self._fetch_if_due():
                self._begin()
            message, acting = self._messages[number], self._acting
            states, _ = split_states(self._algorithm, acting.states)
            acting.policy.set_acting_states(states | self._own_state)
            version = acting.version
            self._collector.collect(message, self._beat)
            note_counts(message, self._environments)
            os.write(writer, ARRIVAL.pack(number, self._generation, version))

    def _beat(self) -> None:
        self._board.beats[self._index] = time.monotonic()

    def _fetch_if_due(self) -> bool:
        """Fetch parameters if that is due before the next rollout; False if another generation is published."""
        if self._board.generation != self._generation:
            return False
        if self._since_fetch >= self._settings.fetch_steps:
            acting = self._acting
            version = self._board.fetch(acting.flat, acting.states, self._generation)
            self._since_fetch, acting.version = 0, version or 0
            if version is None:
                return False
        self._since_fetch += self._config.algorithm.sent_steps
        return True

    def _begin(self) -> None:
        """Build a policy for the published generation, unless another one replaces it meanwhile."""
        config, described = self._config, self._board.read_description()
        self._generation = described.generation
        who = f"actor {self._index}, attempt {self._attempt}"

        def seed(purpose: str) -> int:
            purpose = f"{purpose} of {who}"
            return derive_seed(config.seed, generation=self._generation, rank=self._rank, purpose=purpose)

        flat, states = self._board.empty()
        version = self._board.fetch(flat, states, self._generation)
        if version is None:
            return
        self._since_fetch = 0
        generator = torch.Generator().manual_seed(seed("acting"))
        policy = Policy(
            described.agents, self._algorithm, generator, lambda size: flat[:size], planned_for=self._learner_device
        )
        collector = COLLECTORS[config.algorithm.actor_messages]
        self._messages = messages_in(self._memory, collector.layout(policy, config), self._mine)
        self._environments.begin(seed("environments"), policy.agents, described.carries_over)
        self._acting = Acting(
            config,
            self._environments,
            self._board,
            policy,
            flat,
            states,
            self._generation,
            version,
        )
        self._collector = collector(self._acting)
        # Later generations use the seeds of a first attempt, as they would after a resume.
        self._attempt = 0
