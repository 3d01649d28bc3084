"""Frozen agents that act in the seats of games, all in the same batched products.

Axes: K agents, S seats that they fill, N' seats that are to move, M the most of these that one agent fills, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.algorithms import Algorithm
from evorl.config import Environment
from evorl.envs.games.players import MoveRequest, Opponents
from evorl.envs.reading import ObservationReader, action_reader
from evorl.envs.spaces import MASK, EnvSpec, mapped
from evorl.population import Policy
from evorl.types.agents import Agent

Places = NDArray[np.intp]
ALL_STEPS = 1e12
"""Steps after which every schedule of exploration has ended."""


def match_policy(agents: Sequence[Agent], algorithm: Algorithm, generator: torch.Generator) -> Policy:
    """A policy of agents that explore as at the end of training.

    Ratings of different generations would otherwise differ by the agents' epsilon: 0.05 instead of 0.9 is 111 Elo.
    """
    policy = Policy(agents, algorithm, generator)
    policy.acted(np.full(len(agents), ALL_STEPS))
    return policy


class Players:
    """The agents of a policy, of which agent `places[s]` fills seat s. They sample; nothing is trained or annealed."""

    def __init__(
        self,
        policy: Policy,
        settings: Environment,
        interface: EnvSpec,
        places: Sequence[int] | Places,
        *,
        deterministic: bool = False,
    ) -> None:
        self.policy = policy
        self.places: Places = np.array(places, dtype=np.intp)
        space: gym.Space[Any] = interface.observation
        self._reader = ObservationReader(settings, space, lambda seat: f"environment.id: {settings.id} gave", 0)
        self._read_actions = action_reader(interface.action, 1)
        self._mask_size = interface.mask_size
        self._deterministic = deterministic
        # [S, 1, slots, units]: each seat keeps its recurrent state from turn to turn.
        self._state = policy.initial_state(1)[:1].expand(len(self.places), -1, -1, -1).clone()

    def __call__(self, request: MoveRequest) -> NDArray[Any]:
        """Moves [N', ...] of the seats `request.copies` [N'].

        Observations are gathered to [K, M, ...] and padded, so that one product serves all agents of a stack.
        """
        places = self.places[request.copies]
        order = np.argsort(places, kind="stable")
        columns = np.empty(len(places), dtype=np.intp)
        columns[order] = np.arange(len(places)) - np.searchsorted(places[order], places[order])
        shape = len(self.policy.agents), int(columns.max()) + 1
        device = self.policy.generator.device
        seen = {}
        for name, array in self._reader.read(request.observation).items():
            value = torch.from_numpy(array)
            padded = value.new_zeros(*shape, *value.shape[1:])
            padded[places, columns] = value
            seen[name] = padded.to(device)
        if self._mask_size:
            allowed = torch.ones(*shape, self._mask_size, dtype=torch.bool)
            if request.mask is not None:
                allowed[places, columns] = torch.from_numpy(request.mask)
            seen[MASK] = allowed.to(device)
        started = torch.zeros(shape, dtype=torch.bool)
        started[places, columns] = torch.from_numpy(request.first)
        state = self.policy.initial_state(shape[1])
        state[places, columns] = self._state[request.copies, 0]
        output, after = self.policy.act(seen, started.to(device), state, self._deterministic)
        self._state[request.copies, 0] = after[places, columns]
        return self._read_actions(output.action[places, columns].numpy(force=True))


class Sides:
    """Two sides that share no policy, such as agents of different runs; side `places[s]` fills seat s."""

    def __init__(self, sides: Sequence[Opponents], seats: int) -> None:
        self.places: Places = np.zeros(seats, dtype=np.intp)
        self._sides = sides

    def __call__(self, asked: MoveRequest) -> NDArray[Any]:
        """Moves [N', ...], with one call of each side that is to move."""
        of = self.places[asked.copies]
        moves: dict[int, Any] = {}
        for number, side in enumerate(self._sides):
            rows = np.flatnonzero(of == number)
            if len(rows):
                observation = mapped(itemgetter(rows), asked.observation)
                mask = None if asked.mask is None else asked.mask[rows]
                chosen = side(MoveRequest(observation, mask, asked.copies[rows], asked.first[rows]))
                moves |= dict(zip(rows.tolist(), chosen, strict=True))
        return np.stack([moves[row] for row in range(len(of))])


SeatPlayers = Players | Sides
"""Players of the seats in fixtures; `places` [S] is the index of the agent or side that fills each seat."""
