"""`evorl check`: checks an environment before training in it, with one verdict per line.

Axes: P agents (here 1), E environments of each, A actions of all choices concatenated.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.passive_env_checker import env_render_passive_checker
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import ALGORITHMS, SETTINGS, make_algorithm
from evorl.config import AnyConfig, Environment, validate
from evorl.config.errors import on_one_line
from evorl.config.yaml import OF_ALGORITHM, assignment, configuration_file, override, read_yaml
from evorl.envs import Environments
from evorl.envs.closing import close_vector
from evorl.envs.diagnosis import check_start, check_step, overwritten, wide_bounds
from evorl.envs.games import is_game
from evorl.envs.guard import flat_mask
from evorl.envs.spaces import LARGEST, MASK, EnvSpec, ObservationSpecs, choices, finite_bounds, observation_specs
from evorl.envs.suites import SeededGame
from evorl.envs.vector import make_vector, stacked_frames, vectorization_of
from evorl.population import check_memory
from evorl.seeding import numpy_generator
from evorl.system.console import aligned, compact
from evorl.system.plugins import described
from evorl.types import RunFailed, UserError

SEED = 123
COMPARED = 200
"""Maximum number of steps in which two copies are compared."""
SECONDS = 0.5
"""Time for which steps are counted, for each number of copies."""
SLOW = 1_000
"""Steps per second of one copy below which worker processes may be faster."""
COLOUR = re.compile("\x1b\\[[0-9;]*m(WARN: |ERROR: )?")
NEEDED = ("interface", "spaces")
"""Checks that must pass for those after them to make sense."""
Level = Literal["pass", "warn", "fail"]


class Verdict(NamedTuple):
    """The outcome of a check, and what was found or would be right."""

    level: Level
    text: str


Named = tuple[str, Verdict]
"""A verdict under its name."""


@dataclass
class Played:
    """The outcome of random episodes of one copy: counts, and the first finding on each subject."""

    steps: int = 0
    ended: int = 0
    truncated: int = 0
    longest: int = 0
    rewards: list[float] = field(default_factory=list)
    found: dict[str, Verdict] = field(default_factory=dict)
    changes: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For each part of the observation, [2, ...]: how often each entry has changed within an episode, and how often
    that is lost in single precision."""

    def note(self, subject: str, level: Level, text: str) -> None:
        """Record a finding, unless one at least as severe is already known."""
        if subject not in self.found or (level == "fail" and self.found[subject].level == "warn"):
            self.found[subject] = Verdict(level, f"{text} (step {self.steps})")


class Subject:
    """The environment being checked: its settings, and one copy `env` without evorl's wrappers."""

    def __init__(self, settings: Environment, steps: int) -> None:
        """Make the copy. Raises UserError if that fails."""
        self.settings = settings
        self.steps = steps
        # Single copies of Atari do not know the options of its native vectorization.
        native = {"kwargs": {}, "life_loss_ends": False} if stacked_frames(settings) else {}
        self._vector = make_vector(settings.model_copy(update={"vectorization": "sync", **native}), 1)
        self.env: gym.Env[Any, Any] = self._vector.envs[0].env  # type: ignore[attr-defined]

    def close(self) -> None:
        close_vector(self._vector, self.settings.id)

    @contextmanager
    def another(self) -> Iterator[gym.Env[Any, Any]]:
        """Another copy, which is closed afterwards."""
        other = Subject(self.settings, self.steps)
        try:
            yield other.env
        finally:
            other.close()

    def played(self) -> Played:
        """Play random episodes of `steps` steps in all, and note what is wrong in them."""
        env, id, played = self.env, self.settings.id, Played()
        parts = observation_specs(env.observation_space)
        env.action_space.seed(SEED)
        last: tuple[Any, dict[str, Any]] | None = None
        copied: Any = None
        length, ended = 0, True
        while played.steps < self.steps:
            if ended:
                start = env.reset(seed=SEED if played.steps == 0 else None)
                if finding := check_start(start, env.observation_space, id):
                    played.note("observations", "warn", finding)
                if last is not None and overwritten(last[0], copied):
                    text = "a reset overwrites the last observation of the episode before; return a copy"
                    played.note("returned data", "fail", text)
                last, copied, length = start, deepcopy(start[0]), 0
            assert last is not None
            step = env.step(_sample(env.action_space, last[1].get(MASK)))
            played.steps, length = played.steps + 1, length + 1
            _count_changes(played, parts, env.observation_space, copied, step[0])
            _note_step(played, step, last[1], overwritten(last[0], copied), env.observation_space, id)
            last, copied, ended = (step[0], step[4]), deepcopy(step[0]), bool(step[2]) or bool(step[3])
            played.ended += ended
            played.truncated += bool(step[3]) and not step[2]
            played.longest = max(played.longest, length)
        self._note_precision(played)
        return played

    def _note_precision(self, played: Played) -> None:
        """Note an observed number of which most changes are lost in single precision, if there is one."""
        indices = self.settings.observation_indices
        for name, (changed, lost) in played.changes.items():
            for entry in np.argwhere(2 * lost > changed).tolist():
                if indices is None or entry[0] in indices:
                    played.found["precision"] = Verdict(
                        "warn",
                        f"entry {entry} of part {name!r} of the observation changes in {changed[tuple(entry)]} steps, "
                        f"but in {lost[tuple(entry)]} of them not in single precision, in which networks compute; give "
                        "it relative to the start of the episode",
                    )
                    return


