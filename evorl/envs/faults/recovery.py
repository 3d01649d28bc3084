"""A vector environment that survives errors: it is recreated when it raises, and running episodes can be resumed.

Axes: N environment copies. An error in one copy of a `sync` or `async` environment concerns that copy alone
(`RestartingEnv`); an error in a native vector environment, in a game or in a worker process concerns all of them
(`RecoveringVector`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.continuation import PlainEpisodes, Vector, continuation, is_plain
from evorl.envs.faults.closing import close_vector
from evorl.envs.faults.restarting import FAILURES, FAULT, PASSED_ON, PLACE, Start, restart
from evorl.envs.games.vector import GameVector
from evorl.envs.reading import Copies
from evorl.envs.vector import make_vector, stacked_frames
from evorl.seeding import seed_global_generators
from evorl.system.plugins import place, without_place
from evorl.system.signals import note_activity, raise_if_signalled
from evorl.types.outcomes import EvorlWarning, UserError
from evorl.types.tensors import Flags

FINAL = "final_info"
"""Info key under which a same-step autoreset stores the info of episodes that ended in this step."""


class RecoveringVector:
    """A vector environment `env` of N `copies` that is recreated when it raises.

    Each copy may raise `settings.max_restarts` times in a run. A UserError propagates: a restart does not fix the
    user's mistake. If `continued`, it records what another process needs to replay its episodes, provided that this
    kind of environment supports it.
    """

    def __init__(self, settings: Environment, copies: Copies, *, continued: bool = False) -> None:
        self._settings = settings
        self._copies = copies
        self._stepping, self._resetting = f"a step of {settings.id}", f"a reset of {settings.id}"
        self._seed = 0
        self._failures = np.zeros(copies.count, dtype=np.int64)
        self._reported_places: set[str] = set()
        self.env: Vector = make_vector(settings, copies.count)
        atari = stacked_frames(settings) > 0
        self.continuation = continuation(self.env, copies.count, atari) if continued else None

    @property
    def restarts(self) -> dict[str, Any]:
        """The seed of the next restart of all copies and the failures of each, JSON-compatible."""
        return {"seed": self._seed, "failures": self._failures.tolist()}

    @restarts.setter
    def restarts(self, saved: Mapping[str, Any]) -> None:
        failures = np.array(saved["failures"], dtype=np.int64).reshape(self._failures.shape)
        self._seed, self._failures = int(saved["seed"]), failures

    def reset(self, seed: int | Sequence[int]) -> Start:
        """Reset all copies, copy i with `seed` + i or with seeds [N]; return the observations and the info."""
        seeds = [] if isinstance(seed, int) else [number % 2**31 for number in seed]
        self._seed = seed % 2**31 if isinstance(seed, int) else seeds[0]
        note_activity(self._resetting)
        try:
            observation, info = self._reset(seeds)
        except PASSED_ON:
            raise
        except BaseException as error:
            observation, info = self._start_over(error)
        else:
            self._note_seeds(seeds)
        finally:
            note_activity("")
        self.faulty(info)
        return observation, info

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the vector environment; if it raised, return first observations, zero rewards and no episode ends."""
        if self.continuation is not None and self.continuation.journal is not None:
            self.continuation.journal.add(actions)
        note_activity(self._stepping)
        try:
            return self.env.step(actions)
        except PASSED_ON:
            raise
        except BaseException as error:
            observation, info = self._start_over(error)
            none = np.zeros(self._copies.count)
            return observation, none, none.astype(bool), none.astype(bool), info
        finally:
            note_activity("")

    def faulty(self, info: dict[str, Any]) -> Flags | None:
        """The copies [N] that raised in a step or reset, reported once per place in the user's code; None without any.

        Raises UserError if a copy raised too often.
        """
        if FAULT not in info:
            return None
        faulty = np.asarray(info[f"_{FAULT}"], dtype=bool)
        self._failures += np.where(faulty, info[FAILURES], 0)
        beyond = faulty & (self._failures > self._settings.max_restarts)
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

    def _reset(self, seeds: Sequence[int] = ()) -> Start:
        """Reset all copies with these seeds [N], or with consecutive ones, and this process's global generators."""
        seed_global_generators(self._seed)
        start: Start = self.env.reset(seed=self._seeds(seeds))
        return start

    def _note_seeds(self, seeds: Sequence[int]) -> None:
        """Record that all copies were reset with these seeds [N], or if empty, with consecutive seeds."""
        # A reset may give an environment attributes that cannot be saved.
        if isinstance(self.continuation, PlainEpisodes) and not is_plain(self.env):
            self.continuation = None
        if self.continuation is not None:
            self.continuation.reset(seeds or range(self._seed, self._seed + self._copies.count))

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """The seed argument of a vector environment's reset: most native ones accept only a single seed."""
        if seeds and isinstance(self.env, SyncVectorEnv | AsyncVectorEnv | GameVector):
            return list(seeds)
        return np.array(seeds) if seeds and stacked_frames(self._settings) else self._seed

    def _start_over(self, error: BaseException) -> Start:
        """Recreate all copies after an error in the whole vector environment, and start new episodes."""
        # A signal to the process group has ended the workers: the state of restarted copies must not be saved.
        raise_if_signalled()
        error, failures, start = restart(error, self._settings.max_restarts, self._seed, self._begin_anew)
        if start is None:
            self.close()
        observation, info = (None, {}) if start is None else start
        count = self._copies.count
        return observation, {
            **info,
            FAULT: np.full(count, without_place(error), dtype=object),
            PLACE: np.full(count, place(error), dtype=object),
            f"_{FAULT}": np.ones(count, dtype=bool),
            FAILURES: info.get(FAILURES, 0) + np.full(count, failures),
        }

    def _begin_anew(self, seed: int) -> Start:
        self._seed = seed
        self.close()
        before, self.env = self.env, make_vector(self._settings, self._copies.count)
        if isinstance(self.env, GameVector):
            self.env.take_over(before)
        start = self._reset()
        self._note_seeds(())
        return start
