"""From an environment's name to its vector environment."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.distributed.signals import signals_wait
from evorl.envs.guard import Guard
from evorl.system.plugins import SCRIPT, defined_in, import_from_here
from evorl.system.processes import die_with_parent
from evorl.types import UserError

ATARI = "ALE/"
PATIENCE = 5.0
"""Seconds that a process of a broken vector environment has to end by itself."""


def make_vector(
    settings: Environment, copies: int, differing: Sequence[Mapping[str, Any]] = ()
) -> VectorEnv[Any, Any, Any]:
    """Return the vector environment that the configuration asks for. Raises UserError where there is none.

    `differing` has, where copies differ, the keyword arguments of each that replace those of the configuration.
    """
    try:
        name = _known_name(settings)
        if settings.id.startswith(ATARI):
            importlib.import_module("ale_py")
        # Python ignores what a handler raises in its callbacks around a fork.
        with warnings.catch_warnings(), signals_wait():
            warnings.simplefilter("ignore")
            mode = _mode(settings, name)
            if settings.life_loss_ends and not (name.startswith(ATARI) and mode == "native"):
                raise UserError(f"environment.life_loss_ends: only Atari's images tell of lives, not {settings.id}")
            if mode == "native":
                options = _atari_options(settings) if name.startswith(ATARI) else settings.kwargs
                return gym.make_vec(name, copies, vectorization_mode="vector_entry_point", **options)
            vector = {"autoreset_mode": AutoresetMode.SAME_STEP}
            if differing:
                makers = [partial(_made, name, {**settings.kwargs, **own}, settings, os.getpid()) for own in differing]
                kind: Callable[..., VectorEnv[Any, Any, Any]] = AsyncVectorEnv if mode == "async" else SyncVectorEnv
                return kind(makers, **vector)
            another = partial(gym.make, gym.spec(name), **settings.kwargs)
            guard = partial(_guarded, make=another, restarts=settings.max_restarts, parent=os.getpid())
            return gym.make_vec(
                name, copies, vectorization_mode=mode, vector_kwargs=vector, wrappers=[guard], **settings.kwargs
            )
    except ModuleNotFoundError as error:
        if error.name == "ale_py":
            raise UserError(
                f"environment.id: {settings.id!r} needs the Atari extra: pip install -e '.[atari]'"
            ) from error
        raise UserError(f"environment.id: cannot make {settings.id!r}: {error}") from error
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"environment.kwargs: {settings.id!r} refuses them: {' '.join(str(error).split())}") from error
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"environment.id: cannot make {settings.id!r}: {reason}") from error


def _cannot_make(settings: Environment, error: Exception) -> UserError:
    """Return the error of an environment that Gymnasium or its module does not have."""
    because = "it is known to the script alone that trains it; " if settings.id.startswith(SCRIPT) else ""
    return UserError(f"environment.id: cannot make {settings.id!r}: {because}{' '.join(str(error).split())}")


def _known_name(settings: Environment) -> str:
    """Return the name by which Gymnasium knows an environment, having it told by the user's module if there is one."""
    module, _, name = settings.id.rpartition(":")
    if module:
        _register(import_from_here(module), name)
    return name


def _register(module: ModuleType, name: str) -> None:
    """Let Gymnasium know the class or function of a module that makes environments, unless the module has done so.

    The name may be registered for another module's, which was trained on before in this process.
    """
    named, entry = defined_in(module, name), f"{module.__name__}:{name}"
    if named is None or (isinstance(named, type) and not issubclass(named, gym.Env)):
        return
    known = gym.registry[name].entry_point if name in gym.registry else None
    place, _, of_place = known.partition(":") if isinstance(known, str) else ("", "", "")
    if known is None or (of_place == name and getattr(sys.modules.get(place), name, named) is not named):
        gym.registry.pop(name, None)
        gym.register(name, entry_point=entry)


def _made(name: str, kwargs: Mapping[str, Any], settings: Environment, parent: int) -> Guard:
    make = partial(gym.make, gym.spec(name), **kwargs)
    return _guarded(make(), make, settings.max_restarts, parent)


def _guarded(env: gym.Env[Any, Any], make: Callable[[], gym.Env[Any, Any]], restarts: int, parent: int) -> Guard:
    """Guard an environment. One with a process of its own ends with its `parent`, even if it hangs."""
    if os.getpid() != parent and os.getppid() == parent:
        die_with_parent(parent)
    return Guard(env, make, restarts)


def discard(vector: VectorEnv[Any, Any, Any]) -> None:
    """Close a vector environment that may be broken, and end the processes it started."""
    if isinstance(vector, AsyncVectorEnv):
        # Its own `close` would first wait for answers, which the dead never give.
        for pipe in vector.parent_pipes:
            with contextlib.suppress(Exception):
                pipe.send(("close", None))
        for process in vector.processes:
            process.join(PATIENCE)
            process.kill()
            process.join()
    else:
        with contextlib.suppress(Exception):
            vector.close()
    vector.closed = True


def for_evaluation(settings: Environment) -> Environment:
    """Return the environment as it is evaluated: where it can be, in copies that each take a seed of their own."""
    try:
        name = _known_name(settings)
        spec = None if name.startswith(ATARI) else gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error
    # Native implementations other than Atari's take one seed for all copies.
    single = spec is not None and spec.entry_point is not None and spec.vector_entry_point is not None
    mode = "sync" if single and settings.vectorization in ("auto", "native") else settings.vectorization
    return settings.model_copy(update={"vectorization": mode})


def stacked_frames(settings: Environment) -> int:
    """Return how many successive frames an Atari environment stacks, the newest last; 0 for other environments.

    Its episodes start with frames of zeros before the first one.
    """
    name = settings.id.rpartition(":")[2]
    if not name.startswith(ATARI) or _mode(settings, name) != "native":
        return 0
    return int(settings.kwargs.get("stack_num", 4))


def serving_action(settings: Environment, vector: VectorEnv[Any, Any, Any]) -> NDArray[Any] | None:
    """Return the action after a lost life in an Atari game that needs FIRE to go on; None for other games.

    ALE takes a game for such a one, and presses FIRE in its resets, where its actions include FIRE.
    """
    names = [action.name for action in vector.ale.get_action_set()]  # type: ignore[attr-defined]
    if "FIRE" not in names or not settings.kwargs.get("use_fire_reset", True):
        return None
    if isinstance(vector.single_action_space, gym.spaces.Box):
        # Radius and angle of the stick, and the button.
        return np.array([0.0, 0.0, 1.0], dtype=np.float32)
    return np.array(names.index("FIRE"))


def _mode(settings: Environment, name: str) -> Any:
    native = gym.spec(name).vector_entry_point is not None
    if settings.vectorization == "native" and not native:
        raise UserError(f"environment.vectorization: {settings.id} has no native vector implementation")
    if settings.vectorization != "auto":
        return settings.vectorization
    # Atari's native implementation has images only.
    return "native" if native and "obs_type" not in settings.kwargs else "sync"


def _atari_options(settings: Environment) -> dict[str, Any]:
    """Return the usual preprocessing, but true scores; each process of this machine takes its share of the cores."""
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "reward_clipping": False,
        "num_threads": max(1, cores // ranks),
        "life_loss_info": settings.life_loss_ends,
        **settings.kwargs,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