def _count_changes(played: Played, parts: ObservationSpecs, space: gym.Space[Any], before: Any, after: Any) -> None:
    """Count the entries that change from one observation to the next, before and after their conversion to float32."""
    for (name, part), (one, _), (other, _) in zip(
        parts.items(), _leaves(space, before), _leaves(space, after), strict=True
    ):
        if part.dtype == torch.float32:
            first, second = np.asarray(one), np.asarray(other)
            changed = first != second
            lost = changed & (first.astype(np.float32) == second.astype(np.float32))
            played.changes[name] = played.changes.get(name, np.int64(0)) + np.stack([changed, lost])


def _note_step(
    played: Played,
    step: tuple[Any, ...],
    info: dict[str, Any],
    overwrites: bool,
    space: gym.Space[Any],
    id: str,
) -> None:
    """Note what is wrong in one step. Raises UserError if it cannot be used at all.

    `info` is that of the previous step; `overwrites` says whether this step has changed the previous observation.
    """
    check_step((*step[:2], bool(step[2]), bool(step[3]), step[4]), space, id)
    for part, inner in _leaves(space, step[0]):
        array = np.asarray(part)
        if np.issubdtype(array.dtype, np.floating) and not (np.abs(array) < LARGEST).all():
            wrong = array[~(np.abs(array) < LARGEST)][0]
            text = f"an observation holds {wrong}; it must be finite, and of a size below {LARGEST:.2g}"
            played.note("observations", "fail", text)
        elif part not in inner:
            same = array.dtype == inner.dtype
            wrong = "has values outside" if same else f"is of {array.dtype}, not the {inner.dtype} of"
            played.note("observations", "warn", f"an observation {wrong} its space {inner}")
    reward = float(step[1])
    if not np.isfinite(np.float32(reward)):
        played.note("rewards", "fail", f"a reward is {reward}; it must be finite in single precision")
    played.rewards.append(reward)
    for name, value in (("terminated", step[2]), ("truncated", step[3])):
        if not isinstance(value, bool | np.bool_):
            played.note("end flags", "fail", f"{name} is {value!r}, not a bool")
    if (MASK in info) != (MASK in step[4]) and not (step[2] or step[3]):
        one, other = ("reset", "step") if MASK in info else ("step", "reset")
        text = (
            f"{one} gives info['{MASK}'], but {other} does not; give one in both, all 1 where every action is allowed"
        )
        played.note("action masks", "fail", text)
    if overwrites:
        played.note("returned data", "warn", "two steps return the same array; return a copy")
    elif info is step[4] and step[4]:
        played.note("returned data", "warn", "two steps return the same info dictionary; return a new one")


