"""The header that a run prints before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym

from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.config.fields import RETURN
from evorl.config.origins import DEFAULT
from evorl.config.task import TARGET
from evorl.distributed import Placement
from evorl.envs.horizon import Horizon
from evorl.envs.spec import EnvSpec
from evorl.replay import Pace
from evorl.system.provenance import multiplies_bfloat16

SLOW = "network.bf16: this machine has no units for bfloat16, so updates take longer than with mixed_precision: 'no'"
ALONE = "a single agent trains on without selection and mutation; take population.size=2 or more to evolve"


def header(
    config: AnyConfig,
    placement: Placement,
    interface: EnvSpec,
    pace: Pace,
    horizon: Horizon,
    *,
    threads: int,
    directory: Path,
) -> list[str]:
    """Return the header: hardware and `threads`, spaces, a new agent's batch size and update frequency, and the target
    and lengths with their origins.
    """
    ranks, size = placement.ranks.size, config.population.size
    where = "on 1 rank"
    compute = f"{placement.ranks.device.type}, {_counted(threads, 'thread')}"
    if ranks > 1:
        where = f"divided over {ranks} ranks" if placement.is_sharded else f"on each of {ranks} ranks"
        where += f" of {_counted(placement.ranks.hosts, 'host')}"
        compute += f" each, {placement.ranks.backend}"
    together = f" of {placement.copies} ranks" if placement.copies > 1 else ""
    compute += ", products in bfloat16" if config.network.bf16 else ""
    slow = config.network.bf16 and not multiplies_bfloat16(placement.ranks.device)
    return [
        f"{config.algorithm.name} on {config.environment.id}: {_counted(size, 'agent')} x "
        f"{_counted(config.environment.num_envs, 'environment')} {where} ({compute}), in {from_here(directory)}",
        f"observations: {short(interface.observation)}; actions: {short(interface.action)}"
        + (", some of which may be forbidden" if interface.masked else ""),
        f"each update: {pace.batch:,} transitions{together}, {_frequency(pace)} of an agent",
        _aim(config, horizon.steps * horizon.counted),
        *([omissions] if (omissions := config.origins.omissions()) else []),
        *([f"fitness: {_sum(config.evolution.fitness)}"] if config.evolution.fitness != {RETURN: 1.0} else []),
        *([ALONE] if size == 1 and config.evolution.schedule is None else []),
        *([SLOW] if slow else []),
    ]


def _aim(config: AnyConfig, generation: int) -> str:
    """Describe the target and each agent's steps in the run and in a `generation`, with the origin of each."""
    target, origins = config.training.target_fitness, config.origins
    aim = "no target" if target is None else f"target {target:g}"
    if target is not None or origins.of(TARGET) != DEFAULT:
        aim += f": {origins.of(TARGET)}"
    lengths = {"training.max_steps": config.training.max_steps, "evolution.steps": generation}
    run, part = (f"{steps:,} ({origins.of(key)})" for key, steps in lengths.items())
    return f"{aim}; steps of each agent: {run}; of a generation: {part}"


def short(space: gym.Space[Any]) -> str:
    """Describe a space in words, without bounds."""
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{name}: {short(inner)}" for name, inner in space.spaces.items()) + "}"
    if isinstance(space, gym.spaces.Tuple):
        return "(" + ", ".join(map(short, space.spaces)) + ")"
    return f"Box{space.shape} of {space.dtype}" if isinstance(space, gym.spaces.Box) else on_one_line(str(space), 80)


def from_here(directory: Path) -> Path:
    """Return a directory relative to the working directory if it is below that, else unchanged."""
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def _frequency(pace: Pace) -> str:
    """Describe the update frequency, as in "one for every 4 environment steps"."""
    updates, steps = pace.updates, pace.steps
    if steps < 1:
        updates, steps = updates / steps, 1.0
    every = "environment step" if steps == 1 else f"{_number(steps)} environment steps"
    return f"{'one' if updates == 1 else _number(updates)} for every {every}"


def _sum(terms: Mapping[str, float]) -> str:
    """Format weighted fitness terms, as in "return + 10 info.success"."""
    parts = (name if weight == 1 else f"{weight:g} {name}" for name, weight in terms.items())
    return "the mean over episodes of " + " + ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")
