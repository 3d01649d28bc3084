"""Console output of a run: its header, lines during and after each generation, and the closing lines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evorl.config import AnyConfig
from evorl.config.fields import RANDOM, RATING
from evorl.config.run import LeagueSettings
from evorl.distributed import Placement, Ranks
from evorl.evolution.selection import TRUSTED_CORRELATION, selects
from evorl.kernels.library import missing_kernel
from evorl.runs.agents.comparison import sentence
from evorl.runs.agents.elite import ERROR, Score
from evorl.runs.output.metrics import CONTROL, EVOLVED
from evorl.runs.storage.directory import from_here
from evorl.runs.storage.trust import code_to_allow
from evorl.system.console import compact, digits, duration, say, speed
from evorl.system.plugins import SCRIPT
from evorl.tracking.trackers import announcements
from evorl.types.agents import UNCHANGED, Mutation
from evorl.types.messages import on_one_line
from evorl.types.outcomes import FINISHED, STOPPED

Row = Mapping[str, Any]
CONFIDENCE = f"{100 * (1 - ERROR):g} %"
STEPS = "training.max_steps"
MOST_MUTATIONS = 3
"""Mutations that a line lists; the rest are only counted."""
APPLE = "Apple's GPU (device mps) is not used: evorl trains on CPUs and on GPUs of CUDA"


def announce(config: AnyConfig, ranks: Ranks) -> None:
    """Print on the main process what is sent elsewhere, what is trained and until when.

    Call it before creating the environments, which may take a minute.
    """
    if ranks.is_main:
        for line in (*announcements(config), *announcement(config)):
            say(line)


def announcement(config: AnyConfig) -> list[str]:
    population = config.population
    alone = "" if selects(config.evolution, population.size) else ", without selection and mutation"
    agents = _counted(population.size, "agent")
    if len(population.places) > 1:
        agents = f"{_counted(population.islands, 'island')} of {agents}"
    copies = _counted(config.environment.num_envs, "environment")
    twins = ""
    if population.control:
        twins = f", and {'a twin' if population.islands == 1 else 'as many twins'} without evolution"
    return [f"{config.algorithm.name} on {config.environment.id}: {agents} x {copies}{alone}{twins}", _aim(config)]


def header(config: AnyConfig, placement: Placement, *, threads: int, directory: Path) -> list[str]:
    """The ranks, device, `threads` and directory of a run; then what slows it down."""
    ranks, lacking = placement.ranks.size, ""
    if placement.ranks.device.type == "cpu":
        lacking = missing_kernel(config.run.kernel)
    where = "on 1 rank"
    compute = f"{placement.ranks.device.type}, {_counted(threads, 'thread')}"
    if ranks > 1:
        where = f"divided over {ranks} ranks" if placement.is_sharded else f"on each of {ranks} ranks"
        where += f" of {_counted(placement.ranks.hosts, 'host')}"
        compute += f" each, {placement.ranks.backend}"
    compute += ", products in bfloat16" if config.network.bf16 else ""
    return [
        f"{where} ({compute}), in {from_here(directory)}",
        *([f"dense layers by torch, without the C++ kernel: {lacking}"] if lacking else []),
        *([_unused(unused, ranks)] if (unused := placement.ranks.unused_gpus) else []),
        *([APPLE] if torch.backends.mps.is_available() else []),
    ]


def _unused(gpus: int, ranks: int) -> str:
    advice = "start one process to use it" if gpus == 1 else f"start {gpus} processes to use them"
    return f"{ranks} ranks have {_counted(gpus, 'GPU')} together, so all of them train on the CPU; {advice}"


def _aim(config: AnyConfig) -> str:
    """Describe the target and each agent's steps in the run."""
    steps = f"for {config.training.max_steps:,} steps of each agent"
    if config.training.target_fitness is None:
        return f"{steps}, without a target"
    if config.population.control:
        return f"{steps}, without a test of the target, as twins train for equal steps"
    return f"until the mean {_measure(config)} is above {config.training.target_fitness:g}, or {steps}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def progress_line(generation: int, done: int, total: int, agents: int, rate: float, recent: str) -> str:
    """Format how far a generation is, how fast, and how long it will take; `recent` describes the latest episodes.

    Steps are those of each agent, and `rate` is that of all together.
    """
    parts = [
        f"gen {generation}",
        f"{compact(done)} of {compact(total)} steps ({done / total:.0%})",
        speed(rate),
        f"{duration(max(0, total - done) * agents / rate)} left of the generation",
        *([recent] if recent else []),
    ]
    return " | ".join(parts)


def generation_line(row: Row, born: Sequence[Row], config: AnyConfig) -> str:
    """Format the line of a generation from its line of metrics and the lineage lines of agents created for it."""
    number, steps, max_steps = row["generation"], row["agent_steps"], config.training.max_steps
    expected = max(number, round(max_steps * number / max(steps, 1)))
    parts = [f"gen {number}/{expected}", f"{compact(steps)} steps", _fitness(row)]
    children = [agent for agent in born if agent["mutation"]["kind"] not in UNCHANGED]
    mutated = [f"#{agent['id']} {_change(agent, config)}" for agent in children]
    if mutated:
        more = f" and {len(mutated) - MOST_MUTATIONS} more" if len(mutated) > MOST_MUTATIONS else ""
        parts.append("mutated: " + ", ".join(mutated[:MOST_MUTATIONS]) + more)
    if config.evolution.burn_in == "auto" and row["selection_began"] == number:
        correlation = row["rank_correlation"]
        trusted = correlation is not None and correlation >= TRUSTED_CORRELATION
        because = f"ranks correlate by {correlation:.2f}" if trusted else "a third of the steps is spent"
        several = config.population.islands > 1  # Each begins by its own correlation.
        parts.append("selection has begun in all islands" if several else f"selection begins ({because})")
    return " | ".join([*parts, f"{row['wall_clock_seconds']:.0f} s"])


