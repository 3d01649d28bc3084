"""`evorl check`: checks an environment before training in it, with one verdict per line.

Gymnasium's checker examines one copy; everything else is what a run would do and say. Axes: P agents (here 1),
E environments of each, A actions of all choices concatenated, N copies of a simulator.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.passive_env_checker import env_render_passive_checker
from torch import Tensor

from evorl.algorithms import ALGORITHMS, make_algorithm
from evorl.config import AnyConfig, Environment, validate
from evorl.config.task import OF_ALGORITHM
from evorl.config.yaml import assignment, configuration_file, override, read_yaml
from evorl.envs import SteppedEnvironments, make_environments
from evorl.envs.faults.closing import close_vector
from evorl.envs.games import is_game
from evorl.envs.games.players import random_moves
from evorl.envs.generation import longest_episode
from evorl.envs.spaces import MASK, EnvSpec, choices, known_kind, to_zero, wide_bounds
from evorl.envs.suites import SeededGame
from evorl.envs.tensor.observations import action_converter, leaves
from evorl.envs.tensor.simulator import Simulator, Step
from evorl.envs.tensor.sources import device_of, is_tensor, reserve, shared_simulator
from evorl.envs.vector import make_vector, spec_of, stacked_frames, vectorization_of
from evorl.networks import small_image_setting
from evorl.networks.distributions import DISTRIBUTIONS
from evorl.population import check_memory
from evorl.seeding import numpy_generator
from evorl.system.console import aligned, compact
from evorl.system.plugins import described
from evorl.types.batches import Transition
from evorl.types.messages import on_one_line
from evorl.types.outcomes import RunFailed, UserError

SEED = 123
COPIES = 64
"""Copies of a simulator that is checked."""
COMPARED = 200
"""Maximum number of steps before and after a replay of episodes."""
SECONDS = 0.5
"""Time for which steps are counted, for each number of copies."""
SLOW = 1_000
"""Steps per second of one copy below which worker processes may be faster."""
COLOUR = re.compile("\x1b\\[[0-9;]*m(WARN: |ERROR: )?")
NEEDED = ("interface", "spaces")
"""Checks that must pass for those after them to make sense."""
Act = Callable[[Simulator], Tensor]
"""Draws random actions [N, ...] for all copies of a simulator."""


class Verdict(NamedTuple):
    """The outcome of a check, and what it saw or what would be right."""

    level: Literal["pass", "warn", "fail"]
    text: str


def check(parsed: argparse.Namespace) -> None:
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
    return validate(override({"environment": {"id": id}}, keys))


def verdicts(settings: Environment, steps: int) -> Iterator[tuple[str, Verdict]]:
    """Yield every verdict with its name; stop early if a check in `NEEDED` fails.

    The first error of the environment is the verdict, in the words of a run.
    """
    if is_tensor(settings.id):
        reserve(settings, COPIES, device_of(settings))
    for name, examine in (CHECKS_OF_SIMULATORS if is_tensor(settings.id) else CHECKS).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = examine(settings, steps)
        except UserError as error:
            results = [Verdict("fail", _without_key(error))]
        except Exception as error:  # Environments may raise anything.
            results = [Verdict("fail", f"raised {described(error)}")]
        yield from ((name, verdict) for verdict in results)
        if name in NEEDED and results[0].level == "fail":
            return


def _interface(settings: Environment, steps: int) -> list[Verdict]:
    """A reset and a step as in training."""
    with make_environments(settings, 1, 1, device_of(settings)) as environments:
        # An action space in which no algorithm acts is reported with the spaces.
        steps_too = known_kind(environments.interface.action, DISTRIBUTIONS) is not None
        if steps_too:
            environments.try_step()
    return [Verdict("pass", f"{'reset and step follow' if steps_too else 'reset follows'} Gymnasium's interface")]


def _spaces(settings: Environment, steps: int) -> list[Verdict]:
    """The algorithms that can act in the action space and read the observations."""
    with make_environments(settings, 1, 1, device_of(settings)) as environments:
        interface = environments.interface
    able, refusal = [], ""
    task = assignment("environment.id", settings.id)
    for name in ALGORITHMS:
        try:
            shipped = read_yaml(configuration_file(name, [task]))
            sections = {section: shipped[section] for section in ("network", *OF_ALGORITHM) if section in shipped}
            environment = settings.model_dump(mode="json", exclude_unset=True)
            config = validate({**sections, "environment": environment})
            if is_tensor(settings.id) and config.actors is not None:
                continue  # Actor processes step environments of their own.
            check_memory(config, make_algorithm(config, interface))
            able.append(name)
        except UserError as error:
            refusal = refusal or _without_key(error)
    if not able:
        raise UserError(f"no algorithm takes it: {refusal}")
    parts = ", ".join(
        f"{name} ({part.kind} {list(part.sizes or part.shape)})" for name, part in interface.parts.items()
    )
    masked = " with masks" if interface.masked else ""
    setting = small_image_setting(interface.parts)
    small = f"; small images get {setting}" if setting else ""
    verdict = Verdict("pass", f"{parts}; {interface.action}{masked}; for {', '.join(able)}{small}")
    wide = wide_bounds(interface.action, settings.id)
    return [verdict, *([Verdict("warn", wide)] if wide else [])]


def _take_allowed_actions(env: gym.Env[Any, Any]) -> None:
    """Let it take a random action that its mask allows for each of Gymnasium's, which are drawn without masks."""
    mask: Any = None

    def seen(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal mask
            *result, info = function(*arguments, **options)
            mask = info.get(MASK, mask)
            return *result, info

        return call

    def allowed() -> Any:
        # The same in the same state, since Gymnasium compares steps.
        rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
        return random_moves(env.action_space, np.asarray(mask, dtype=bool).reshape(1, -1), [rng])[0]

    step = seen(env.step)
    env.reset = seen(env.reset)  # type: ignore[method-assign]
    env.step = lambda _: step(allowed())  # type: ignore[method-assign, assignment]


def _gymnasium(settings: Environment, steps: int) -> list[Verdict]:
    """Gymnasium's own checks: each of its warnings, and its first error. Only `rgb_array` rendering is checked."""
    if spec_of(settings).entry_point is None:
        return [Verdict("warn", "only a vector environment is registered, which Gymnasium's checks do not take")]
    # Single copies of Atari do not know the options of its native vectorization.
    native = {"kwargs": {}, "life_loss_ends": False} if stacked_frames(settings) else {}
    vector = make_vector(settings.model_copy(update={"vectorization": "sync", **native}), 1)
    env: gym.Env[object, object] = vector.envs[0].env  # type: ignore[attr-defined]
    # SeededGame repairs MinAtar's games, but Gymnasium would advise checking the unwrapped environment.
    inner = env if isinstance(env, SeededGame) else env.unwrapped
    failed = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if MASK in inner.reset(seed=SEED)[1]:
                _take_allowed_actions(inner)
            check_env(inner, skip_render_check=True)
            if inner.spec is not None and "rgb_array" in inner.metadata.get("render_modes", ()):
                with inner.spec.make(render_mode="rgb_array") as shown:
                    shown.reset(seed=SEED)
                    env_render_passive_checker(shown)
        except TypeError as error:
            if "render_mode" not in str(error):
                raise
            failed.append(Verdict("warn", "cannot be filmed: its constructor takes no `render_mode`"))
        except (AssertionError, gym.error.Error) as error:
            failed.append(Verdict("fail", _plain(str(error))))
        finally:
            close_vector(vector, settings.id)
    texts = dict.fromkeys(_plain(str(warning.message)) for warning in caught if COLOUR.match(str(warning.message)))
    if isinstance(inner, SeededGame):
        texts = {text: None for text in texts if "different from the unwrapped version" not in text}
    results = [*(Verdict("warn", text) for text in texts), *failed]
    return results or [Verdict("pass", "gymnasium.utils.env_checker.check_env finds nothing")]


def _episodes(settings: Environment, steps: int) -> list[Verdict]:
    """Random episodes: a run ends where one of them has a fault. Warn if nothing would end an episode."""
    rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
    lowest, highest, taken, ended, truncated = np.inf, -np.inf, 0, 0, 0
    with make_environments(settings, 1, 1, device_of(settings)) as environments:
        environments.reset(SEED)
        for _ in range(steps):
            now = _random_step(environments, rng)
            if not bool(now.valid):  # A native vector's step that resets.
                continue
            taken += 1
            reward = float(now.reward)
            lowest, highest = min(lowest, reward), max(highest, reward)
            ended += int(now.terminated | now.truncated)
            truncated += int(now.truncated)
    limit = longest_episode(settings)
    text = (
        f"observations and rewards are finite in {taken} random steps, rewards {lowest:.4g} to {highest:.4g}; "
        f"ended episodes: {ended}, truncated: {truncated}"
    )
    if limit is not None:
        return [Verdict("pass", f"{text}; the time limit is {limit} steps")]
    if truncated:
        return [Verdict("pass", text)]
    advice = "register it with max_episode_steps, or return truncated=True, unless all episodes terminate"
    return [Verdict("warn", f"{text}; {advice}")]


def _resuming(settings: Environment, steps: int) -> list[Verdict]:
    """Running episodes saved and replayed by other copies, as when a run is resumed, then continued by both."""
    count = min(steps, COMPARED)
    device = device_of(settings)
    made = (make_environments(settings, 1, 2, device) for _ in range(2))
    with next(made) as before, next(made) as after:
        if not before.can_continue:
            return [Verdict("warn", "running episodes cannot be saved: a resumed run begins new ones")]
        before.reset(SEED)
        rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
        for _ in range(count):
            _random_step(before, rng)
        if lost := after.load_state_dict(before.state_dict(), SEED + 1):
            return [Verdict("warn", f"a resumed run begins new episodes: {lost} gave other observations when replayed")]
        for step in range(count):
            action = _actions(before.interface, before.observation.get(MASK), 2, rng)
            one, two = before.step(action), after.step(action)
            same = torch.equal(one.reward, two.reward) and all(
                torch.equal(value, two.next_observation[name]) for name, value in one.next_observation.items()
            )
            if not same:
                return [Verdict("warn", f"a resumed run is not exact: replayed episodes differ {step + 1} steps later")]
    return [Verdict("pass", f"episodes are replayed exactly, and go on alike for {count} steps")]


def _speed(settings: Environment, steps: int) -> list[Verdict]:
    """Steps per second of 1 and of 8 copies, vectorised as a run would."""
    simulated = is_tensor(settings.id)
    rates = {copies: _rate(settings, copies) for copies in ((COPIES,) if simulated else (1, 8))}
    mode = "a simulator" if simulated else vectorization_of(settings)
    texts = (f"{compact(rate)} steps/s with {n} cop{'y' if n == 1 else 'ies'}" for n, rate in rates.items())
    slow = mode == "sync" and rates[1] < SLOW
    more = "; environment.vectorization=async may be faster on several cores" if slow else ""
    return [Verdict("pass", f"{', '.join(texts)} ({mode}){more}")]


def _rate(settings: Environment, copies: int) -> float:
    rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
    with make_environments(settings, 1, copies, device_of(settings)) as environments:
        environments.reset(SEED)
        _random_step(environments, rng)  # It may compile or load something.
        count, began, seconds = 0, time.perf_counter(), 0.0
        while seconds < SECONDS or not count:
            _random_step(environments, rng)
            count += copies
            seconds = time.perf_counter() - began
    return count / seconds


def _random_step(environments: SteppedEnvironments, rng: np.random.Generator) -> Transition:
    mask = environments.observation.get(MASK)
    return environments.step(_actions(environments.interface, mask, environments.num_envs, rng))


def _actions(interface: EnvSpec, mask: Tensor | None, copies: int, rng: np.random.Generator) -> Tensor:
    """Random actions [1, E, ...] in an algorithm's format; with a mask [1, E, A], only allowed ones."""
    space, allowed = interface.action, None if mask is None else mask[0].numpy(force=True)
    moves = random_moves(space, allowed, [rng] * copies)
    return torch.from_numpy(to_zero(moves, space) if choices(space) else moves.astype(np.float32))[None]


def _plain(text: str) -> str:
    return " ".join(COLOUR.sub("", text).split())


def _without_key(error: UserError) -> str:
    """The message without its leading key."""
    return str(error).removeprefix("environment.id: ")


CHECKS: Mapping[str, Callable[[Environment, int], list[Verdict]]] = {
    "interface": _interface,
    "spaces": _spaces,
    "gymnasium": _gymnasium,
    "episodes": _episodes,
    "resuming": _resuming,
    "speed": _speed,
}
"""All checks in order, by name; each takes the settings and a number of steps, and returns one or more verdicts."""


def _of_simulator(
    examine: Callable[[Simulator, Act, int], list[Verdict]], settings: Environment, steps: int
) -> list[Verdict]:
    """A check of a simulator alone, which all of these share, with random actions."""
    simulator = shared_simulator(settings, COPIES, device_of(settings)).simulator
    rng = numpy_generator(SEED, generation=0, rank=0, purpose="check")
    interface = EnvSpec(settings.id, {}, simulator.action_space)
    converted = action_converter(simulator.action_space, simulator.device)

    def act(simulator: Simulator) -> Tensor:
        return converted(_actions(interface, None, simulator.copies, rng)[0].to(simulator.device))

    return examine(simulator, act, steps)


def _resets(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
    """Describe the reset mode, and check that the last observations of episodes are those of their last steps."""
    mode = "within the step that ends an episode" if simulator.in_step else "in the step after the one that ends it"
    declared = Verdict("pass", f"copies are reset {mode}, as declared")
    before = _flat(simulator, simulator.reset(_seeds(simulator)))
    last_count, kinds = 0, ("terminations", "truncations")
    # By kind of end: all of them, those whose last observation is the next episode's first, and those where that is not
    # also the observation before.
    counts = torch.zeros(3, len(kinds), dtype=torch.int64)
    for _ in range(steps):
        step = simulator.step(act(simulator))
        over, now = step.terminated | step.truncated, _flat(simulator, step.observation)
        if count := int(over.sum()):
            shown = now if step.last is None else _flat(simulator, step.last)
            last_count += 0 if step.last is None else count
            of_kind = torch.stack((step.terminated, step.truncated & ~step.terminated))
            same, moved = (shown == now).all(1), (now != before).any(1)
            counts += torch.stack((of_kind, of_kind & same, of_kind & same & moved)).sum(2).cpu()
        before = now
    of_kinds, alike, first = counts
    ended = int(of_kinds.sum())
    wrong = [kind for kind, is_wrong in zip(kinds, (alike == of_kinds) & (first > 0), strict=True) if is_wrong]
    if not simulator.in_step:
        return [declared]
    ends, rule = f"{ended} ends of episodes", "targets of truncated steps will bootstrap from the observation before"
    if not ended:
        verdict = Verdict("warn", f"no episode ended in {steps} random steps, so last observations are not known")
    elif not last_count:
        verdict = Verdict("warn", f"no last observations in {ends}: {rule}; give info['final_obs']")
    elif last_count < ended:
        verdict = Verdict("fail", f"last observations are missing in {ended - last_count} of {ends}")
    elif wrong:
        verdict = Verdict("fail", f"in all {' and '.join(wrong)} the last observation is the next episode's first")
    elif first.any():
        count = int(first.sum())
        verdict = Verdict("warn", f"in {count} of {ends} the last is the next first observation, by chance or wrongly")
    else:
        verdict = Verdict("pass", f"true last observations in all {ends}")
    return [declared, verdict]


def _determinism(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
    """Check that episodes are the same from one seed, and differ between seeds and copies."""
    chosen = [act(simulator) for _ in range(min(steps, 100))]
    one, two, other = (_observations(simulator, seed, chosen) for seed in (SEED, SEED, SEED + COPIES))
    if not torch.equal(one, two):
        return [Verdict("warn", "episodes from one seed differ: runs cannot be repeated")]
    if torch.equal(one, other):
        return [Verdict("warn", "episodes from two seeds are the same: `reset` ignores its seed")]
    if (one[0] == one[0, :1]).all():
        return [Verdict("warn", "all copies begin alike: they may repeat each other")]
    return [Verdict("pass", f"episodes are the same from one seed for {len(chosen)} steps, and differ between copies")]


def _device(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
    """Check the device and the types of tensors."""
    start = simulator.reset(_seeds(simulator))
    step: Step = simulator.step(act(simulator))
    tensors = {name: value for name, (value, _) in leaves(simulator.observation_space, start, "the simulator").items()}
    tensors |= {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
    elsewhere = {name: value.device for name, value in tensors.items() if value.device.type != simulator.device.type}
    if elsewhere:
        name, device = next(iter(elsewhere.items()))
        return [Verdict("fail", f"{name} is on {device}; the run's device is {simulator.device}")]
    doubles = [name for name, value in tensors.items() if value.dtype == torch.float64]
    if doubles:
        return [Verdict("warn", f"{', '.join(doubles)} in float64, which is converted in each step; give float32")]
    types = ", ".join(f"{name} {str(value.dtype).removeprefix('torch.')}" for name, value in tensors.items())
    return [Verdict("pass", f"tensors on {simulator.device}: {types}")]


def _observations(simulator: Simulator, seed: int, actions: list[Tensor]) -> Tensor:
    """The observations [T, N, D] from a seed on, with these actions."""
    seen = [_flat(simulator, simulator.reset(_seeds(simulator, seed)))]
    for action in actions:
        seen.append(_flat(simulator, simulator.step(action).observation))
    return torch.stack(seen)


def _seeds(simulator: Simulator, seed: int = SEED) -> list[int]:
    return list(range(seed, seed + simulator.copies))


def _flat(simulator: Simulator, observation: object) -> Tensor:
    """All numbers of observations [N, D]."""
    parts = leaves(simulator.observation_space, observation, "the simulator").values()
    return torch.cat([value.flatten(1).double() for value, _ in parts], 1)


CHECKS_OF_SIMULATORS: Mapping[str, Callable[[Environment, int], list[Verdict]]] = {
    "interface": _interface,
    "spaces": _spaces,
    "resets": partial(_of_simulator, _resets),
    "determinism": partial(_of_simulator, _determinism),
    "device": partial(_of_simulator, _device),
    "episodes": _episodes,
    "resuming": _resuming,
    "speed": _speed,
}
"""The same for simulators of tensors."""