def check(parsed: argparse.Namespace) -> None:
    """`evorl check`. Raises RunFailed if a check fails."""
    # SDL, which renders for Gymnasium, fails without a display.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    settings = settings_of(parsed.environment, parsed.settings).environment
    if is_game(settings.id):
        raise UserError(f"environment: {settings.id} is a game of several seats; a run checks it when it begins")
    rows = [(level, name, on_one_line(text)) for name, (level, text) in verdicts(settings, parsed.steps)]
    print("\n".join(aligned(rows)))
    failed = sum(level == "fail" for level, _, _ in rows)
    if failed:
        raise RunFailed(f"{failed} check{'s' if failed > 1 else ''} of {settings.id} failed")


def settings_of(id: str, words: list[str]) -> AnyConfig:
    """A configuration with this environment, its keyword arguments, and keys of `environment`. Raises UserError."""
    keys = [word if word.startswith("environment.") else f"environment.kwargs.{word}" for word in words]
    return validate(override({"environment": {"id": id}}, keys), SETTINGS)


def verdicts(settings: Environment, steps: int) -> Iterator[Named]:
    """Yield every verdict with its name; stop early if no copy can be made, or if a check in `NEEDED` raises."""
    try:
        subject = Subject(settings, steps)
    except UserError as error:
        yield "made", Verdict("fail", _without_key(error))
        return
    kind = type(subject.env.unwrapped)
    yield "made", Verdict("pass", f"{kind.__qualname__} of {kind.__module__}")
    try:
        for name, examine in CHECKS.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = examine(subject)
            except UserError as error:
                yield name, Verdict("fail", _without_key(error))
            except Exception as error:  # Environments may raise anything.
                yield name, Verdict("fail", f"raised {described(error)}")
            else:
                yield from found
                continue
            if name in NEEDED:
                return
    finally:
        subject.close()


def _first_step(subject: Subject) -> list[Named]:
    """A reset and a step as in training, by evorl's vectorization."""
    with Environments(subject.settings, 1, 1) as environments:
        environments.try_step()
    return [("interface", Verdict("pass", "reset and step follow Gymnasium's interface"))]


def _gymnasium(subject: Subject) -> list[Named]:
    """Gymnasium's own checks: each of its warnings, and its first error. Only `rgb_array` rendering is checked."""
    # SeededGame repairs MinAtar's games, but Gymnasium would advise checking the unwrapped environment.
    inner = subject.env if isinstance(subject.env, SeededGame) else subject.env.unwrapped
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(inner, skip_render_check=True)
            if inner.spec is not None and "rgb_array" in inner.metadata.get("render_modes", ()):
                with inner.spec.make(render_mode="rgb_array") as shown:
                    shown.reset(seed=SEED)
                    env_render_passive_checker(shown)
            failed = []
        except (AssertionError, gym.error.Error) as error:
            failed = [Verdict("fail", _plain(str(error)))]
    texts = dict.fromkeys(_plain(str(each.message)) for each in caught if COLOUR.match(str(each.message)))
    if isinstance(inner, SeededGame):
        texts = {text: None for text in texts if "different from the unwrapped version" not in text}
    found = [*(Verdict("warn", text) for text in texts), *failed]
    found = found or [Verdict("pass", "gymnasium.utils.env_checker.check_env finds nothing")]
    return [("gymnasium", verdict) for verdict in found]


def _spaces(subject: Subject) -> list[Named]:
    """The algorithms that can act in the action space and read the observations."""
    with Environments(subject.settings, 1, 1) as environments:
        interface = environments.interface
    able, refusal = [], ""
    task = assignment("environment.id", subject.settings.id)
    for name in ALGORITHMS:
        try:
            shipped = read_yaml(configuration_file(name, [task]))
            own = {section: shipped[section] for section in ("network", *OF_ALGORITHM) if section in shipped}
            environment = subject.settings.model_dump(mode="json", exclude_unset=True)
            config = validate({**own, "environment": environment}, SETTINGS)
            check_memory(config, make_algorithm(config, interface))
            able.append(name)
        except UserError as error:
            refusal = refusal or _without_key(error)
    if not able:
        raise UserError(f"no algorithm takes it: {refusal}")
    parts = ", ".join(f"{name} ({part.kind} {list(part.shape)})" for name, part in interface.parts.items())
    masked = " with masks" if interface.masked else ""
    verdict = Verdict("pass", f"{parts}; {interface.action}{masked}; for {', '.join(able)}")
    wide = wide_bounds(interface.action, subject.settings.id)
    return [("spaces", verdict), *([("spaces", Verdict("warn", wide))] if wide else [])]


