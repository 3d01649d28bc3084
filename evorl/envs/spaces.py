"""Environment specs: observation spaces as named parts that networks can encode, actions, and action masks.

Axes: N environment copies, `num_envs` per agent; A actions of all choices concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.types import Flags, UserError

WHOLE = "observation"
"""Name of the part if the space has only one."""
CHANNELS_FIRST = ("openspiel:",)
"""Prefixes of the ids of environments whose images are known to be channels-first."""
LARGEST = math.sqrt(float(np.finfo(np.float32).max))
"""Observations must be smaller in absolute value, 1.8e19: networks and their statistics square them in float32."""
ACTION = "action"
"""Name of the extra input part of Q-functions of continuous actions."""


@dataclass(frozen=True)
class ObservationSpec:
    """One part of an observation, as it is stored.

    - `vector`: numbers of any shape, flattened;
    - `categories`: integers, each below its entry in `sizes`, one-hot encoded;
    - `image`: rows, columns and channels; channels are the last axis if `channels_last`, else the first.

    uint8 values from `low` to `high` are scaled to [0, 1]. If `frames` is above 0, the first axis is a stack of that
    many successive frames, newest last, and zero frames pad the start of an episode.
    """

    kind: Literal["vector", "categories", "image"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    channels_last: bool = False
    frames: int = 0
    low: int = 0
    high: int = 255

    @property
    def width(self) -> int:
        """The number of network inputs."""
        return sum(self.sizes) if self.kind == "categories" else math.prod(self.shape)

    @property
    def channels(self) -> int:
        """The number of channels of an image."""
        if len(self.shape) == 2:
            return 1
        return self.shape[-1] if self.channels_last else self.shape[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """The rows and columns of an image."""
        rows, columns = self.shape[:2] if self.channels_last or len(self.shape) == 2 else self.shape[1:]
        return rows, columns


ObservationSpecs = Mapping[str, ObservationSpec]


def as_numbers(x: torch.Tensor, part: ObservationSpec) -> torch.Tensor:
    """A vector or image [..., *shape] as floats, with uint8 values scaled from the part's bounds to [0, 1]."""
    if x.dtype != torch.uint8:
        return x.float()
    values = x.float()
    if part.low:
        values.sub_(part.low)
    return values.div_(part.high - part.low)


@dataclass(frozen=True)
class EnvSpec:
    """Interface of an environment: observation parts, action space, and whether it provides action masks.

    `observation` is the space from which the parts were derived.
    """

    environment: str
    parts: ObservationSpecs
    action: gym.Space[Any]
    masked: bool = False
    observation: gym.Space[Any] = field(default_factory=gym.spaces.Dict)

    @property
    def mask_size(self) -> int:
        """The length A of an action mask; 0 if the environment gives none."""
        return sum(choices(self.action)) if self.masked else 0

    def with_mask(self) -> ObservationSpecs:
        """The parts of an observation as experience holds them: the action mask, if any, is a part of its own."""
        mask = {MASK: ObservationSpec("vector", (self.mask_size,), torch.bool)} if self.masked else {}
        return {**self.parts, **mask}


def observation_specs(space: gym.Space[Any], key: str = "environment.id", name: str = "") -> dict[str, ObservationSpec]:
    """The parts of an observation space by name: `camera`, `arm.angles`, or `observation` if there is only one.

    Raises UserError, citing the setting `key`, if a part has no encoder.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: dict[str, ObservationSpec] = {}
        if isinstance(space, gym.spaces.Dict) and any(not isinstance(child, str) for child in space.spaces):
            raise UserError(f"{key}: {space} has keys that are not strings")
        for child, inner in _children(space):
            found = observation_specs(inner, key, f"{name}.{child}" if name else child)
            if twice := parts.keys() & found.keys():
                raise UserError(f"{key}: two parts of the observation are called {min(twice)!r}; rename one")
            parts |= found
        return parts
    kind = known_kind(space, PARTS)
    if kind is None:
        where = f"part {name!r} of the observation" if name else "the observation"
        known = ", ".join(sorted(part.__name__ for part in PARTS))
        raise UserError(f"{key}: {where} is {space}, which no encoder supports; supported are {known}, Dict, Tuple")
    part = PARTS[kind](space)
    if 0 in part.shape:
        raise UserError(f"{key}: an observation of shape {list(part.shape)} holds no numbers")
    return {name or WHOLE: part}


def known_kind(space: gym.Space[Any], known: Mapping[type, Any]) -> type | None:
    """The most specific class in `known` of which a space is an instance, or None."""
    return next((kind for kind in type(space).__mro__ if kind in known), None)


def split(space: gym.Space[Any], batched: Any, name: str = "") -> dict[str, NDArray[Any]]:
    """Split batched observations [N, ...] of a space into its parts, each [N, ...] as stored."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: dict[str, NDArray[Any]] = {}
        for child, inner in _children(space):
            value = batched[child] if isinstance(space, gym.spaces.Dict) else batched[int(child)]
            parts |= split(inner, value, f"{name}.{child}" if name else child)
        return parts
    array = np.asarray(batched)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        array = to_zero(array, space)
    return {name or WHOLE: array}


