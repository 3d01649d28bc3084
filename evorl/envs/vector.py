"""Vector environments that survive errors: stepping, restarts, construction, and closing within a deadline.

Axes: N environment copies. An error in one copy of a `sync` or `async` environment, or of a game, concerns that copy
alone (`Guard`, `GameVector`); an error in a native vector environment, or in a worker process, concerns all of them
(`RecoveringVector`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NoReturn, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array, iterate
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.config.errors import shown
from evorl.envs.closing import close_in_time, report
from evorl.envs.continuation import PlainEpisodes, continuation, generator_state, is_plain, set_generator_state
from evorl.envs.diagnosis import (
    NOT_GYMNASIUM,
    check_spaces,
    check_start,
    check_step,
    overwritten,
    refuse_old_interface,
    why_not_gymnasium,
    why_unknown,
)
from evorl.envs.envpool import THREADS, EnvPool
from evorl.envs.faults import FAILURES, FAULT, FIRST, PLACE, fault, restart
from evorl.envs.games import GameVector, is_game
from evorl.envs.spaces import MASK, Copies
from evorl.envs.suites import ATARI, register_suite
from evorl.system.plugins import SCRIPT, defined_in, described, import_from_here, place, without_place
from evorl.system.processes import die_with_parent, usable_cores
from evorl.system.signals import held_signal, signals_wait
from evorl.types import EvorlWarning, UserError, message_of

Vector = VectorEnv[Any, Any, Any]
Flags = NDArray[np.bool_]
Start = tuple[Any, dict[str, Any]]
"""The first observation of an episode, or of N of them, and the info of the reset."""

LIVES = "environment.life_loss_ends: only Atari's image environments report lives"
FINAL = "final_info"
"""Info key under which a same-step autoreset stores the info of episodes that ended in this step."""
FINDING = "evorl.finding"
"""Info key of a copy's first reset or step: a finding on a result that is wrong but usable."""


