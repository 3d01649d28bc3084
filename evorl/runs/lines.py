"""The lines that a run prints: one per generation, and a closing summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.records import Mutation
from evorl.runs.elite import Score
from evorl.runs.header import from_here
from evorl.runs.summary import STOPPED
from evorl.system.console import digits
from evorl.system.plugins import SCRIPT

Row = Mapping[str, Any]
UNCHANGED = ("initial", "none")
MOST = 3
"""Mutations that a line lists; the rest are only counted."""


def generation_line(row: Row, born: Sequence[Row], config: AnyConfig) -> str:
    """Format the line of a generation from its line of metrics and the lineage lines of agents created for it."""
    number, steps, max_steps = row["generation"], row["agent_steps"], config.training.max_steps
    expected = max(number, round(max_steps * number / max(steps, 1)))
    parts = [f"gen {number}/{expected}", f"{_short(steps)} steps", _fitness(row)]
    children = [agent for agent in born if agent["mutation"]["kind"] not in UNCHANGED]
    mutated = [f"#{agent['id']} {_change(agent, config)}" for agent in children]
    if mutated:
        more = f" and {len(mutated) - MOST} more" if len(mutated) > MOST else ""
        parts.append("mutated: " + ", ".join(mutated[:MOST]) + more)
    return " | ".join([*parts, f"{row['wall_clock_seconds']:.0f} s"])


def closing_lines(summary: Row, config: AnyConfig, directory: Path, *, has_elite: bool) -> list[str]:
    """Format the outcome of a run, its elite's score, and suggested next commands.

    `has_elite` is True if the elite is on disk.
    """
    target, steps = config.training.target_fitness, config.training.max_steps
    allow = " --allow-code" if ":" in config.environment.id + (config.network.factory or "") else ""
    where = f"{from_here(directory)}{allow}"
    next_steps = [f"`evorl evaluate {where}`"] if has_elite else []
    if summary["ended"] != "finished":
        how = f"{_broken_off(summary)} after generation {summary['generations']}"
        next_steps.append(f"`evorl resume {where}` to go on")
    elif summary["solved"]:
        how = f"solved: the mean {_measure(config)} is above {target:g} (evaluation.error {config.evaluation.error:g})"
    else:
        done = summary["agent_steps"]
        how = f"trained for {done:,} steps" + ("" if target is None else f"; {_missed(summary, config, target)}")
        # `training.max_steps` may be below the steps already taken if it was lowered for a resume.
        longer = 2 * max(steps, round(done, -3))
        next_steps.append(f"`evorl resume {where} training.max_steps={longer}` to train longer")
    lines = [f"{how}; best: {_best(summary, config)}"]
    if config.environment.id.startswith(SCRIPT):
        # No command can import an environment that a script defines.
        again = f'the same call with run={{"name": "{directory.name}", "resume": "auto"}} to go on'
        next_steps = [*([f'`evorl.load("{from_here(directory)}")`'] if has_elite else []), again]
    return [*lines, f"next: {', '.join(next_steps)}"] if next_steps else lines


def _broken_off(summary: Row) -> str:
    if summary["ended"] == STOPPED:
        return f"stopped ({on_one_line(str(summary['because']), 200)})"
    return f"ended by {summary['ended']}"


def _fitness(row: Row) -> str:
    if row["best_fitness"] is None:
        return "no agent has a fitness"
    place = row["fitness"].index(row["best_fitness"])
    best = f"best {digits(row['best_fitness'])} (#{row['agents'][place]}{_terms(row, place)})"
    return f"{best}, mean {digits(row['mean_fitness'])}"


def _terms(row: Row, place: int) -> str:
    """Format an agent's fitness terms, if fitness is more than the return."""
    return "".join(f", {name} {digits(values[place])}" for name, values in row.get("terms", {}).items())


def _measure(config: AnyConfig) -> str:
    """Return the name of the selection criterion: a single unweighted term's, else `fitness`."""
    terms = config.evolution.fitness
    return next(iter(terms)) if list(terms.values()) == [1.0] else "fitness"


def _missed(summary: Row, config: AnyConfig, target: float) -> str:
    """Describe how far from the target a run ended."""
    best, bound = summary["best_fitness"], summary["best_fitness_lower_bound"]
    if best is None or best < target:
        return f"the target of {target:g} is not reached"
    sure = "" if bound is None else f" (at least {_at_least(bound)} with {100 * (1 - config.evaluation.error):g} %)"
    return f"the target of {target:g} is not yet certain{sure}"


def _at_least(bound: float) -> str:
    """Format a lower bound with as many digits as a mean, rounded down."""
    unit = 0.1 if abs(bound) >= 10 else 10.0 ** (math.floor(math.log10(abs(bound))) - 2) if bound else 1.0
    return digits(math.floor(bound / unit) * unit)


def _best(summary: Row, config: AnyConfig) -> str:
    if summary["best_fitness"] is None:
        return "no agent yet"
    score = Score(summary["best_fitness_episodes"], summary["best_fitness"], summary["best_fitness_std"])
    described = score.described(fresh=config.evaluation.confirmation_episodes > 0)
    return f"a mean {_measure(config)} of {described}"


def _change(agent: Row, config: AnyConfig) -> str:
    mutation = Mutation(**agent["mutation"]).as_used(config.as_used)
    return str(mutation).removeprefix(f"{mutation.kind} (").removesuffix(")") if mutation.target else mutation.kind


def _short(steps: int) -> str:
    """Format a number of steps with three significant digits, as in 1.25M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if steps >= size:
            return f"{steps / size:.3g}{unit}"
    return str(steps)