def wrong_actions(algorithm: str, interface: EnvSpec, takes: str) -> UserError:
    """The error for an action space that an algorithm does not support; `takes` names the supported ones."""
    space, where = interface.action, interface.environment
    return UserError(f"algorithm.name: {algorithm} cannot act in {space} of {where}; it takes {takes}")


def with_action(interface: EnvSpec, algorithm: str, takes: str = "a Box between bounds") -> ObservationSpecs:
    """The inputs of a Q-function of continuous actions: the observation parts and the flattened action.

    Raises UserError if the action space is not a bounded Box (the message names the `algorithm` and the spaces that it
    `takes`), or if an observation part already has the action's name.
    """
    space, where = interface.action, interface.environment
    if not (isinstance(space, gym.spaces.Box) and space.is_bounded() and 0 not in space.shape):
        raise wrong_actions(algorithm, interface, takes)
    if ACTION in interface.parts:
        raise UserError(f"environment.id: a part of the observation of {where} is called {ACTION!r}; rename it")
    return {**interface.parts, ACTION: ObservationSpec("vector", (math.prod(space.shape),), torch.float32)}


def choices(space: gym.Space[Any]) -> tuple[int, ...]:
    """The number of actions of each choice in a discrete action space; empty for other spaces."""
    if isinstance(space, gym.spaces.Discrete):
        return (int(space.n),)
    return tuple(map(int, space.nvec.flatten())) if isinstance(space, gym.spaces.MultiDiscrete) else ()


def allows_each_choice(mask: Flags, sizes: Sequence[int]) -> Any:
    """True [...] where a mask [..., A] allows at least one action of each choice, of which `sizes` has the widths."""
    return np.logical_or.reduceat(mask, np.cumsum([0, *sizes[:-1]]), axis=-1).all(-1)


