"""Construction of vector environments from the configuration."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.distributed.signals import signals_wait
from evorl.envs.guard import Guard
from evorl.system.plugins import SCRIPT, defined_in, described, import_from_here, place
from evorl.system.processes import die_with_parent, usable_cores
from evorl.types import UserError

ATARI = "ALE/"


def make_vector(
    settings: Environment, copies: int, differing: Sequence[Mapping[str, Any]] = ()
) -> VectorEnv[Any, Any, Any]:
    """Return the configured vector environment. Raises UserError if it cannot be made.

    `differing`, if not empty, holds per-copy keyword arguments that override the configured ones.
    """
    try:
        name = _known_name(settings)
        _import_atari(name)
        # Python ignores exceptions that a signal handler raises in its fork callbacks.
        with warnings.catch_warnings(), signals_wait():
            warnings.simplefilter("ignore")
            mode = _mode(settings, name)
            if settings.life_loss_ends and not (name.startswith(ATARI) and mode == "native"):
                raise UserError(f"environment.life_loss_ends: only Atari's images tell of lives, not {settings.id}")
            if mode == "native":
                options = _atari_options(settings) if name.startswith(ATARI) else settings.kwargs
                return gym.make_vec(name, copies, vectorization_mode="vector_entry_point", **options)
            return _guarded_vector(settings, name, mode, differing or [{}] * copies)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) + place(error)
        raise UserError(f"environment.kwargs: {settings.id!r} refuses them: {reason}") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"environment.id: cannot make {settings.id!r}: {described(error)}") from error


def _import_atari(name: str) -> None:
    """Register Atari's environments with Gymnasium if `name` is one. Raises UserError if they are not installed."""
    if name.startswith(ATARI):
        try:
            importlib.import_module("ale_py")
        except ModuleNotFoundError as error:
            raise UserError(f"environment.id: {name!r} needs the Atari extra: pip install -e '.[atari]'") from error


def _cannot_make(settings: Environment, error: Exception) -> UserError:
    """Return the error for an environment that is not registered or that its module does not define."""
    because = "it is known to the script alone that trains it; " if settings.id.startswith(SCRIPT) else ""
    reason = " ".join(str(error).split()) + place(error)
    return UserError(f"environment.id: cannot make {settings.id!r}: {because}{reason}")


def _guarded_vector(
    settings: Environment, name: str, mode: str, differing: Sequence[Mapping[str, Any]]
) -> VectorEnv[Any, Any, Any]:
    """Return guarded copies, each with its own keyword arguments. If one fails, those already made are closed."""
    made: list[Guard] = []
    makers = [
        partial(_guarded, partial(gym.make, gym.spec(name), **{**settings.kwargs, **own}), settings, os.getpid(), made)
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
    """Return the registered name of an environment, after importing the user's module if there is one."""
    module, _, name = settings.id.rpartition(":")
    if module:
        _register(import_from_here(module), name)
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
        gym.registry.pop(name, None)
        gym.register(name, entry_point=entry)


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
    made.append(Guard(make(), make, settings.max_restarts, settings.id))
    return made[-1]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit this process through SystemExit, so that Gymnasium closes its environment."""
    raise SystemExit(128 + number)


def for_evaluation(settings: Environment) -> Environment:
    """Return the settings for evaluation: where possible, a vectorization with one seed per copy."""
    try:
        name = _known_name(settings)
        spec = None if name.startswith(ATARI) else gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    # Native implementations other than Atari's take a single seed for all copies.
    single = spec is not None and spec.entry_point is not None and spec.vector_entry_point is not None
    mode = "sync" if single and settings.vectorization in ("auto", "native") else settings.vectorization
    return settings.model_copy(update={"vectorization": mode})


def reward_threshold(settings: Environment) -> float | None:
    """Return the mean return at which Gymnasium considers an environment solved; None if none is registered.

    Also None for an environment that cannot be made; the reason is reported when it is made.
    """
    try:
        name = _known_name(settings)
        _import_atari(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.spec(name).reward_threshold
    except (gym.error.Error, ImportError, UserError):
        return None


def stacked_frames(settings: Environment) -> int:
    """Return the number of frames that an Atari environment stacks, newest last; 0 for other environments.

    Zero frames pad the start of an episode.
    """
    name = settings.id.rpartition(":")[2]
    _import_atari(name)
    if not name.startswith(ATARI) or _mode(settings, name) != "native":
        return 0
    return int(settings.kwargs.get("stack_num", 4))


def serving_action(settings: Environment, vector: VectorEnv[Any, Any, Any]) -> NDArray[Any] | None:
    """Return the action to send after a lost life in Atari games that need FIRE to continue; None for other games.

    As ALE does for its resets, a game is assumed to need FIRE if its action set includes it.
    """
    names = [action.name for action in vector.ale.get_action_set()]  # type: ignore[attr-defined]
    if "FIRE" not in names or not settings.kwargs.get("use_fire_reset", True):
        return None
    if isinstance(vector.single_action_space, gym.spaces.Box):
        # Radius and angle of the joystick, and the fire button.
        return np.array([0.0, 0.0, 1.0], dtype=np.float32)
    return np.array(names.index("FIRE"))


def _mode(settings: Environment, name: str) -> Any:
    native = gym.spec(name).vector_entry_point is not None
    if settings.vectorization == "native" and not native:
        raise UserError(f"environment.vectorization: {settings.id} has no native vector implementation")
    if settings.vectorization != "auto":
        return settings.vectorization
    # Atari's native implementation supports image observations only.
    return "native" if native and "obs_type" not in settings.kwargs else "sync"


def _atari_options(settings: Environment) -> dict[str, Any]:
    """Return the standard preprocessing options, without reward clipping; local ranks share the cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "reward_clipping": False,
        "num_threads": max(1, usable_cores() // ranks),
        "life_loss_info": settings.life_loss_ends,
        **settings.kwargs,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
