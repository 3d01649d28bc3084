"""The checks of `evorl check` that only simulators of tensors need. Axes: N copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from evorl.config import Environment
from evorl.envs.tensor.observations import leaves
from evorl.envs.tensor.simulator import Simulator, Step
from evorl.envs.tensor.sources import device_of, shared_simulator

COPIES = 64
"""Copies of a simulator that is checked."""
SEED = 123


class Verdict(NamedTuple):
    """The outcome of a check, and what it saw or what would be right."""

    level: Literal["pass", "warn", "fail"]
    text: str


Act = Callable[[Simulator], Tensor]
"""Draws random actions [N, ...] for all copies of a simulator."""


def simulator_of(settings: Environment) -> Simulator:
    """The simulator that all checks share."""
    return shared_simulator(settings, COPIES, device_of(settings)).simulator


def resets(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
    """Describe the reset mode, and check that the last observations of episodes are those of their last steps."""
    mode = "within the step that ends an episode" if simulator.in_step else "in the step after the one that ends it"
    declared = Verdict("pass", f"copies are reset {mode}, as declared")
    before, ended, last_count, first = _flat(simulator, simulator.reset(_seeds(simulator))), 0, 0, 0
    for _ in range(steps):
        step = simulator.step(act(simulator))
        over, now = step.terminated | step.truncated, _flat(simulator, step.observation)
        if count := int(over.sum()):
            ended += count
            shown = now if step.last is None else _flat(simulator, step.last)
            last_count += 0 if step.last is None else count
            # A step away from the observation before, not a first observation that is shown again.
            first += int((over & (shown == now).all(1) & (now != before).any(1)).sum())
        before = now
    if not simulator.in_step:
        return [declared]
    if not ended:
        return [
            declared,
            Verdict("warn", f"no episode ended in {steps} random steps, so last observations are not known"),
        ]
    if not last_count:
        rule = "targets of truncated steps will bootstrap from the observation before; give info['final_obs']"
        return [declared, Verdict("warn", f"no last observations in {ended} ends of episodes: {rule}")]
    if last_count < ended:
        return [
            declared,
            Verdict("fail", f"last observations are missing in {ended - last_count} of {ended} ends of episodes"),
        ]
    if first:
        return [
            declared,
            Verdict("fail", f"in {first} of {ended} ends of episodes the last observation is the next one's first"),
        ]
    return [declared, Verdict("pass", f"true last observations in all {ended} ends of episodes")]


def determinism(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
    """Check that episodes are the same from one seed, and differ between seeds and copies."""
    chosen = [act(simulator) for _ in range(min(steps, 100))]
    one, two, other = (_episode(simulator, seed, chosen) for seed in (SEED, SEED, SEED + COPIES))
    if not torch.equal(one, two):
        return [Verdict("warn", "episodes from one seed differ: runs cannot be repeated")]
    if torch.equal(one, other):
        return [Verdict("warn", "episodes from two seeds are the same: `reset` ignores its seed")]
    if (one[0] == one[0, :1]).all():
        return [Verdict("warn", "all copies begin alike: they may repeat each other")]
    return [Verdict("pass", f"episodes are the same from one seed for {len(chosen)} steps, and differ between copies")]


def device(simulator: Simulator, act: Act, steps: int) -> list[Verdict]:
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


def _episode(simulator: Simulator, seed: int, actions: list[Tensor]) -> Tensor:
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


CHECKS: Mapping[str, Callable[[Simulator, Act, int], list[Verdict]]] = {
    "resets": resets,
    "determinism": determinism,
    "device": device,
}