def _children(space: gym.spaces.Dict | gym.spaces.Tuple[Any]) -> list[tuple[str, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        return [(str(name), inner) for name, inner in space.spaces.items()]
    return [(str(index), inner) for index, inner in enumerate(space.spaces)]


def _box(space: gym.spaces.Box) -> ObservationSpec:
    shape = tuple(space.shape)
    # Images of flags, such as MinAtar's, take a byte for each flag.
    bytes_ = space.dtype == np.uint8 or (space.dtype == np.bool_ and len(shape) == 3)
    dtype = torch.uint8 if bytes_ else torch.float32
    if len(shape) > 3:
        raise UserError(
            f"environment.id: an observation of shape {list(shape)} has no encoder; boxes of up to 3 dimensions do"
        )
    image = len(shape) == 3 or (len(shape) == 2 and bytes_)
    part = ObservationSpec(
        "image" if image else "vector", shape, dtype, channels_last=len(shape) == 3 and _channels_last(shape)
    )
    if not (bytes_ and space.low.size):
        return part
    # One scale for all elements, from the lowest to the highest bound, because pixels share a unit.
    low, high = int(space.low.min()), int(space.high.max())
    return replace(part, low=low, high=max(high, low + 1))


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Guess whether the last axis of an image holds its channels.

    If exactly one pair of neighbouring axes has equal length, these are rows and columns. Otherwise channels come first
    if that axis is the shortest, else last, which is Gymnasium's convention.
    """
    first, second, third = shape
    if (first == second) != (second == third):
        return first == second
    return first >= min(second, third)


PARTS: Mapping[type, Callable[[Any], ObservationSpec]] = {
    gym.spaces.Box: _box,
    gym.spaces.Discrete: lambda space: ObservationSpec("categories", (), torch.int64, sizes=(int(space.n),)),
    gym.spaces.MultiDiscrete: lambda space: ObservationSpec(
        "categories", tuple(space.shape), torch.int64, sizes=tuple(int(n) for n in space.nvec.flatten())
    ),
    gym.spaces.MultiBinary: lambda space: ObservationSpec("vector", tuple(space.shape), torch.float32),
}
"""Function that derives the ObservationSpec from each kind of space."""


class Copies:
    """Names N environment copies, `num_envs` per agent, in errors: by agent, index and step of the episode."""

    def __init__(self, id: str, copies: int, num_envs: int) -> None:
        self.id = id
        self.count = copies
        self._num_envs = num_envs
        self._clock = 0
        self._began = np.zeros(copies, dtype=np.int64)

    def tick(self) -> None:
        """Count a step of all copies."""
        self._clock += 1

    def begin(self, copies: NDArray[np.bool_] | slice) -> None:
        """Mark the start of an episode in these copies."""
        self._began[copies] = self._clock

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step [N] that each running episode is at."""
        return self._clock - self._began

    @steps.setter
    def steps(self, steps: NDArray[np.int64]) -> None:
        self._began = self._clock - steps

    def check_finite(self, values: NDArray[Any], what: str, copy: int | None = None, below: float = np.inf) -> None:
        """Raise UserError unless all values [N, ...], or [...] of one `copy`, are finite and of a size `below` this."""
        # Squares cannot cancel, and their sum takes a fifth of the time of an elementwise check. If it overflows, the
        # elementwise check decides.
        if math.isfinite(np.vdot(values, values)):
            return
        fits = np.abs(values) < below
        if fits.all():
            return
        index = [int(number) for number in np.argwhere(~fits)[0]]
        copy, entry = (index[0], index[1:]) if copy is None else (copy, index)
        where = f"{what}, entry {entry}" if entry else what
        limit = f", and observations of a size below {below:.2g}" if below < np.inf else ""
        raise UserError(
            f"{self.source(copy)} {values[~fits][0]:.3g} {where}; rewards and observations must be finite in single "
            f"precision{limit}"
        )

    def check_choices(self, values: NDArray[Any], sizes: Sequence[int], what: str, copy: int | None = None) -> None:
        """Raise UserError if any of the integers [N, ...], or [...] of one `copy`, is out of its category range."""
        rows = values.reshape(-1, len(sizes))
        outside = ((rows < 0) | (rows >= np.asarray(sizes))).any(1)
        if not outside.any():
            return
        row = int(np.flatnonzero(outside)[0])
        raise UserError(
            f"{self.source(row if copy is None else copy)} {rows[row].tolist()} {what}; "
            f"its space has 0 to {[size - 1 for size in sizes]} (before its `start` is added)"
        )

    def source(self, copy: int) -> str:
        """The beginning of an error about what a copy gave."""
        return f"environment.id: {self.names(np.array([copy]))} gave"

    def names(self, copies: NDArray[np.int64]) -> str:
        """Describe these environments by their number and the first one's agent, index and step of the episode."""
        agent, place = divmod(int(copies[0]), self._num_envs)
        step = self._clock - self._began[copies[0]]
        others = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        return f"environment {place} of agent {agent}{others} ({self.id}, step {step} of the episode)"


class GivenObservations(Copies):
    """Observations given as a batch, not by environments; errors name them by their number in it."""

    def source(self, copy: int) -> str:
        return f"observation: number {copy} of the batch has"


MASK = "action_mask"
"""Key of the mask in the info, and name of the observation part that stores it."""


class ActionMasks:
    """Reads the action masks of N environment copies, each of which gives one in every reset and step."""

    def __init__(self, space: gym.Space[Any], copies: Copies) -> None:
        self._copies = copies
        self._sizes = choices(space)

    def read(self, info: dict[str, Any], ended: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Read the masks [N, A] of allowed actions.

        Copies [N] that have `ended`, and are reset by their next action whatever it is, may allow none or give no mask.
        Raises UserError for a missing mask or one of a wrong size, and where no action is allowed.
        """
        copies, actions = self._copies.count, sum(self._sizes)
        gives = np.array(info.get(f"_{MASK}", np.full(copies, MASK in info)), dtype=bool)
        missing = ~gives if ended is None else ~gives & ~ended
        if missing.any():
            raise UserError(
                f"environment.id: {self._copies.names(np.flatnonzero(missing))} gave no info['{MASK}'], which an "
                "earlier `reset` gave; give one in every `reset` and `step`, all 1 where every action is allowed"
            )
        if MASK not in info:
            return np.ones((copies, actions), dtype=bool)
        if np.asarray(info[MASK]).dtype == object:
            raise UserError(f"environment.id: {self._copies.id} gives info['{MASK}'] as objects; give one array")
        mask = np.array(info[MASK], dtype=bool).reshape(copies, -1)
        mask |= ~gives[:, None]
        self._check_size(mask.shape[1])
        allowed = allows_each_choice(mask, self._sizes)
        if ended is not None:
            mask[ended & ~allowed] = True
            allowed |= ended
        if not allowed.all():
            raise UserError(
                f"environment.id: {self._copies.names(np.flatnonzero(~allowed))} forbids every action "
                f"(info['{MASK}'] is all zero); at least one must be allowed"
            )
        return np.asarray(mask)

    def last(self, info: dict[str, Any], copy: int) -> NDArray[np.bool_]:
        """Read the mask [A] of one copy's final observation, or a scalar True if it allows every action.

        A mask that forbids every choice in some part of the action counts as allowing every action. Raises UserError
        for a wrong size.
        """
        final = info.get("final_info", {})
        if MASK not in final or not final.get(f"_{MASK}", np.ones(self._copies.count, dtype=bool))[copy]:
            return np.asarray(True)
        mask = np.asarray(final[MASK][copy], dtype=bool).reshape(-1)
        self._check_size(mask.size)
        allowed = allows_each_choice(mask, self._sizes)
        return mask if allowed else np.asarray(True)

    def _check_size(self, size: int) -> None:
        if size != sum(self._sizes):
            raise UserError(
                f"environment.id: {self._copies.id} gives masks of {size} actions; its space has {sum(self._sizes)}"
            )


def flat_mask(mask: Any) -> NDArray[np.bool_]:
    """The action mask of one copy [A], given as an array or as one for each part of the action."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    flat: NDArray[np.bool_] = np.concatenate([np.ravel(part) for part in parts]).astype(bool)
    return flat


def refuse_late_masks(info: dict[str, Any], id: str) -> None:
    """Raise UserError if an environment that gave no mask in `reset` gives one in `step`."""
    if MASK in info or MASK in info.get("final_info", ()):
        raise UserError(
            f"environment.id: {id} gives info['{MASK}'] in `step` but not in `reset`; it must give "
            "it in both, or an episode's first action is chosen without it"
        )


ActionReader = Callable[[NDArray[Any]], NDArray[Any]]
"""Map policy actions [N, ...] to a new array of actions [N, ...] inside the action space."""


def action_reader(space: gym.Space[Any], num_envs: int) -> ActionReader:
    """The conversion function for an action space; algorithms reject spaces other than Box and discrete ones."""
    if isinstance(space, gym.spaces.Box):
        return _box_reader(space)
    return _choice_reader(space, num_envs) if choices(space) else np.array


def _box_reader(space: gym.spaces.Box) -> ActionReader:
    whole = space.dtype.kind in "iub"
    low, high = float_bounds(space) if whole else (space.low, space.high)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # A diverged agent is stopped at its next update; until then NaN actions must not crash its environment.
        values = np.where(np.isnan(values), 0.0, values)
        # A float32 action may exceed a bound by a rounding error, and integers beyond their type's would wrap around.
        values = np.rint(values.astype(np.float64)) if whole else values.astype(space.dtype)
        return np.asarray(np.clip(values, low, high).astype(space.dtype))

    return read


def float_bounds(space: gym.spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a Box's bounds as float64, rounded inward: float64 cannot represent 2**63 - 1 and would round it up."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    # As objects, integers and floats are compared exactly.
    below, above = low.astype(object) < space.low.astype(object), high.astype(object) > space.high.astype(object)
    return np.where(below, np.nextafter(low, np.inf), low), np.where(above, np.nextafter(high, -np.inf), high)


def _choice_reader(space: Any, num_envs: int) -> ActionReader:
    """The converter for Discrete and MultiDiscrete; it raises ValueError for an out-of-range action."""
    sizes = np.array(choices(space)).reshape(space.shape)

    def read(values: NDArray[Any]) -> NDArray[Any]:
        # Atari environments hang on an out-of-range action.
        outside = (values < 0) | (values >= sizes)
        if np.count_nonzero(outside):
            wrong = int(outside.nonzero()[0][0])
            raise ValueError(
                f"agent {wrong // num_envs} chose action {values[wrong]} in environment "
                f"{wrong % num_envs}; the space has actions 0 to {(sizes - 1).tolist()}"
            )
        return from_zero(values, space)

    return read


def from_zero(values: NDArray[Any], space: Any) -> NDArray[Any]:
    """Convert choices [..., *shape], counted from 0, to a discrete space's own: from its `start`, in its dtype."""
    # Integers wrap around, so the sum is right even where `values` alone do not fit the type.
    return np.asarray(values.astype(space.dtype) + np.asarray(space.start).astype(space.dtype))


def to_zero(values: NDArray[Any], space: Any) -> NDArray[np.int64]:
    """Count choices [..., *shape] of a discrete space from 0; the inverse of `from_zero`."""
    # In a narrow type, the difference may not fit; in uint64, not the number itself.
    return np.asarray(values).astype(np.int64, copy=False) - np.asarray(space.start).astype(np.int64)


def finite_bounds(space: gym.spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bounds within those of a Box and at most 2,000 apart, from which actions can be drawn uniformly."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    low = np.maximum(low, np.minimum(high, 1e3) - 2e3)
    return low, np.minimum(high, low + 2e3)


RESERVED = (ACTION, MASK, "state", "next_state")
"""Names of an exported network's other inputs and its outputs."""


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


def input_name(part: str) -> str:
    """Return a part's name as an ONNX input, with a prefix if it is `RESERVED` or begins with a digit (tuples)."""
    return f"{WHOLE}.{part}" if part[:1].isdigit() or part in RESERVED else part


def flattened(observation: Any, name: str = "") -> dict[str, Any]:
    """Flatten a nested observation to its unmodified parts by name: `camera`, `arm.angles`, or `observation`."""
    if isinstance(observation, Mapping | tuple):
        entries: dict[str, Any] = {}
        children = observation.items() if isinstance(observation, Mapping) else enumerate(observation)
        for child, inner in children:
            entries |= flattened(inner, f"{name}.{child}" if name else str(child))
        return entries
    return {name or WHOLE: observation}


TYPES = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}


class ObservationReader:
    """Converts batched observations of one space into named arrays, as specified by `parts`."""

    def __init__(self, settings: Environment, space: gym.Space[Any], copies: Copies, frames: int) -> None:
        """Determine the parts; in images, `frames` are stacked on the first axis (0: none are).

        Raises UserError if a part has no encoder or the settings do not fit the space.
        """
        self._space = space
        self._copies = copies
        self._indices = None if settings.observation_indices is None else list(settings.observation_indices)
        chosen = space if self._indices is None else _picked(space, self._indices, settings.id)
        self.parts: ObservationSpecs = _specs(settings, chosen, frames)
        self._types = {name: TYPES[part.dtype] for name, part in self.parts.items()}

    def read(self, observation: Any, copy: int | None = None) -> dict[str, NDArray[Any]]:
        """Copies of the parts [N, ...] of batched observations, or [...] of one `copy`'s final observation.

        They are copied because vector environments may reuse the returned array, and some return it transposed. Raises
        UserError for values that are not finite or too large, and for categories out of range.
        """
        parts = split(self._space, observation)
        if self._indices is not None:
            parts = {name: array[..., self._indices] for name, array in parts.items()}
        read = {name: np.array(array, dtype=self._types[name], order="C") for name, array in parts.items()}
        which = "the observation" if copy is None else "the last observation"
        for name, array in read.items():
            if array.dtype == np.float32:
                self._copies.check_finite(array, f"in part {name!r} of {which}", copy, LARGEST)
            elif sizes := self.parts[name].sizes:
                self._copies.check_choices(array, sizes, f"in part {name!r} of {which}", copy)
        return read


def _specs(settings: Environment, space: gym.Space[Any], frames: int) -> ObservationSpecs:
    """The observation specs of a space, whose `frames` and first axes are channels where the environment says so."""
    parts = observation_specs(space)
    if MASK in parts:
        raise UserError(f"environment.id: {settings.id} has an observation part named {MASK!r}")
    if frames:
        return {name: replace(part, frames=frames, channels_last=False) for name, part in parts.items()}
    if not settings.id.startswith(CHANNELS_FIRST):
        return parts
    return {name: replace(part, channels_last=False) if len(part.shape) == 3 else part for name, part in parts.items()}


def _picked(space: gym.Space[Any], indices: list[int], id: str) -> gym.Space[Any]:
    """The space of selected vector components. Raises UserError for a non-vector or an index out of range."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise UserError(f"environment.observation_indices: they select entries of a vector; {id} has {space}")
    if max(indices) >= space.shape[0]:
        last = space.shape[0] - 1
        raise UserError(f"environment.observation_indices: index {max(indices)} is out of range; {id} has 0 to {last}")
    return gym.spaces.Box(space.low[indices], space.high[indices], dtype=space.dtype.type)
