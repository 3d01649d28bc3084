"""Exported agents, files of `evorl export`, that fill the other seat of games.

Axes: S seats that they fill, N' seats that are to move, K values for each of U units of the recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array
from numpy.typing import DTypeLike, NDArray

from evorl.envs.games import Asked, is_allowed
from evorl.envs.spaces import MASK, EnvSpec, flattened, input_name
from evorl.system.inference import ACTION, NEXT_STATE, STATE, session_of
from evorl.types import UserError

TYPES: Mapping[str, DTypeLike] = {
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
}
"""Types of inputs, by ONNX Runtime's names for them."""
ENVIRONMENT = "environment"
"""The entry of a file's metadata that names the environment it was trained in."""


class ExportedAgent:
    """An exported agent for a game. It moves greedily and keeps no state between games."""

    def __init__(self, payload: bytes, name: str, interface: EnvSpec) -> None:
        """Load the file that is called `name`. Raises UserError if it plays another game."""
        self.name, self.interface = name, interface
        try:
            self._session = session_of(payload)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        self.facts: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        trained_in = self.facts.get(ENVIRONMENT, interface.environment)
        if trained_in != interface.environment:
            raise UserError(f"{name}: was exported from {trained_in[:80]}, but the game is {interface.environment}")
        self._inputs = {each.name: each for each in self._session.get_inputs()}
        self._outputs = [each.name for each in self._session.get_outputs()]
        self.state_shape: tuple[int, ...] = tuple(self._inputs[STATE].shape[1:]) if STATE in self._inputs else ()
        self._try()

    def act(
        self, observation: Any, mask: NDArray[np.bool_] | None, state: NDArray[np.float32]
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Moves [N', ...] for observations [N', ...], masks [N', A] and states [N', K, U], and the next states."""
        named: dict[str, Any] = {input_name(part): value for part, value in flattened(observation).items()}
        if mask is not None:
            named[MASK] = mask
        if self.state_shape:
            named[STATE] = state
        given: dict[str, NDArray[Any]] = {
            name: np.asarray(named[name], dtype=TYPES[each.type]) for name, each in self._inputs.items()
        }
        found = dict(zip(self._outputs, self._session.run(None, given), strict=True))
        return found[ACTION].astype(self.interface.action.dtype, copy=False), found.get(NEXT_STATE, state)

    def _try(self) -> None:
        """Raise UserError unless the agent can move in an empty position of the game."""
        space, size = self.interface.observation, self.interface.mask_size
        mask = np.ones((1, size), dtype=bool) if size else None
        if size and MASK not in self._inputs:
            raise UserError(
                f"{self.name}: takes no {MASK}, and not every move of {self.interface.environment} is allowed"
            )
        try:
            # int() raises for a dimension that the file leaves open.
            state = np.zeros((1, *map(int, self.state_shape)), dtype=np.float32)
            moves, _ = self.act(create_empty_array(space, 1), mask, state)
        except Exception as error:  # onnxruntime's errors have no common base class.
            raise UserError(f"{self.name}: its observations are not those of {self.interface.environment}") from error
        if len(moves) != 1 or not is_allowed(moves[0], None, self.interface.action):
            raise UserError(f"{self.name}: its moves are not those of {self.interface.environment}")


class ExportedPlayers:
    """Seats that one exported agent fills. Each keeps its recurrent state from turn to turn."""

    def __init__(self, agent: ExportedAgent, seats: int) -> None:
        self._agent = agent
        self._state = np.zeros((seats, *agent.state_shape), dtype=np.float32)

    def __call__(self, asked: Asked) -> NDArray[Any]:
        """Moves [N', ...] of the seats `asked.copies` [N']. Raises UserError for an illegal move."""
        self._state[asked.copies[asked.first]] = 0.0
        moves, after = self._agent.act(asked.observation, asked.mask, self._state[asked.copies])
        self._state[asked.copies] = after
        for row, move in enumerate(moves):
            mask = None if asked.mask is None else asked.mask[row]
            if not is_allowed(move, mask, self._agent.interface.action):
                raise UserError(f"{self._agent.name}: made the move {move}, which is not allowed")
        return moves