class RecoveringVector:
    """A vector environment `env` of N `copies` that is recreated when it raises.

    Each copy may raise `settings.max_restarts` times in a run. A UserError propagates: a restart does not fix the
    user's mistake. If `continued`, it records what another process needs to replay its episodes, provided that this
    kind of environment supports it.
    """

    def __init__(self, settings: Environment, copies: Copies, *, continued: bool = False) -> None:
        self._settings = settings
        self._copies = copies
        self._seed = 0
        self._failures = np.zeros(copies.count, dtype=np.int64)
        self._reported_places: set[str] = set()
        self.findings: list[str] = []
        """Findings on the first results of the environment, each once."""
        self._differing: list[Mapping[str, Any]] = []
        self.env: Vector = make_vector(settings, copies.count)
        atari = stacked_frames(settings) > 0
        self.continuation = continuation(self.env, copies.count, atari) if continued else None

    @property
    def differing(self) -> list[Mapping[str, Any]]:
        """The keyword arguments of each copy; empty if they do not differ."""
        return self._differing

    @property
    def restarts(self) -> dict[str, Any]:
        """The seed of the next restart of all copies and the failures of each, JSON-compatible."""
        return {"seed": self._seed, "failures": self._failures.tolist()}

    @restarts.setter
    def restarts(self, told: Mapping[str, Any]) -> None:
        """Raises UserError for values that `restarts` cannot have."""
        try:
            seed, failures = int(told["seed"]), np.array(told["failures"], dtype=np.int64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError("the running episodes: their restarts are missing or damaged") from error
        if not 0 <= seed < 2**31 or failures.shape != self._failures.shape or failures.min() < 0:
            raise UserError("the running episodes: their restarts are those of other environments")
        self._seed, self._failures = seed, failures

    def differ(self, differing: Sequence[Mapping[str, Any]]) -> bool:
        """Set keyword arguments per copy; return whether the environments were recreated and so need a reset.

        Raises UserError if an environment rejects them or if they change its spaces.
        """
        if list(differing) == self._differing:
            return False
        before = self.env
        after = make_vector(self._settings, self._copies.count, differing)
        close_vector(before, self._settings.id)
        self.env, self._differing = after, list(differing)
        if (after.single_observation_space, after.single_action_space) != (
            before.single_observation_space,
            before.single_action_space,
        ):
            raise UserError(f"environment.kwargs: {self._settings.id} has different spaces with {shown(differing[0])}")
        return True

    def reset(self, seed: int | Sequence[int]) -> Start:
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
            none = np.zeros(self._copies.count)
            return observation, none, none.astype(bool), none.astype(bool), info

    def faulty(self, info: dict[str, Any]) -> Flags | None:
        """The copies [N] that raised in a step or reset, reported once per place in the user's code; None without any.

        Raises UserError if a copy raised too often, or if its first reset or step raises reproducibly.
        """
        # A step that ends an episode has its info under FINAL.
        for found in (info, info.get(FINAL)):
            if isinstance(found, Mapping) and FINDING in found:
                told = [str(each) for each in found[FINDING] if each]
                self.findings += [each for each in dict.fromkeys(told) if each not in self.findings]
        if FAULT not in info:
            return None
        faulty = np.asarray(info[f"_{FAULT}"], dtype=bool)
        self._failures += np.where(faulty, info[FAILURES], 0)
        at_first = np.asarray(info.get(f"_{FIRST}", False))
        beyond = faulty & (self._failures > self._settings.max_restarts)
        copies = np.flatnonzero(at_first if at_first.any() else beyond if beyond.any() else faulty)
        what, where = f"{self._copies.names(copies)} raised {info[FAULT][copies[0]]}", str(info[PLACE][copies[0]])
        if at_first.any():
            first = f"in its first {info[FIRST][copies[0]]}, and again when it was made anew with the same seed"
            raise UserError(f"environment.id: {what}{where} {first}")
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
        """Close all copies within a deadline; copies that raise or hang are reported."""
        close_vector(self.env, self._settings.id)

    def _note_seeds(self, seeds: Sequence[int]) -> None:
        """Record that all copies were reset with these seeds [N], or if empty, with consecutive seeds."""
        # A reset may give an environment attributes that cannot be saved.
        if isinstance(self.continuation, PlainEpisodes) and not is_plain(self.env):
            self.continuation = None
        if self.continuation is not None:
            self.continuation.reset(self.env, seeds or range(self._seed, self._seed + self._copies.count))

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """The seed argument of a vector environment's reset: most native ones accept only a single seed."""
        if seeds and isinstance(self.env, SyncVectorEnv | AsyncVectorEnv | EnvPool | GameVector):
            return list(seeds)
        return np.array(seeds) if seeds and stacked_frames(self._settings) else self._seed

    def _start_over(self, error: Exception) -> Start:
        """Recreate all copies after an error in the whole vector environment, and start new episodes."""
        if held_signal() is not None:
            # A signal to the process group has ended the workers: the state of restarted copies must not be saved.
            raise error
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
        """Recreate all copies; return the first observations of their new episodes, and the info."""
        self._seed = seed
        self.close()
        before, self.env = self.env, make_vector(self._settings, self._copies.count, self._differing)
        if isinstance(self.env, GameVector):
            self.env.take_over(before)
        start = self.env.reset(seed=seed)
        self._note_seeds(())
        return start


def batchable(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an info as floats, and the action mask as one flat array; nothing reads the rest.

    Gymnasium gives a key's array the type that the first copy reports. That truncates 0.7 to 0 after an int, raises for
    a string or an array of another length, and turns a mask that is not an array into an array of objects. Conversion
    takes 2 of the 44 microseconds of a HalfCheetah step, and nothing where an info is empty.
    """
    found: dict[str, Any] = {}
    for key, value in info.items():
        if key == MASK:
            found[key] = flat_mask(value)
        elif isinstance(value, Mapping):
            found[key] = batchable(value)
        elif isinstance(value, int | float | np.bool_ | np.number):
            found[key] = float(value)
        elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            found[key] = float(value.item())
    return found


def flat_mask(mask: Any) -> NDArray[np.bool_]:
    """The action mask of one copy [A], given as an array or as one for each part of the action."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    flat: NDArray[np.bool_] = np.concatenate([np.ravel(part) for part in parts]).astype(bool)
    return flat


class Guard(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that recreates an environment by `make` when it raises, and starts a new episode.

    The failed step then returns the new episode's first observation, with the error under `FAULT`. Only a UserError
    propagates, so the other copies in a vector environment complete their steps. It tries up to `restarts` times in a
    row; the reader of `FAILURES` counts them over the run.

    An error in the first reset or step is retried once in a new environment with the same seed and action. If the same
    line raises the same error again, it is a bug that no restart fixes, and the info has `FIRST`.
    """

    def __init__(self, env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int, name: str) -> None:
        super().__init__(env)
        self._make = make
        self._restarts = restarts
        self._name = name
        self._seed = 0
        self._is_open = True
        self._has_reset = self._has_stepped = False
        self._generator: Any = None
        self._shown: Any = None
        self._before: Any = None
        """A copy of `_shown` before the first step; None if its episode began by a restart or a replay."""
        self._shape = getattr(self.observation_space, "shape", None)
        """The shape of observations; None if they have parts."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            result = self.env.step(action)
            finding = None if self._has_stepped else self._checked_step(result)
            if self._is_suspect(result[0], ended=result[2] or result[3]):
                check_step(result, self.observation_space, self._name)
            result = (*result[:4], batchable(result[4]) | ({FINDING: finding} if finding else {}))
            self._shown = result[0]
        except UserError:
            raise
        except Exception as error:
            if not self._has_stepped:
                refuse_old_interface(error, self.env, self._name, action)
            first = not self._has_stepped and self._is_raised_again(error, action)
            self._has_stepped = True
            observation, info = self._refused(error, "step") if first else self._another(error)
            return observation, 0.0, False, False, info
        self._has_stepped = True
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        self._seed = self._seed if seed is None else seed
        inner = self.env.unwrapped
        self._generator = generator_state(inner) if seed is None else None
        _renew_world(inner)
        try:
            start = self.env.reset(seed=seed, options=options)
            finding = None if self._has_reset else self._checked_start(start)
            observation, info = start
            if self._is_suspect(observation):
                check_start(start, self.observation_space, self._name)
            self._before = None if self._has_stepped else deepcopy(observation)
            info = batchable(info) | ({FINDING: finding} if finding else {})
        except UserError:
            raise
        except Exception as error:
            if not self._has_reset:
                refuse_old_interface(error, self.env, self._name)
            first = not self._has_stepped and self._is_raised_again(error)
            return self._refused(error, "reset") if first else self._another(error)
        self._shown = observation
        return observation, info

    def _checked_start(self, start: Start) -> str:
        """A finding about the result of the first reset, or "". Raises UserError if it cannot be used."""
        finding = check_start(start, self.observation_space, self._name)
        self._has_reset = True
        return finding

    def _checked_step(self, result: Any) -> str:
        """A finding about the result of the first step, or "". Raises UserError if it cannot be used."""
        overwrites = self._before is not None and overwritten(self._shown, self._before)
        return check_step(result, self.observation_space, self._name, overwrites)

    def _is_suspect(self, observation: Any, ended: bool = False) -> bool:
        """True if an observation needs a check: it has the wrong shape, or has parts and is the last of an episode.

        Other observations are stacked, which fails on a wrong shape, but without naming the environment.
        """
        return ended if self._shape is None else np.shape(observation) != self._shape

    def close(self) -> None:
        """Close the environment. An exception or a hang is reported in one line."""
        if self._is_open:
            self._is_open = False
            close_in_time(self.env.close, self._name)

    def _begin_anew(self, seed: int) -> Start:
        """Recreate the environment; return the first observation of a new episode, and the info."""
        self._seed = seed
        self.close()
        self.env = self._make()
        self._is_open = True
        self._generator = self._before = None
        self._shown, info = self.env.reset(seed=seed)
        return self._shown, batchable(info)

    def _is_raised_again(self, error: Exception, action: Any = None) -> bool:
        """True if a new environment raises the same error at the same line, on reset or on this action."""
        try:
            self._begin_anew(self._seed)
            if action is not None:
                self.env.step(action)
        except UserError:
            raise
        except Exception as another:
            return type(another) is type(error) and place(another) == place(error)
        return False

    @property
    def episode(self) -> tuple[dict[str, Any], Any]:
        """The running episode's origin, JSON-compatible, and the last observation.

        The origin is the seed of the reset, or the random generator state before a reset without a seed. It also holds
        the generator's current state, which a replay must reproduce.
        """
        now = generator_state(self.env.unwrapped)
        return {"seed": self._seed, "generator": self._generator, "now": now}, self._shown

    @episode.setter
    def episode(self, again: tuple[Mapping[str, Any], Sequence[Any]] | None) -> None:
        """Replay an episode, if given, from its origin and actions; if that fails, the last observation is None."""
        if again is None:
            return
        origin, actions = again
        self._seed, self._generator, self._shown = origin["seed"], origin["generator"], None
        self._before = None
        try:
            if self._generator is not None:
                set_generator_state(self.env.unwrapped, self._generator)
            _renew_world(self.env.unwrapped)
            shown, _ = self.env.reset(seed=self._seed if self._generator is None else None)
            for action in actions:
                shown = self.env.step(action)[0]
            if origin.get("now") in (None, generator_state(self.env.unwrapped)):
                self._shown = shown
        except UserError:
            raise
        except Exception:  # Environments and corrupt files may raise anything.
            return

    def _another(self, error: Exception) -> Start:
        """Restart the environment; return the first observation of a new episode, and the info."""
        error, failures, start = restart(error, self._restarts, self._seed, self._begin_anew)
        observation, info = (self._placeholder(), {}) if start is None else start
        return observation, {**info, **fault(error, failures)}

    def _refused(self, error: Exception, first: str) -> Start:
        """The result for an environment whose first `reset` or `step` always raises, which ends the run."""
        return self._placeholder(), {**fault(error, self._restarts + 1), FIRST: first}

    def _placeholder(self) -> Any:
        """An observation that nothing reads: after this many failures the run ends."""
        space = self.observation_space
        try:
            return space.sample()
        except OverflowError:  # A Box has bounds as wide as its type.
            return next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))


def _renew_world(env: Any) -> None:
    """Give Gymnasium's BipedalWalker a new Box2D world for its next episode, as LunarLander does itself.

    In a reused world the order in which contacts are solved depends on all earlier episodes, so an episode would not be
    determined by its seed and actions.
    """
    if type(env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env._destroy()
        env.world = type(env.world)()


def make_vector(settings: Environment, copies: int, differing: Sequence[Mapping[str, Any]] = ()) -> Vector:
    """The configured vector environment. Raises UserError if it cannot be made.

    `differing`, if not empty, holds per-copy keyword arguments that override the configured ones.
    """
    try:
        if is_game(settings.id):
            return _game_vector(settings, copies, any(differing))
        name = _known_name(settings)
        # Python ignores exceptions that a signal handler raises in its fork callbacks.
        with warnings.catch_warnings(), signals_wait():
            warnings.simplefilter("ignore")
            mode = _mode(settings, name)
            _check_limit(settings)
            if settings.life_loss_ends and not (name.startswith(ATARI) and mode == "native"):
                raise UserError(f"{LIVES}, not {settings.id}")
            if mode == "native":
                options = _atari_options(settings) if name.startswith(ATARI) else _native_options(settings)
                return gym.make_vec(name, copies, vectorization_mode="vector_entry_point", **options)
            if mode == "envpool":
                return _env_pool(settings, name, copies)
            return _guarded_vector(settings, name, mode, differing or [{}] * copies)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    except (TypeError, ValueError, AssertionError) as error:
        raise _refusal(settings, error, any(differing)) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"environment.id: cannot make {settings.id!r}: {described(error)}") from error


LIMIT = "max_episode_steps"


def _check_limit(settings: Environment) -> None:
    """Raise UserError for a limit on episode steps that Gymnasium does not have; native environments check none."""
    limit = settings.kwargs.get(LIMIT)
    if limit is not None and not (
        isinstance(limit, int) and not isinstance(limit, bool) and (limit > 0 or limit == -1)
    ):
        raise UserError(
            f"environment.kwargs.{LIMIT}: {shown(limit)} is not a valid number of steps; give a whole number above 0, "
            "or -1 for no limit"
        )


def _native_options(settings: Environment) -> dict[str, Any]:
    """The arguments of a native vector environment; the limits null and -1, which only `make` takes, are replaced."""
    options = {name: value for name, value in settings.kwargs.items() if name != LIMIT or value is not None}
    return options | ({LIMIT: 2**31 - 1} if options.get(LIMIT) == -1 else {})


def _env_pool(settings: Environment, name: str, copies: int) -> Vector:
    """Create the copies in EnvPool. Raises UserError for Atari and for `carry_over: true`."""
    if name.startswith(ATARI):
        raise UserError(
            f"environment.vectorization: {settings.id} has a native vector implementation in C++ of its own; use auto"
        )
    if settings.carry_over is True:
        raise UserError(
            "environment.carry_over: EnvPool takes seeds only when it creates environments, so each generation begins "
            "new episodes; use auto"
        )
    options = {THREADS: _share_of_cores(), **_native_options(settings)}
    return EnvPool(name, copies, {**options, THREADS: min(options[THREADS], copies)})


def by_gymnasium(settings: Environment) -> Environment:
    """The settings for copies of Gymnasium's own environment, in this process."""
    pooled = settings.vectorization == "envpool"
    kwargs = {name: value for name, value in settings.kwargs.items() if not (pooled and name == THREADS)}
    return settings.model_copy(update={"vectorization": "sync", "kwargs": kwargs})


def _game_vector(settings: Environment, copies: int, differing: bool) -> Vector:
    """Make the copies of a game. Raises UserError for settings that a game does not have."""
    if settings.vectorization not in ("auto", "native") or differing:
        raise UserError(
            f"environment.vectorization: {settings.id} is a game, whose copies are all alike and are stepped together; "
            "use auto, without environment.kwargs in evolution.hyperparameters"
        )
    if settings.carry_over is True:
        raise UserError(
            f"environment.carry_over: {settings.id} is a game, and each generation, with its own opponents, begins new "
            "episodes; use auto"
        )
    if settings.life_loss_ends:
        raise UserError(f"{LIVES}, not {settings.id}")
    return GameVector(settings, copies)


def _cannot_make(settings: Environment, error: Exception) -> UserError:
    """The error for an environment that is not registered or that its module does not define."""
    is_own = settings.id.startswith(SCRIPT)
    because = "it is defined in the training script, which only that script can import; " if is_own else ""
    reason = why_unknown(settings.id, settings.kwargs, error) + place(error)
    return UserError(f"environment.id: cannot make {settings.id!r}: {because}{reason}")


def _refusal(settings: Environment, error: Exception, differing: bool) -> UserError:
    """The error for an environment whose constructor raised, or that is not a Gymnasium environment."""
    reason = message_of(error) + place(error)
    if any(part in reason for part in NOT_GYMNASIUM):
        name = settings.id.rpartition(":")[2]
        return UserError(f"environment.id: cannot make {settings.id!r}: {why_not_gymnasium(name, settings.kwargs)}")
    if settings.kwargs or differing:
        return UserError(f"environment.kwargs: {settings.id!r} does not accept these arguments: {reason}")
    if isinstance(error, TypeError) and "required" in reason:
        return UserError(f"environment.kwargs: {settings.id!r} needs some: {reason}")
    return UserError(f"environment.id: cannot make {settings.id!r}: {type(error).__name__}: {reason}")


def _guarded_vector(settings: Environment, name: str, mode: str, differing: Sequence[Mapping[str, Any]]) -> Vector:
    """Make guarded copies, each with its own keyword arguments; if one fails, those already made are closed."""
    made: list[Guard] = []
    # Guard makes the checks of Gymnasium's wrapper itself, and reports by name and in one line what they find.
    unchecked = {"disable_env_checker": True, **settings.kwargs}
    makers = [
        partial(_guarded, partial(gym.make, gym.spec(name), **{**unchecked, **own}), settings, os.getpid(), made)
        for own in differing
    ]
    try:
        if mode == "async":
            return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except BaseException:
        for guard in made:
            guard.close()
        raise


def _known_name(settings: Environment) -> str:
    """The registered name of an environment, after importing the user's module if there is one.

    Raises UserError if the environment is of an optional suite that is not installed.
    """
    module, _, name = settings.id.rpartition(":")
    if module:
        _register(import_from_here(module), name)
    register_suite(name)
    return name


def _register(module: ModuleType, name: str) -> None:
    """Register an environment class or factory of a module, unless the module has registered it itself.

    The name may already be registered for another module that was used earlier in this process.
    """
    named, entry = defined_in(module, name), f"{module.__name__}:{name}"
    if named is None or (isinstance(named, type) and not issubclass(named, gym.Env)):
        return
    known = gym.registry[name].entry_point if name in gym.registry else None
    place, _, of_place = known.partition(":") if isinstance(known, str) else ("", "", "")
    if known is None or (of_place == name and getattr(sys.modules.get(place), name, named) is not named):
        # `gym.register` refuses the name of a registered environment without its version, such as CartPole.
        gym.registry[name] = EnvSpec(name, entry_point=entry)


def _guarded(make: Callable[[], gym.Env[Any, Any]], settings: Environment, parent: int, made: list[Guard]) -> Guard:
    """Create a guarded environment; in a worker process, close it on SIGTERM and exit when `parent` dies.

    Ctrl-C reaches workers too, and is left to `parent`, which saves their episodes first.
    """
    if os.getpid() != parent and os.getppid() == parent:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _leave)
    guard = Guard(make(), make, settings.max_restarts, settings.id)
    made.append(guard)
    check_spaces(guard, settings.id)
    return guard


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit this process through SystemExit, so that Gymnasium closes its environment."""
    raise SystemExit(128 + number)


def for_evaluation(settings: Environment) -> Environment:
    """The settings for evaluation: where possible, a vectorization with one seed per copy."""
    if is_game(settings.id):
        return settings
    try:
        name = _known_name(settings)
        spec = None if name.startswith(ATARI) else gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    # Native implementations other than Atari's take a single seed for all copies.
    single = spec is not None and spec.entry_point is not None and spec.vector_entry_point is not None
    mode = "sync" if single and settings.vectorization in ("auto", "native") else settings.vectorization
    return settings.model_copy(update={"vectorization": mode})


def for_actor(settings: Environment, actors: int) -> Environment:
    """The settings for one of `actors` actors of a rank: Atari's or EnvPool's threads share the cores."""
    if settings.vectorization != "envpool" and not stacked_frames(settings):
        return settings
    threads = _share_of_cores(actors)
    return settings.model_copy(update={"kwargs": {THREADS: threads, **settings.kwargs}})


def _share_of_cores(actors: int = 1) -> int:
    """The threads for this process's environments: an equal share of the cores per actor of each local rank."""
    return max(1, usable_cores() // (actors * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def reward_threshold(settings: Environment) -> float | None:
    """The mean return at which Gymnasium considers an environment solved; None if none is registered.

    Also None for an environment that cannot be made; the reason is reported when it is made.
    """
    if is_game(settings.id):
        return None
    try:
        name = _known_name(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.spec(name).reward_threshold
    except (gym.error.Error, ImportError, UserError):
        return None


def stacked_frames(settings: Environment) -> int:
    """The number of frames that an Atari environment stacks, newest last; 0 for other environments.

    Zero frames pad the start of an episode.
    """
    name = settings.id.rpartition(":")[2]
    register_suite(name)
    if not name.startswith(ATARI) or _mode(settings, name) != "native":
        return 0
    return int(settings.kwargs.get("stack_num", 4))


def serving_action(settings: Environment, vector: Vector) -> NDArray[Any] | None:
    """The action to send after a lost life in Atari games that need FIRE to continue; None for other games.

    As ALE does for its resets, a game is assumed to need FIRE if its action set includes it.
    """
    names = [action.name for action in vector.ale.get_action_set()]  # type: ignore[attr-defined]
    if "FIRE" not in names or not settings.kwargs.get("use_fire_reset", True):
        return None
    if isinstance(vector.single_action_space, gym.spaces.Box):
        # Radius and angle of the joystick, and the fire button.
        return np.array([0.0, 0.0, 1.0], dtype=np.float32)
    return np.array(names.index("FIRE"))


def vectorization_of(settings: Environment) -> str:
    """The vectorization of an environment, with `auto` resolved: `sync`, `async`, `native` or `envpool`."""
    return "native" if is_game(settings.id) else str(_mode(settings, _known_name(settings)))


def _mode(settings: Environment, name: str) -> Any:
    native = gym.spec(name).vector_entry_point is not None
    if settings.vectorization == "native" and not native:
        raise UserError(f"environment.vectorization: {settings.id} has no native vector implementation")
    if settings.vectorization != "auto":
        return settings.vectorization
    # Atari's native implementation supports image observations only.
    return "native" if native and "obs_type" not in settings.kwargs else "sync"


def _atari_options(settings: Environment) -> dict[str, Any]:
    """The standard preprocessing options, without reward clipping; local ranks share the cores.

    Raises UserError for ALE options that would make returns cover a life instead of a game.
    """
    for option in ("episodic_life", "life_loss_info"):
        if settings.kwargs.get(option):
            raise UserError(
                f"environment.kwargs.{option}: use environment.life_loss_ends=true instead, which ends training "
                "episodes at a lost life and counts returns over whole games"
            )
    return {
        "reward_clipping": False,
        THREADS: _share_of_cores(),
        **settings.kwargs,
        "life_loss_info": settings.life_loss_ends,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }


END_WITHIN = 5.0
"""Seconds allowed for the worker processes of an AsyncVectorEnv to close their environments and exit."""


def close_vector(vector: Vector, name: str) -> None:
    """Close a vector environment, possibly broken, and terminate its worker processes."""
    if vector.closed:
        return
    vector.closed = True
    if isinstance(vector, SyncVectorEnv):
        for env in vector.envs:  # Each is a Guard with its own time limit.
            env.close()
        return
    if not isinstance(vector, AsyncVectorEnv):
        vector.closed = False
        close_in_time(vector.close, name)
        return
    # AsyncVectorEnv.close would first wait for pending results, which dead workers never send.
    for pipe in vector.parent_pipes:
        with contextlib.suppress(Exception):
            pipe.send(("close", None))
    deadline = time.monotonic() + END_WITHIN
    killed = 0
    for process in vector.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            killed += 1
            process.kill()
            process.join()
    if killed:
        processes = "process" if killed == 1 else "processes"
        report(f"{killed} {processes} of {name} did not end within {END_WITHIN:g} s, and had to be killed")
