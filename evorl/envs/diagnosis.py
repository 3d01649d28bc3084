"""Diagnosis of environments that do not follow Gymnasium's interface: the mistake, and what would be right."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.utils.passive_env_checker import check_action_space, check_observation_space

from evorl.config.errors import nearest, shown
from evorl.system.extras import extra_of, install_command
from evorl.types import UserError, message_of

GUIDE = "see gymnasium.farama.org/introduction/migration_guide"
WANTED = "name a class, a function that returns an environment, or a registered id"
NOT_GYMNASIUM = ("must inherit from the gymnasium.Env", "Gym is incompatible with Gymnasium")
"""Parts of Gymnasium's errors about an object that is not one of its environments."""


def why_unknown(id: str, kwargs: Mapping[str, Any], error: Exception) -> str:
    """The reason why no environment is registered or defined under an id, where Gymnasium raised `error`."""
    path, _, name = id.rpartition(":")
    module = sys.modules.get(path)
    reason = message_of(error)
    if (extra := extra_of(error)) is not None:
        return f"it needs the extra {extra}: {install_command(extra)}"
    if module is not None and isinstance(error, gym.error.UnregisteredEnv):
        if hasattr(module, name):
            return _why_no_environment(getattr(module, name), kwargs)
        there = [each for each, value in vars(module).items() if _is_environment(value) or _is_function_of(value, path)]
        there += [each for each, spec in gym.registry.items() if str(spec.entry_point).startswith(f"{path}:")]
        known = nearest(name, sorted({*there})) if there else ""
        return f"the module {path!r} neither defines nor registers {name!r}{known}"
    if path or not isinstance(error, gym.error.NameNotFound | gym.error.NamespaceNotFound):
        return reason
    package, _, last = name.rpartition(".")
    own = f"{package}:{last}" if package else f"module:{name}"
    return f"{reason} Name your own environment together with the module that defines or registers it, as {own}"


def why_not_gymnasium(name: str, kwargs: Mapping[str, Any]) -> str:
    """The reason why what is registered under `name` makes no Gymnasium environment."""
    entry = gym.spec(name).entry_point
    make = entry if callable(entry) else load_env_creator(str(entry))
    try:
        made = make(**{**gym.spec(name).kwargs, **kwargs})
    except Exception:  # User code may raise anything.
        return "it makes no Gymnasium environment"
    with contextlib.suppress(Exception):
        made.close()
    return _wrong_kind(made, type(made))


def check_spaces(env: Any, id: str) -> None:
    """Raise UserError unless an environment has both spaces, and Gymnasium's checks accept them."""
    for name, check in (("action_space", check_action_space), ("observation_space", check_observation_space)):
        space = getattr(env, name, None)
        if not isinstance(space, gym.Space):
            has = f"has no {name}" if space is None else f"has {shown(space)} as its {name}"
            raise UserError(f"environment.id: {id} {has}; set it to a space, such as gymnasium.spaces.Discrete(2)")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(space)
        except AssertionError as error:
            raise UserError(f"environment.id: the {name} of {id}: {message_of(error)}") from error
        if 0 in (space.shape or ()):
            raise UserError(f"environment.id: the {name} of {id} is {space}, which holds no numbers")


WIDE = 1e9
"""Bounds of actions beyond this are more likely those of their type than the environment's own."""


def wide_bounds(space: gym.Space[Any], id: str) -> str:
    """Return a remark on an action space with bounds like those of its type, or an empty string."""
    if not isinstance(space, gym.spaces.Box):
        return ""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    wide = space.bounded_below & space.bounded_above & (np.maximum(np.abs(low), np.abs(high)) > WIDE)
    if not wide.any():
        return ""
    low, high = low[wide][0], high[wide][0]
    return (
        f"the action_space of {id} is bounded by {low:.3g} and {high:.3g}, and actions are scaled to these bounds; "
        "give those between which actions are useful"
    )


