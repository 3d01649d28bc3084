"""Vector environments as a configuration asks for them. Axes: N environment copies."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, find_highest_version
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.continuation import Vector
from evorl.envs.faults.checks import check_spaces
from evorl.envs.faults.raising import PASSED_ON, GuardedEnv
from evorl.envs.games import is_game
from evorl.envs.games.vector import GameVector
from evorl.envs.suites import ATARI, register_suite
from evorl.envs.tensor.sources import is_tensor
from evorl.seeding import derive_seed, seed_global_generators
from evorl.system.extras import extra_needed
from evorl.system.files import reason as reason_of
from evorl.system.plugins import SCRIPT, defined_in, described, import_from_here, place
from evorl.system.processes import die_with_parent, usable_cores
from evorl.system.signals import Interrupted, raise_if_signalled, signals_deferred
from evorl.types.messages import message_of, nearest, shown
from evorl.types.outcomes import UserError


def make_vector(settings: Environment, copies: int, num_envs: int = 1) -> Vector:
    """The configured vector environment, with `num_envs` copies per agent. Raises UserError if it cannot be made."""
    try:
        if is_game(settings.id):
            return _game_vector(settings, copies)
        spec = spec_of(settings)
        with warnings.catch_warnings(), signals_deferred():
            warnings.simplefilter("ignore")
            mode = _mode(settings, spec)
            if mode == "native":
                options = _atari_options(settings) if spec.id.startswith(ATARI) else _native_options(settings)
                return gym.make_vec(spec, copies, vectorization_mode="vector_entry_point", **options)
            return _guarded_vector(settings, spec, mode, copies, num_envs)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise _cannot_make(settings, error) from error


LIMIT = "max_episode_steps"
THREADS = "num_threads"


def _native_options(settings: Environment) -> dict[str, Any]:
    """The arguments of a native vector environment; the limits null and -1, which only `make` takes, are replaced."""
    options = {name: value for name, value in settings.kwargs.items() if name != LIMIT or value is not None}
    return options | ({LIMIT: 2**31 - 1} if options.get(LIMIT) == -1 else {})


def _game_vector(settings: Environment, copies: int) -> Vector:
    """Make the copies of a game. Raises UserError for settings that a game does not have."""
    if settings.vectorization != "auto":
        raise UserError(
            f"environment.vectorization: {settings.id} is a game, whose copies are stepped together; use auto"
        )
    if settings.carry_over is True:
        raise UserError(
            f"environment.carry_over: {settings.id} is a game, and each generation, with its own opponents, begins new "
            "episodes; use auto"
        )
    return GameVector(settings, copies)


WANTED = (
    "name a class or a function that makes a gymnasium.Env, or a registered id; of a game of two seats, a class with "
    "`possible_agents`, or pettingzoo:NAME"
)


def _why_unknown(id: str, error: Exception) -> str:
    """The reason why no environment is registered or defined under an id, where Gymnasium raised `error`."""
    path, _, name = id.rpartition(":")
    if old := re.fullmatch(r"(\w+?)(-ram)?(NoFrameskip|Deterministic)-v[04]", name):
        return f"Atari's old names are gone; did you mean 'ALE/{old[1]}-v5'?"
    if needed := extra_needed(error):
        return needed
    namespace, _, bare = id.rpartition("/")
    if (version := find_highest_version(namespace or None, bare)) is not None:
        return f"an id has its version; did you mean '{id}-v{version}'?"
    if isinstance(error.__cause__, ImportError) and not isinstance(error.__cause__, ModuleNotFoundError):
        return message_of(error.__cause__)  # Of a package that is there; Gymnasium says that it is not installed.
    if path in sys.modules and isinstance(error, gym.error.UnregisteredEnv):
        module = sys.modules[path]
        if hasattr(module, name):
            return f"{shown(getattr(module, name))} of {path!r} makes no environment; {WANTED}"
        names = sorted(each for each in vars(module) if not each.startswith("_"))
        return f"the module {path!r} neither defines nor registers {name!r}{nearest(name, names)}"
    missing = error.__cause__ or error
    if path and isinstance(missing, ModuleNotFoundError) and missing.name == path.partition(".")[0]:
        return f"{message_of(missing)}; run the command in the folder of {missing.name}, or install it"
    if path or not isinstance(error, gym.error.NameNotFound | gym.error.NamespaceNotFound):
        return message_of(error)
    own = ":".join(name.rpartition(".")[::2]) if "." in name else f"module:{name}"
    return f"{message_of(error)} Name an environment of your own together with its module, as {own}"


def _cannot_make(settings: Environment, error: BaseException) -> UserError:
    """The error for an environment that is not registered or defined, whose constructor raised, or that is none."""
    begin, reason = f"environment.id: cannot make {settings.id!r}: ", message_of(error) + place(error)
    if isinstance(error, gym.error.Error | ImportError):
        in_script = settings.id.startswith(SCRIPT)
        because = "it is defined in the training script, which only that script can import; " if in_script else ""
        return UserError(begin + because + _why_unknown(settings.id, error) + place(error))
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return UserError(reason_of(error, "environment.num_envs"))
    if not isinstance(error, TypeError | ValueError | AssertionError):
        return UserError(begin + described(error))
    if "gymnasium.Env" in reason or "incompatible with Gymnasium" in reason:
        return UserError(f"{begin}{reason}; {WANTED}")
    if settings.kwargs:
        return UserError(f"environment.kwargs: {settings.id!r} cannot be made with these arguments: {reason}")
    if isinstance(error, TypeError) and "required" in reason:
        return UserError(f"environment.kwargs: {settings.id!r} needs arguments: {reason}")
    return UserError(f"{begin}{type(error).__name__}: {reason}")


def _guarded_vector(settings: Environment, spec: EnvSpec, mode: str, copies: int, num_envs: int) -> Vector:
    """Make guarded copies; if one fails, those already made are closed."""
    made: list[GuardedEnv] = []
    # GuardedEnv makes the checks of Gymnasium's wrapper, and reports by name and in one line what they find.
    make = partial(gym.make, spec, **{"disable_env_checker": True, **settings.kwargs})
    makers = [partial(_guarded, make, settings.id, os.getpid(), copy, num_envs, made) for copy in range(copies)]
    try:
        if mode == "async":
            return _QuietVector(makers, autoreset_mode=AutoresetMode.SAME_STEP, worker=_work)
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except BaseException:
        for env in made:
            env.close()
        raise


class _QuietVector(AsyncVectorEnv):
    """An AsyncVectorEnv that raises a worker's error without printing the traceback: it is reported in one line."""

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super()._raise_if_errors(successes)