def _seeding(subject: Subject) -> list[Named]:
    """Two copies with the same seed and actions, compared step by step over several episodes."""
    return [("seeding", _compared(subject))]


def _compared(subject: Subject) -> Verdict:
    known = subject.env.unwrapped.spec
    level: Level = "warn" if known is not None and known.nondeterministic else "fail"
    advice = "take all randomness from self.np_random, after super().reset(seed=seed)"
    count = min(subject.steps, COMPARED)
    with subject.another() as one, subject.another() as two:
        starts = one.reset(seed=SEED), two.reset(seed=SEED)
        space = one.observation_space
        if not _same(space, starts[0][0], starts[1][0]):
            return Verdict(level, f"resets with the same seed give different observations; {advice}")
        one.action_space.seed(SEED)
        mask = starts[0][1].get(MASK)
        for step in range(count):
            action = _sample(one.action_space, mask)
            first, second = one.step(action), two.step(action)
            paid = np.array_equal(np.asarray(first[1]), np.asarray(second[1]), equal_nan=True)
            alike = _same(space, first[0], second[0]) and paid
            if not alike or (first[2], first[3]) != (second[2], second[3]):
                return Verdict(level, f"copies with the same seed and actions differ in step {step + 1}; {advice}")
            mask = first[4].get(MASK)
            if first[2] or first[3]:
                mask = one.reset()[1].get(MASK)
                two.reset()
    return Verdict("pass", f"two copies with the same seed and actions are equal for {count} steps")


def _episodes(subject: Subject) -> list[Named]:
    """The first findings of random episodes on each subject, then how they ended."""
    played = subject.played()
    low, high = min(played.rewards), max(played.rewards)
    fine = {
        "observations": "in their space, of its shape and type",
        "rewards": f"finite, {low:.4g} to {high:.4g}",
        "end flags": "terminated and truncated are bools",
        "returned data": "each call returns new arrays",
    }
    passed = {name: Verdict("pass", f"{text}, in {played.steps} random steps") for name, text in fine.items()}
    return [*(passed | played.found).items(), ("time limit", _limit(subject, played))]


def _limit(subject: Subject, played: Played) -> Verdict:
    """The verdict on the lengths of episodes."""
    known = subject.env.spec.max_episode_steps if subject.env.spec is not None else None
    episodes = f"ended episodes: {played.ended}, the longest of {played.longest} steps"
    if known is not None:
        return Verdict("pass", f"{episodes}; the time limit is {known} steps")
    if played.truncated:
        return Verdict("pass", f"{episodes}; truncated: {played.truncated}")
    advice = "register it with max_episode_steps, or return truncated=True, unless all episodes terminate"
    return Verdict("warn", f"{episodes}; truncated: none; {advice}")


def _resuming(subject: Subject) -> list[Named]:
    """Running episodes saved and replayed by other copies, as when a run is resumed, then continued by both."""
    return [("resuming", _replayed(subject))]


def _replayed(subject: Subject) -> Verdict:
    count = min(subject.steps, COMPARED)
    with Environments(subject.settings, 1, 2) as before, Environments(subject.settings, 1, 2) as after:
        if not before.can_continue:
            return Verdict("warn", "running episodes cannot be saved: a resumed run begins new ones")
        before.reset(SEED)
        rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
        for _ in range(count):
            before.step(_actions(before.interface, before.observation.get(MASK), 2, rng))
        if lost := after.load_state_dict(before.state_dict(), SEED + 1):
            return Verdict("warn", f"a resumed run begins new episodes: {lost} gave other observations when replayed")
        for step in range(count):
            action = _actions(before.interface, before.observation.get(MASK), 2, rng)
            one, two = before.step(action), after.step(action)
            same = torch.equal(one.reward, two.reward) and all(
                torch.equal(value, two.next_observation[name]) for name, value in one.next_observation.items()
            )
            if not same:
                return Verdict("warn", f"a resumed run is not exact: replayed episodes differ {step + 1} steps later")
    return Verdict("pass", f"episodes are replayed exactly, and go on alike for {count} steps")