def check_start(start: Any, space: gym.Space[Any], id: str) -> str:
    """Return a remark on the result of a reset, or an empty string. Raises UserError if it cannot be used."""
    if not isinstance(start, tuple):
        raise UserError(
            f"environment.id: {id} follows the old Gym interface: its reset returns {_described(start)}, and "
            f"Gymnasium's a pair (observation, info); {GUIDE}"
        )
    if len(start) != 2 or not isinstance(start[1], Mapping):
        raise UserError(
            f"environment.id: the reset of {id} returns {_described(start)}; it must return a pair (observation, "
            "info), where info is a dictionary"
        )
    return _check_observation(start[0], space, id, "reset")


def check_step(step: Any, space: gym.Space[Any], id: str, overwrites: bool = False) -> str:
    """Return a remark on the result of a step, or an empty string. Raises UserError if it cannot be used.

    `overwrites` says whether the step has changed the observation returned before.
    """
    if isinstance(step, tuple) and len(step) == 4:
        raise UserError(
            f"environment.id: {id} follows the old Gym interface: its step returns 4 values, and Gymnasium's 5 "
            f"(observation, reward, terminated, truncated, info), of which truncated marks a time limit; {GUIDE}"
        )
    if not isinstance(step, tuple) or len(step) != 5 or not isinstance(step[4], Mapping):
        raise UserError(
            f"environment.id: the step of {id} returns {_described(step)}; it must return 5 values (observation, "
            "reward, terminated, truncated, info), where info is a dictionary"
        )
    reward = np.asarray(step[1])
    if reward.ndim or reward.dtype.kind not in "biuf":
        raise UserError(
            f"environment.id: the step of {id} returns {_described(step[1])} as its reward; it must return a number"
        )
    findings = [_check_observation(step[0], space, id, "step")]
    if overwrites:
        findings.append(
            f"reset and step of {id} return the same array, so that each reset overwrites the last observation of the "
            "episode before; return a copy"
        )
    for name, value in (("terminated", step[2]), ("truncated", step[3])):
        if not isinstance(value, bool | np.bool_):
            findings.append(f"the step of {id} returns {_described(value)} as {name}, which should be a bool")
    return "; ".join(filter(None, findings))


def overwritten(observation: Any, copied: Any) -> bool:
    """True if an array of an observation is no longer what it was when it was `copied`."""
    if isinstance(observation, Mapping):
        return any(overwritten(part, copied[name]) for name, part in observation.items())
    if isinstance(observation, tuple | list):
        return any(overwritten(*pair) for pair in zip(observation, copied, strict=True))
    is_number = isinstance(observation, np.ndarray) and observation.dtype.kind in "fc"
    return isinstance(observation, np.ndarray) and not np.array_equal(observation, copied, equal_nan=is_number)


def refuse_old_interface(error: BaseException, env: gym.Env[Any, Any], id: str, action: Any = None) -> None:
    """Raise UserError if the `error` of a first reset, or of a first step with `action`, is that of an old interface.

    Wrappers unpack what the environment returned, so the innermost environment is asked again.
    """
    inner = env.unwrapped
    if isinstance(error, TypeError):
        known = inspect.signature(inner.reset).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        if not takes_all and (missing := [name for name in ("seed", "options") if name not in known]):
            raise UserError(
                f"environment.id: {id} follows the old Gym interface: its reset takes no {' and no '.join(missing)}; "
                f"Gymnasium's is reset(self, *, seed=None, options=None); {GUIDE}"
            ) from error
    if isinstance(error, ValueError) and "to unpack" in str(error):
        try:
            check_start(inner.reset(seed=0), inner.observation_space, id)
            if action is not None:
                check_step(inner.step(action), inner.observation_space, id)
        except UserError:
            raise
        except Exception:  # Then the error is another one, which the caller reports.
            return


def _why_no_environment(found: Any, kwargs: Mapping[str, Any]) -> str:
    """The reason why a module's attribute, which could not be registered, is no environment."""
    if isinstance(found, type):
        try:
            made = found(**kwargs)
        except Exception:  # User code may raise anything.
            made = None
        return _wrong_kind(made, found)
    if isinstance(found, FunctionType):
        return f"it is a function of another module; name it as {found.__module__}:{found.__qualname__}"
    if isinstance(found, gym.Env):
        return f"it is an environment that is already made; {WANTED}, of which there can be several copies"
    return f"it is {_described(found)}; {WANTED}"