def _work(index: int, make: Any, pipe: Any, parent_pipe: Any, memory: Any, errors: Any, *options: Any) -> None:
    """Run the loop of an AsyncVectorEnv's process; send errors that Gymnasium's loop does not catch, without traceback.

    Those are errors in the environment's constructor, and BaseException. The loop also ends if the parent has ended.
    """
    try:
        _async_worker(index, make, pipe, parent_pipe, memory, errors, *options)
    except (EOFError, ConnectionError):
        return
    except SystemExit:
        raise
    except BaseException as error:
        errors.put((index, UserError, f"environment.id: a process of `async` raised {described(error)}", ""))
        with contextlib.suppress(ConnectionError):
            pipe.send((None, False))


def spec_of(settings: Environment) -> EnvSpec:
    """An environment as it is registered, after importing the user's module if there is one.

    Raises UserError if there is none, or if it is of an optional suite that is not installed.
    """
    module, _, name = settings.id.rpartition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if module:
                _register(import_from_here(module), name)
            register_suite(name)
            return gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise _cannot_make(settings, error) from error


def _register(module: ModuleType, name: str) -> None:
    """Register an environment class or factory of a module, unless the module has registered it itself.

    The name may already be registered for another module that was used earlier in this process.
    """
    named, entry = defined_in(module, name), f"{module.__name__}:{name}"
    if named is None or (isinstance(named, type) and not issubclass(named, gym.Env)):
        return
    registered = gym.registry[name].entry_point if name in gym.registry else None
    path, _, attribute = registered.partition(":") if isinstance(registered, str) else ("", "", "")
    if registered is None or (attribute == name and getattr(sys.modules.get(path), name, named) is not named):
        # `gym.register` refuses the name of a registered environment without its version, such as CartPole.
        gym.registry[name] = EnvSpec(name, entry_point=entry)