def _speed(subject: Subject) -> list[Named]:
    """Steps per second of 1 and of 8 copies, vectorised as a run would."""
    rates = {copies: _rate(subject.settings, copies) for copies in (1, 8)}
    mode = vectorization_of(subject.settings)
    each = ", ".join(f"{compact(rate)} steps/s with {n} cop{'y' if n == 1 else 'ies'}" for n, rate in rates.items())
    slow = rates[1] < SLOW and mode == "sync"
    more = "; environment.vectorization=async may be faster on several cores" if slow else ""
    return [("speed", Verdict("pass", f"{each} ({mode}){more}"))]


def _rate(settings: Environment, copies: int) -> float:
    rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
    with Environments(settings, 1, copies) as environments:
        environments.reset(SEED)
        # The first step may compile or load something.
        count, began, seconds = -copies, time.perf_counter(), 0.0
        while seconds < SECONDS or count <= 0:
            environments.step(_actions(environments.interface, environments.observation.get(MASK), copies, rng))
            count += copies
            began = began if count else time.perf_counter()
            seconds = time.perf_counter() - began
    return count / seconds


def _actions(interface: EnvSpec, mask: Tensor | None, copies: int, rng: np.random.Generator) -> Tensor:
    """Random actions [1, E, ...] in an algorithm's format; with a mask [1, E, A], only allowed ones."""
    space = interface.action
    if sizes := choices(space):
        allowed = np.ones((copies, sum(sizes))) if mask is None else mask[0].numpy(force=True).astype(float)
        drawn = rng.random(allowed.shape) * allowed
        ends = np.cumsum(sizes)
        best = [drawn[:, end - size : end].argmax(1) for size, end in zip(sizes, ends, strict=True)]
        return torch.from_numpy(np.stack(best, axis=-1).reshape(1, copies, *(space.shape or ())))
    if not isinstance(space, gym.spaces.Box):
        raise UserError(f"environment.id: no algorithm acts in {space}")
    return torch.from_numpy(rng.uniform(*finite_bounds(space), (1, copies, *space.shape)).astype(np.float32))


def _sample(space: gym.Space[Any], mask: Any) -> Any:
    """A random action of one environment; one that its mask [A], if any, allows."""
    if mask is None or not (sizes := choices(space)):
        return space.sample()
    flat = flat_mask(mask).astype(np.int8)
    if isinstance(space, gym.spaces.Discrete):
        return space.sample(mask=flat)
    parts: list[Any] = np.split(flat, np.cumsum(sizes)[:-1])
    # Gymnasium nests masks as `nvec` is nested.
    for length in reversed((space.shape or ())[1:]):
        parts = [tuple(parts[first : first + length]) for first in range(0, len(parts), length)]
    return space.sample(mask=tuple(parts))


def _leaves(space: gym.Space[Any], observation: Any) -> Iterator[tuple[Any, gym.Space[Any]]]:
    """The parts of an observation, each with its space."""
    if isinstance(space, gym.spaces.Dict):
        for name, inner in space.spaces.items():
            yield from _leaves(inner, observation[name])
    elif isinstance(space, gym.spaces.Tuple):
        for inner, part in zip(space.spaces, observation, strict=True):
            yield from _leaves(inner, part)
    else:
        yield observation, space


def _same(space: gym.Space[Any], one: Any, other: Any) -> bool:
    """True if two observations are equal; NaN equals NaN, which is another check's finding."""
    pairs = zip(_leaves(space, one), _leaves(space, other), strict=True)
    arrays = ((np.asarray(first), np.asarray(second)) for (first, _), (second, _) in pairs)
    return all(np.array_equal(*pair, equal_nan=pair[0].dtype.kind == "f") for pair in arrays)


def _plain(text: str) -> str:
    """Gymnasium's message without colours, on one line."""
    return " ".join(COLOUR.sub("", text).split())


def _without_key(error: UserError) -> str:
    return str(error).removeprefix("environment.id: ")


CHECKS: Mapping[str, Callable[[Subject], list[Named]]] = {
    "interface": _first_step,
    "spaces": _spaces,
    "gymnasium": _gymnasium,
    "seeding": _seeding,
    "episodes": _episodes,
    "resuming": _resuming,
    "speed": _speed,
}
"""All checks in order, by the name that labels an error raised in one; each returns one or more verdicts."""
