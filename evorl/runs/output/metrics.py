"""Metrics of a generation: its lines of `metrics.jsonl` and `lineage.jsonl`, and the points that trackers receive.

Axes: P agents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig
from evorl.config.fields import RETURN
from evorl.distributed import Placement
from evorl.envs.episodes import Collected, Recent
from evorl.population import Learner
from evorl.runs.agents.elite import Elite
from evorl.runs.agents.fitness import Fitness
from evorl.runs.output.callbacks import LOGGED
from evorl.tracking.tracker import AgentRecord, Points, Record
from evorl.types.agents import Agent

SIZES: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "layers": lambda network: len(network["hidden_sizes"]) + sum(network["residual_layers"]),
    "units": lambda network: sum(network["hidden_sizes"]),
    "recurrent_units": lambda network: network["recurrent_size"],
    "channels": lambda network: sum(layer["channels"] for layer in network["convolutions"]),
}
"""Size metrics of an agent's architectures, summed over its networks; sums of 0 are not drawn."""

EVOLVED, CONTROL = "evolved", "control"
"""The agents that evolve, and their twins: where there are any, a line has the best and the mean fitness of both."""
PER_ACTOR = "steps_per_second/"

RecentEpisodes = Callable[[], Recent | None]
"""The means over this rank's episodes that ended since the last call, or None if none did."""


@dataclass(frozen=True)
class Counts:
    """Metrics of a generation over all ranks, for each agent [P]: sums, and means of returns, lengths and metrics."""

    steps: NDArray[np.float64]
    updates: NDArray[np.float64]
    train_return: NDArray[np.float64]
    train_episodes: NDArray[np.float64]
    """The number of episodes averaged in `train_return`; `evorl.envs.episodes` defines which count."""
    ended_episodes: NDArray[np.float64]
    train_length: NDArray[np.float64]
    """The mean number of steps of those episodes."""
    metrics: Mapping[str, NDArray[np.float64]]


def gather_metrics(learner: Learner, collected: Collected, placement: Placement) -> Counts:
    """Reduce over ranks what was `collected` and learned in a generation; means are NaN where nothing was counted."""
    learned = learner.metrics()
    reported = [*learned.sums.values(), *learned.counts.values()]
    local = np.stack([*collected, learned.updates, *reported])
    steps, returns, episodes, ended, lengths, updates, *totals = placement.total(local, "the other ranks' metrics")
    with np.errstate(invalid="ignore"):
        half = len(learned.sums)
        means = {
            name: total / count for name, total, count in zip(learned.sums, totals[:half], totals[half:], strict=True)
        }
        # Ranks that hold replicas of an agent all count the same joint updates.
        updates /= placement.copies
        return Counts(steps, updates, returns / episodes, episodes, ended, lengths / episodes, means)


def generation_row(
    agents: Sequence[Agent],
    measured: Fitness,
    counts: Counts,
    progress: Mapping[str, Any],
    elite: Elite,
    seconds: Mapping[str, float],
    config: AnyConfig,
) -> dict[str, Any]:
    """The line of `metrics.jsonl`; lists have one entry per agent, in the order of `agents`.

    `measured` is the fitness with its spread. `mutations` are in words, with values as training uses them;
    `hyperparameters` are the stored values, which evolution perturbs. If fitness is more than the return, `terms` has
    each agent's mean of every fitness term and of the return.
    """
    fitness = [agent.fitness for agent in agents]
    founders, twins = config.population.founders, config.population.control
    training = seconds["training"]
    terms = {name: _list(values) for name, values in measured.terms.items()}
    return {
        **progress,
        **elite.facts(),
        "elite_generation": elite.generation,
        **best_and_mean(fitness),
        **({EVOLVED: best_and_mean(fitness[:founders]), CONTROL: best_and_mean(fitness[founders:])} if twins else {}),
        "env_steps_per_second": float(counts.steps.sum()) / training,
        "updates_per_second": float(counts.updates.sum()) / training,
        "seconds": dict(seconds),
        "agents": [agent.id for agent in agents],
        "fitness": fitness,
        "parents": [agent.parent for agent in agents],
        "mutations": [str(agent.mutation.with_effective_values(config.effective_value)) for agent in agents],
        "hyperparameters": [agent.hyperparameters for agent in agents],
        "architectures": [agent.describe()["architectures"] for agent in agents],
        "fitness_std": _list(measured.std),
        "fitness_episodes": [int(episodes) for episodes in measured.episodes],
        "train_return": _list(counts.train_return),
        "train_length": _list(counts.train_length),
        "train_episodes": [int(episodes) for episodes in counts.train_episodes],
        "metrics": {name: _list(values) for name, values in counts.metrics.items()},
        "updates": _list(counts.updates),
        "state": [agent.state.metrics() for agent in agents],
        "evaluation_steps": measured.steps,
        **({} if config.evolution.fitness == {RETURN: 1.0} else {"terms": terms}),
    }


def best_and_mean(fitness: Sequence[float | None]) -> dict[str, float | None]:
    """The best and the mean of the agents that have a fitness."""
    finite = [value for value in fitness if value is not None]
    return {
        "best_fitness": max(finite, default=None),
        "mean_fitness": float(np.mean(finite)) if finite else None,
    }