def _wrong_kind(made: Any, kind: type) -> str:
    """The reason why an object that is no gymnasium.Env is rejected; `made` is None if making it failed."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if has_agents(made, kind):
        return (
            f"{name} is a game of several agents; name a class that has or annotates `possible_agents`, or "
            "pettingzoo:NAME, as pettingzoo:connect_four_v3"
        )
    if isinstance(made, gym.vector.VectorEnv) or issubclass(kind, gym.vector.VectorEnv):
        return f"{name} is a vector environment; give a single one, of which environment.num_envs copies are made"
    if any(base.__module__.partition(".")[0] == "gym" for base in kind.__mro__):
        return (
            f"{name} is an environment of the old Gym; derive it from gymnasium.Env ({GUIDE}), or wrap it in "
            "shimmy.GymV26CompatibilityV0 if it is of gym 0.26"
        )
    if hasattr(kind, "reset") and hasattr(kind, "step"):
        return f"{name} has reset and step, but does not derive from gymnasium.Env"
    return f"{name} is not a gymnasium.Env; {WANTED}"


def has_agents(made: Any, kind: type) -> bool:
    """True for PettingZoo's environments, whose agents take turns or act in parallel."""
    declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    names = ("possible_agents", "agent_iter")
    return any(hasattr(made, name) or hasattr(kind, name) or name in declared for name in names)


def _check_observation(observation: Any, space: gym.Space[Any], id: str, method: str, part: str = "") -> str:
    """Remark on an observation that is out of bounds. Raises UserError if it has another structure, shape or type."""
    which = f"part {part!r} of the observation" if part else "the observation"
    begin = f"environment.id: the {method} of {id} returns {which}"
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(observation, Mapping) or observation.keys() != space.spaces.keys():
            has = (
                f"keys {sorted(map(str, observation))}" if isinstance(observation, Mapping) else _described(observation)
            )
            raise UserError(f"{begin} with {has}; its observation_space has keys {sorted(map(str, space.spaces))}")
        children = [(str(name), observation[name], inner) for name, inner in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        if not isinstance(observation, tuple | list) or len(observation) != len(space.spaces):
            raise UserError(
                f"{begin} as {_described(observation)}; its observation_space has {len(space.spaces)} parts"
            )
        children = [(str(place), observation[place], inner) for place, inner in enumerate(space.spaces)]
    else:
        return _check_array(observation, space, begin, f"{which} that the {method} of {id} returns")
    findings = [
        _check_observation(value, inner, id, method, f"{part}.{name}" if part else name)
        for name, value, inner in children
    ]
    return "; ".join(filter(None, findings))


def _check_array(observation: Any, space: gym.Space[Any], begin: str, which: str) -> str:
    """Remark on numbers outside their space. Raises UserError if they have another shape or an unfit type."""
    kinds = gym.spaces.Box | gym.spaces.Discrete | gym.spaces.MultiBinary | gym.spaces.MultiDiscrete
    if not isinstance(space, kinds) or space.shape is None:
        return ""
    try:
        array = np.asarray(observation)
    except ValueError:  # A list of lists of different lengths.
        array = np.asarray(None)
    if array.dtype == object or array.shape != space.shape:
        has = f"of shape {list(array.shape)}" if array.dtype != object else f"as {_described(observation)}"
        raise UserError(f"{begin} {has}; its observation_space has shape {list(space.shape)}")
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise UserError(f"{begin} in {array.dtype}, which does not fit its observation_space of {space.dtype}")
    if not isinstance(space, gym.spaces.Box):
        return ""
    outside = (array < space.low) | (array > space.high)
    if not outside.any():
        return ""
    low, high = space.low[outside][0], space.high[outside][0]
    return f"{which} holds {array[outside][0]}, outside its observation_space ({low} to {high})"


def _described(value: Any) -> str:
    """Describe a returned value by its type, and by those of its parts if it is a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    return "None" if value is None else f"{shown(value)} of type {type(value).__name__}"


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, gym.Env) and value is not gym.Env


def _is_function_of(value: Any, module: str) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module
