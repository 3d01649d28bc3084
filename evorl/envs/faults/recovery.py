"""A vector environment whose copies are restarted where they raise, and whose running episodes can be resumed.

Axes: N environment copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.continuation import PlainEpisodes, Vector, continuation, is_plain
from evorl.envs.faults.closing import close_vector
from evorl.envs.faults.restarting import FAILURES, FAULT, PLACE, Start, called
from evorl.envs.games.vector import GameVector
from evorl.envs.reading import Copies
from evorl.envs.vector import make_vector, stacked_frames
from evorl.seeding import seed_global_generators
from evorl.types.outcomes import EvorlWarning, UserError
from evorl.types.tensors import Flags

FINAL = "final_info"
"""Info key under which a same-step autoreset stores the info of episodes that ended in this step."""


class RecoveringVector:
    """A vector environment `env` of N `copies`, each of which may raise `settings.max_restarts` times in a run.

    If `continued`, it records what another process needs to replay its episodes, provided that this kind of environment
    supports it.
    """

    def __init__(self, settings: Environment, copies: Copies, *, continued: bool) -> None:
        self._settings = settings
        self._copies = copies
        self._stepping, self._resetting = f"a step of {settings.id}", f"a reset of {settings.id}"
        self.failures = np.zeros(copies.count, dtype=np.int64)
        """The errors [N] of each copy in this run."""
        self._reported_places: set[str] = set()
        self.env: Vector = make_vector(settings, copies.count)
        atari = stacked_frames(settings) > 0
        self.continuation = continuation(self.env, copies.count, atari) if continued else None

    def reset(self, seed: int | Sequence[int]) -> Start:
        """Reset all copies, copy i with `seed` + i or with seeds [N]; return the observations and the info."""
        seeds = [] if isinstance(seed, int) else [number % 2**31 for number in seed]
        first = seed % 2**31 if isinstance(seed, int) else seeds[0]
        observation, info = called(self._resetting, self._reset, first, seeds)
        # A reset may give an environment attributes that cannot be saved.
        if isinstance(self.continuation, PlainEpisodes) and not is_plain(self.env):
            self.continuation = None
        if self.continuation is not None:
            self.continuation.reset(seeds or range(first, first + self._copies.count))
        self.faulty(info)
        return observation, info

    def _reset(self, first: int, seeds: Sequence[int]) -> Start:
        """Reset all copies with these seeds [N], or with consecutive ones, and this process's global generators."""
        seed_global_generators(first)
        argument: Any = first  # Most native implementations accept only a single seed.
        if seeds and isinstance(self.env, SyncVectorEnv | AsyncVectorEnv | GameVector):
            argument = list(seeds)
        elif seeds and stacked_frames(self._settings):
            argument = np.array(seeds)
        start: Start = self.env.reset(seed=argument)
        return start

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the vector environment; a copy that raised gives a first observation, no reward and no episode's end."""
        if self.continuation is not None and self.continuation.journal is not None:
            self.continuation.journal.add(actions)
        result: tuple[Any, Any, Any, Any, dict[str, Any]] = called(self._stepping, self.env.step, actions)
        return result

    def faulty(self, info: dict[str, Any]) -> Flags | None:
        """The copies [N] that raised in a step or reset, reported once per place in the user's code; None without any.

        Raises UserError if a copy raised too often.
        """
        if FAULT not in info:
            return None
        faulty = np.asarray(info[f"_{FAULT}"], dtype=bool)
        self.failures += np.where(faulty, info[FAILURES], 0)
        beyond = faulty & (self.failures > self._settings.max_restarts)
        copies = np.flatnonzero(beyond if beyond.any() else faulty)
        what, where = f"{self._copies.names(copies)} raised {info[FAULT][copies[0]]}", str(info[PLACE][copies[0]])
        if beyond.any():
            restarts = self._settings.max_restarts
            raise UserError(
                f"environment.max_restarts: {what}{where}; after {restarts} restarts, the maximum for each copy"
            )
        once = "" if where in self._reported_places else where
        self._reported_places.add(where)
        warnings.warn(f"{what}{once}; restarted; an episode that had not ended is dropped", EvorlWarning, stacklevel=3)
        return faulty

    def begin(self, copies: Flags) -> Start | None:
        """Record where episodes started [N]; return new observations and info if copies were reset again, else None."""
        if self.continuation is None or not np.count_nonzero(copies):
            return None
        return self.continuation.begin(self.env, copies)

    def close(self) -> None:
        close_vector(self.env, self._settings.id)