def _guarded(
    make: Callable[[], gym.Env[Any, Any]], id: str, parent: int, copy: int, num_envs: int, made: list[GuardedEnv]
) -> GuardedEnv:
    """Create a guarded environment; in a worker process, close it on SIGTERM and exit when `parent` dies.

    Ctrl-C and a cluster's SIGUSR1 reach workers too, and are left to `parent`, which saves their episodes first. A
    worker's global generators are seeded here for the environment's constructor, and by each seeded reset.
    """
    if os.getpid() == parent:
        raise_if_signalled()
    elif os.getppid() == parent:
        die_with_parent(parent)
        seed_global_generators(derive_seed(torch.initial_seed(), generation=0, rank=copy, purpose="worker"))
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _leave)
    env = GuardedEnv(make(), id, copy, num_envs)
    made.append(env)
    check_spaces(getattr(env, "observation_space", None), getattr(env, "action_space", None), id)
    return env


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit this worker through an exception, so that Gymnasium closes its environment; later signals change nothing."""
    for later in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, signal.SIG_IGN)
    raise Interrupted(number)


def for_evaluation(settings: Environment) -> Environment:
    """The settings for evaluation: where possible, a vectorization with one seed per copy."""
    if is_game(settings.id) or is_tensor(settings.id):
        return settings
    spec = spec_of(settings)
    # Native implementations other than Atari's take a single seed for all copies.
    single = spec.entry_point and spec.vector_entry_point and not spec.id.startswith(ATARI)
    return settings.model_copy(update={"vectorization": "sync"} if single and settings.vectorization == "auto" else {})


def for_actor(settings: Environment, actors: int) -> Environment:
    """The settings for one of `actors` actors of a rank: Atari's threads share the cores."""
    if not stacked_frames(settings):
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
    if is_game(settings.id) or is_tensor(settings.id):
        return None
    try:
        return spec_of(settings).reward_threshold
    except UserError:
        return None


def stacked_frames(settings: Environment) -> int:
    """The number of frames that an Atari environment stacks, newest last; 0 for other environments.

    Zero frames pad the start of an episode.
    """
    name = settings.id.rpartition(":")[2]
    register_suite(name)
    if not name.startswith(ATARI) or _mode(settings, gym.spec(name)) != "native":
        return 0
    return int(settings.kwargs.get("stack_num", 4))


def serving_action(settings: Environment, vector: Vector) -> NDArray[Any] | None:
    """The action to send after a lost life in Atari games that need FIRE to continue; None for other games.

    As ALE does for its resets, a game is assumed to need FIRE if its action set includes it. Raises UserError for an
    environment that is not Atari's.
    """
    if not hasattr(vector, "ale"):
        raise UserError(f"environment.life_loss_ends: only Atari's image environments report lives, not {settings.id}")
    names = [action.name for action in vector.ale.get_action_set()]
    if "FIRE" not in names or not settings.kwargs.get("use_fire_reset", True):
        return None
    if isinstance(vector.single_action_space, gym.spaces.Box):
        # Radius and angle of the joystick, and the fire button.
        return np.array([0.0, 0.0, 1.0], dtype=np.float32)
    return np.array(names.index("FIRE"))


def vectorization_of(settings: Environment) -> str:
    """The vectorization of an environment, with `auto` resolved: `sync`, `async` or `native`."""
    return "native" if is_game(settings.id) else str(_mode(settings, spec_of(settings)))


def _mode(settings: Environment, spec: EnvSpec) -> Any:
    if settings.vectorization != "auto":
        return settings.vectorization
    # Atari's native implementation supports image observations only.
    return "native" if spec.vector_entry_point is not None and "obs_type" not in settings.kwargs else "sync"


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
