"""Recovery of a vector environment from errors that hit all copies at once. Axes: N copies.

Errors of single copies never come here: `guard.py` restarts those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.config.errors import shown
from evorl.envs.closing import close_vector
from evorl.envs.continuation import continuation
from evorl.envs.guard import FAILURES, FAULT, PLACE, another_seed
from evorl.envs.vector import make_vector, stacked_frames
from evorl.envs.watch import Watch
from evorl.system.user_code import place, without_place
from evorl.types import UserError


class RecoveringVector:
    """A vector environment `env` of N copies that is restarted when it raises, as often as `watch` allows.

    A UserError is passed on: no restart mends the user's mistake. Where it is `continued` by other processes, it keeps
    what they need to play its episodes again, if its kind can be played again at all.
    """

    def __init__(self, settings: Environment, copies: int, watch: Watch, *, continued: bool = False) -> None:
        self._settings = settings
        self._copies = copies
        self._watch = watch
        self._seed = 0
        self._differing: list[Mapping[str, Any]] = []
        self.env: VectorEnv[Any, Any, Any] = make_vector(settings, copies)
        atari = stacked_frames(settings) > 0
        self.continuation = continuation(self.env, copies, atari) if continued else None

    @property
    def differing(self) -> list[Mapping[str, Any]]:
        """Return the keyword arguments of each copy, where they differ."""
        return self._differing

    def differ(self, differing: Sequence[Mapping[str, Any]]) -> bool:
        """Give each copy keyword arguments of its own; return whether that made other environments, not yet reset.

        Raises UserError where an environment refuses them, or then has other spaces.
        """
        if list(differing) == self._differing:
            return False
        before = self.env
        after = make_vector(self._settings, self._copies, differing)
        close_vector(before, self._settings.id)
        self.env, self._differing = after, list(differing)
        if (after.single_observation_space, after.single_action_space) != (
            before.single_observation_space,
            before.single_action_space,
        ):
            raise UserError(f"environment.kwargs: {self._settings.id} has other spaces with {shown(differing[0])}")
        return True

    def reset(self, seed: int | Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Return the first observations, copy i from `seed` + i or from seeds [N], and the info."""
        seeds = [] if isinstance(seed, int) else [number % 2**31 for number in seed]
        self._seed = seed % 2**31 if isinstance(seed, int) else seeds[0]
        try:
            observation, info = self.env.reset(seed=self._seeds(seeds))
        except UserError:
            raise
        except Exception as error:
            observation, info = self._start_over(error)
        else:
            self._note_seeds(seeds)
        self.faulty(info)
        return observation, info

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Return what the vector environment returns; where it raised, first observations after no step at all."""
        if self.continuation is not None and self.continuation.journal is not None:
            self.continuation.journal.add(actions)
        try:
            return self.env.step(actions)
        except UserError:
            raise
        except Exception as error:
            observation, info = self._start_over(error)
            none = np.zeros(self._copies)
            return observation, none, none.astype(bool), none.astype(bool), info

    def faulty(self, info: dict[str, Any]) -> NDArray[np.bool_] | None:
        """Return which copies [N] raised, None for none. Raises UserError where one did so too often."""
        return self._watch.faulty(info) if FAULT in info else None

    def begin(self, copies: NDArray[np.bool_]) -> tuple[Any, dict[str, Any]] | None:
        """Note where episodes have begun [N]; return observations and info, where these are now others."""
        some = self.continuation is not None and np.count_nonzero(copies)
        return self.continuation.begin(self.env, copies) if self.continuation is not None and some else None

    def close(self) -> None:
        """Close all copies within a deadline; those that raise or hang are reported."""
        close_vector(self.env, self._settings.id)

    def _note_seeds(self, seeds: Sequence[int]) -> None:
        """Note that all copies were reset from these seeds [N], or if there are none, from successive ones."""
        if self.continuation is not None:
            self.continuation.reset(self.env, seeds or range(self._seed, self._seed + self._copies))

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """Return the seeds of all copies as the vector environment takes them: most native ones only know one."""
        if seeds and isinstance(self.env, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv):
            return list(seeds)
        return np.array(seeds) if seeds and stacked_frames(self._settings) else self._seed

    def _start_over(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Restart all copies, where one error has hit them all, and begin new episodes."""
        failures = 1
        observation: Any = None
        info: dict[str, Any] = {}
        self.close()
        while failures <= self._settings.max_restarts:
            self._seed = another_seed(self._seed)
            self.env = make_vector(self._settings, self._copies, self._differing)
            try:
                observation, info = self.env.reset(seed=self._seed)
                self._note_seeds(())
                break
            except UserError:
                raise
            except Exception as another:
                error = another
                failures += 1
                self.close()
        return observation, {
            **info,
            FAULT: np.full(self._copies, without_place(error), dtype=object),
            PLACE: np.full(self._copies, place(error), dtype=object),
            f"_{FAULT}": np.ones(self._copies, dtype=bool),
            FAILURES: info.get(FAILURES, 0) + np.full(self._copies, failures),
        }