def closing_lines(summary: Row, config: AnyConfig, directory: Path, *, has_elite: bool) -> list[str]:
    """Format the outcome of a run, its elite's score, and suggested next commands.

    `has_elite` is True if the elite is on disk.
    """
    target = None if config.population.control else config.training.target_fitness
    steps = config.training.max_steps
    where = shlex.quote(from_here(directory)) + (" --allow-code" if code_to_allow(config) else "")
    next_steps = [f"`evorl evaluate {where}`"] if has_elite else []
    if summary["ended"] != FINISHED:
        how = f"{_broken_off(summary)} after generation {summary['generations']}"
        next_steps.append(f"`evorl resume {where}` to go on")
    elif summary["solved"]:
        sure = f" (with {CONFIDENCE})" if config.evaluation.confirmation_episodes else ""
        how = f"solved: the mean {_measure(config)} is above {target:g}{sure}"
    else:
        done = summary["agent_steps"]
        how = f"trained for {done:,} steps" + ("" if target is None else f"; {_missed(summary, config, target)}")
        # `training.max_steps` may be below the steps already taken if it was lowered for a resume.
        longer = 2 * max(steps, round(done, -3))
        command = f"branch {where} NEW" if STEPS in config.algorithm.frozen_on_resume else f"resume {where}"
        next_steps.append(f"`evorl {command} {STEPS}={longer}` to train longer")
    lines = [f"{how}; best: {_best(summary, config)}"]
    compared = summary.get("comparison")
    verdict = [sentence(compared)] if compared else []
    if config.environment.id.startswith(SCRIPT):
        # No command can import an environment that a script defines.
        again = f'the same call with run={{"name": "{directory.name}", "resume": "auto"}} to go on'
        next_steps = [*([f'`evorl.load("{from_here(directory)}")`'] if has_elite else []), again]
    return [*lines, *([f"next: {', '.join(next_steps)}"] if next_steps else []), *verdict]


def _broken_off(summary: Row) -> str:
    if summary["ended"] == STOPPED:
        return f"stopped ({on_one_line(str(summary['because']), 200)})"
    return f"ended by {summary['ended']}"


def _fitness(row: Row) -> str:
    if row["best_fitness"] is None:
        return "no agent has a fitness"
    # Of equal agents the newest challenges the elite.
    equals = [index for index, fitness in enumerate(row["fitness"]) if fitness == row["best_fitness"]]
    index = max(equals, key=lambda index: row["agents"][index])
    best = f"best {digits(row['best_fitness'])} (#{row['agents'][index]}{_terms(row, index)})"
    if EVOLVED in row:
        parts = (f"{name} {_best_and_mean(row[name])}" for name in (EVOLVED, CONTROL))
        return " | ".join([best, *parts])
    return f"{best}, mean {digits(row['mean_fitness'])}"


def _best_and_mean(row: Row) -> str:
    if row["best_fitness"] is None:
        return "without a fitness"
    return f"{digits(row['best_fitness'])}, mean {digits(row['mean_fitness'])}"


def _terms(row: Row, index: int) -> str:
    """Format an agent's fitness terms, if fitness is more than the return."""
    return "".join(f", {name} {digits(values[index])}" for name, values in row.get("terms", {}).items())


def _measure(config: AnyConfig) -> str:
    """The name of the elite's score: a single unweighted term's name, else `fitness`."""
    terms = config.evolution.fitness
    if RATING in terms:
        player = (config.league or LeagueSettings()).benchmark
        return f"result against {'random moves' if player == RANDOM else on_one_line(from_here(player), 80)}"
    return next(iter(terms)) if list(terms.values()) == [1.0] else "fitness"


def _missed(summary: Row, config: AnyConfig, target: float) -> str:
    """Describe how far from the target a run ended."""
    best, bound = summary["elite_fitness"], summary["elite_lower_bound"]
    if best is None or best < target:
        return f"the target of {target:g} is not reached"
    sure = "" if bound is None else f" (at least {_at_least(bound)} with {CONFIDENCE})"
    return f"the target of {target:g} is not yet certain{sure}"


def _at_least(bound: float) -> str:
    """Format a lower bound with as many digits as a mean, rounded down."""
    unit = 0.1 if abs(bound) >= 10 else 10.0 ** (math.floor(math.log10(abs(bound))) - 2) if bound else 1.0
    return digits(math.floor(bound / unit) * unit)


def _best(summary: Row, config: AnyConfig) -> str:
    if summary["elite_fitness"] is None:
        return "no agent yet"
    score = Score(summary["elite_episodes"], summary["elite_fitness"], summary["elite_std"])
    fresh, repeats = config.evaluation.confirmation_episodes > 0, summary["episodes_repeat"]
    described = score.described(fresh=fresh, repeats=repeats)
    return f"a mean {_measure(config)} of {described}"


def _change(agent: Row, config: AnyConfig) -> str:
    mutation = Mutation(**agent["mutation"]).with_effective_values(config.effective_value)
    return str(mutation).removeprefix(f"{mutation.kind} (").removesuffix(")") if mutation.target else mutation.kind