def island_of(place: int, config: AnyConfig) -> dict[str, Any]:
    """The `island` of the agent at this place, from 0, and whether it is of its twin; empty for one population."""
    population = config.population
    if len(population.places) == 1:
        return {}
    return {
        "island": place // population.size % population.islands,
        **({"control": place >= population.founders} if population.control else {}),
    }


def _list(values: NDArray[np.float64]) -> list[float | None]:
    """Convert to JSON numbers, with null for non-finite values."""
    return [float(value) if np.isfinite(value) else None for value in values]


def perturbed(config: AnyConfig) -> frozenset[str]:
    """The names of the hyperparameters that evolution can change, and `architecture` if it can change those.

    Agents whose initial settings are drawn differ in all that have a range.
    """
    evolution = config.evolution
    names: set[str] = set()
    if evolution.initial == "sampled":
        names |= set(evolution.hyperparameters or ())
    if config.population.size > 1:
        names |= set(evolution.hyperparameters or ()) if evolution.mutation.hyperparameters else set()
        names |= {"architecture"} if evolution.mutation.architecture else set()
    return frozenset(names)


def _spread(fitness: Sequence[float | None]) -> float | None:
    """The sample standard deviation over agents, or None for fewer than two."""
    values = [value for value in fitness if value is not None]
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def record_of(row: Mapping[str, Any], config: AnyConfig) -> Record:
    """Convert a line of `metrics.jsonl` to a tracker record with the hyperparameters that evolution can change."""
    agents = [_agent(row, index, config) for index in range(len(row["agents"]))]
    names = {name: None for agent in agents for name in agent.points}
    means = {name: fmean(agent.points[name] for agent in agents if name in agent.points) for name in names}
    means.pop("fitness/agents", None)
    points = {
        **means,
        "charts/SPS": row["env_steps_per_second"],
        "fitness/best": row["best_fitness"],
        "fitness/mean": row["mean_fitness"],
        **{
            f"{name}/{kind}": row[name][f"{kind}_fitness"]
            for name in (EVOLVED, CONTROL)
            for kind in ("best", "mean")
            if name in row
        },
        "fitness/std": _spread(row["fitness"]),
        "fitness/elite": row["elite_fitness"],
        "fitness/rank_correlation": row.get("rank_correlation"),
        "time/updates_per_second": row["updates_per_second"],
        **{f"time/{name}": value for name, value in row["seconds"].items()},
        **{f"callbacks/{name}": value for name, value in row.get(LOGGED, {}).items()},
        **{f"actors/{name}": value for name, value in row.get("actors", {}).items() if not name.startswith(PER_ACTOR)},
    }
    return Record(row["generation"], row["global_steps"], _finite(points), agents)


def _agent(row: Mapping[str, Any], index: int, config: AnyConfig) -> AgentRecord:
    varying, use = perturbed(config), config.effective_value
    hyperparameters = row["hyperparameters"][index].items()
    sizes = {name: sum(map(size, row["architectures"][index].values())) for name, size in SIZES.items()}
    points = {
        "charts/episodic_return": row["train_return"][index],
        "charts/episodic_length": row["train_length"][index],
        "fitness/agents": row["fitness"][index],
        **{f"fitness/{name}": values[index] for name, values in row.get("terms", {}).items()},
        **{f"losses/{name}": values[index] for name, values in row["metrics"].items()},
        **{f"hyperparameters/{name}": use(name, value) for name, value in hyperparameters if name in varying},
        **{f"architecture/{name}": size for name, size in sizes.items() if size and "architecture" in varying},
    }
    return AgentRecord(
        id=row["agents"][index],
        parent=row["parents"][index],
        mutation=row["mutations"][index],
        points=_finite(points),
    )


def _finite(points: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in points.items() if value is not None and math.isfinite(value)}


INTERVAL = 10.0
"""Seconds between points within a generation."""


class PointsWithin:
    """Tracker points within a generation, which may take minutes: at most every `INTERVAL` seconds, the speed and
    the means over this rank's recent episodes.
    """

    def __init__(self, step: int) -> None:
        self.begin(step)

    def begin(self, step: int) -> None:
        """Start a generation at `step`, the environment steps of all agents so far."""
        self._step = self._first = step
        self._began = self._said = 0.0

    def skip(self, steps: int) -> None:
        """Count `steps` of all agents that were made before the run was resumed within this generation."""
        self._step += steps

    def advance(self, steps: int, recent: RecentEpisodes) -> tuple[int, Points] | None:
        """Count `steps` more of all agents; return the step and its points if the interval has passed, else None."""
        now = time.perf_counter()
        if not self._began:
            # Start the clock here, not in `begin`: evolution and a checkpoint come before the first step.
            self._began = self._said = now
            self._first = self._step + steps
        self._step += steps
        if now - self._said < INTERVAL:
            return None
        self._said = now
        points = {"charts/SPS": (self._step - self._first) / (now - self._began)}
        means = recent()
        points |= {f"charts/{name}": value for name, value in means._asdict().items()} if means else {}
        return self._step, points
