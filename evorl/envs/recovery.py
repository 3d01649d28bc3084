"""Recovery of a vector environment from errors that affect all copies. Axes: N environment copies.

Errors in single copies are handled in `guard.py` and never reach this module.
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
from evorl.distributed.signals import held_signal
from evorl.envs.closing import close_vector
from evorl.envs.continuation import continuation
from evorl.envs.guard import FAILURES, FAULT, PLACE, another_seed
from evorl.envs.vector import make_vector, stacked_frames
from evorl.envs.watch import Watch
from evorl.system.plugins import place, without_place
from evorl.types import UserError


class RecoveringVector:
    """A vector environment `env` of N copies that is recreated when it raises, as often as `watch` allows.

    A UserError propagates: a restart does not fix the user's mistake. If `continued`, it records what another process
    needs to replay its episodes, provided that this kind of environment supports it.
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
        """Return the keyword arguments of each copy; empty if they do not differ."""
        return self._differing

    def differ(self, differing: Sequence[Mapping[str, Any]]) -> bool:
        """Set keyword arguments per copy; return whether the environments were recreated and so need a reset.

        Raises UserError if an environment rejects them or if they change its spaces.
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
        """Reset all copies, copy i with `seed` + i or with seeds [N]; return the observations and the info."""
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
        """Step the vector environment; if it raised, return first observations, zero rewards and no episode ends."""
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
        """Return a mask [N] of the copies that raised, or None. Raises UserError if a copy raised too often."""
        return self._watch.faulty(info) if FAULT in info else None

    def begin(self, copies: NDArray[np.bool_]) -> tuple[Any, dict[str, Any]] | None:
        """Record where episodes started [N]; return new observations and info if copies were reset again, else None."""
        some = self.continuation is not None and np.count_nonzero(copies)
        return self.continuation.begin(self.env, copies) if self.continuation is not None and some else None

    def close(self) -> None:
        """Close all copies within a deadline; copies that raise or hang are reported."""
        close_vector(self.env, self._settings.id)

    def _note_seeds(self, seeds: Sequence[int]) -> None:
        """Record that all copies were reset with these seeds [N], or if empty, with consecutive seeds."""
        if self.continuation is not None:
            self.continuation.reset(self.env, seeds or range(self._seed, self._seed + self._copies))

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """Return the seed argument for the vector environment: most native ones accept only a single seed."""
        if seeds and isinstance(self.env, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv):
            return list(seeds)
        return np.array(seeds) if seeds and stacked_frames(self._settings) else self._seed

    def _start_over(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Recreate all copies after an error in the whole vector environment, and start new episodes."""
        if held_signal() is not None:
            # A signal to a whole group has ended the workers: what restarted copies go on with must not be saved.
            raise error
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
