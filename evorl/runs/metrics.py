"""Metrics of a generation, as rows of `metrics.jsonl` and `lineage.jsonl`. Axes: P agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evorl.config import AnyConfig
from evorl.config.fields import RETURN
from evorl.distributed import Placement
from evorl.envs.episodes import Returns
from evorl.population import Learner
from evorl.population.evaluation import EpisodeResults
from evorl.runs.elite import Elite, Score
from evorl.types import Agent


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


class Collecting(Protocol):
    """Collects experience, in environments of this process or in actor processes."""

    def pop_steps(self) -> NDArray[np.float64]:
        """Return the transitions [P] collected since the last call."""

    def pop_returns(self) -> Returns:
        """Return the statistics of the episodes since the last call."""


def gather_metrics(learner: Learner, environments: Collecting, placement: Placement) -> Counts:
    """Reduce over ranks what was counted since the last call; means are NaN where nothing was counted."""
    learned = learner.metrics()
    reported = [*learned.sums.values(), *learned.counts.values()]
    local = np.stack([environments.pop_steps(), learned.updates, *environments.pop_returns(), *reported])
    steps, updates, returns, episodes, ended, lengths, *totals = placement.total(local, "the other ranks' metrics")
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
    scores: Sequence[Score],
    counts: Counts,
    progress: Mapping[str, Any],
    elite: Elite,
    seconds: Mapping[str, float],
    config: AnyConfig,
) -> dict[str, Any]:
    """Return the line of `metrics.jsonl`; lists have one entry per agent, in the order of `agents`.

    `mutations` are in words, with values as training uses them; `hyperparameters` are the stored values, which
    evolution perturbs.
    """
    fitness = [agent.fitness for agent in agents]
    known = [value for value in fitness if value is not None]
    training = seconds["training"]
    # Reports of long runs decode a line only up to `architectures`, so keep the order of keys.
    return {
        **progress,
        "elite_fitness": elite.score.mean if elite.score else None,
        "elite_std": elite.score.std if elite.score else None,
        "elite_episodes": elite.score.episodes if elite.score else 0,
        "elite_lower_bound": elite.lower_bound,
        "elite_generation": elite.generation,
        "best_fitness": max(known, default=None),
        "mean_fitness": float(np.mean(known)) if known else None,
        "env_steps_per_second": float(counts.steps.sum()) / training,
        "updates_per_second": float(counts.updates.sum()) / training,
        "seconds": dict(seconds),
        "agents": [agent.id for agent in agents],
        "fitness": fitness,
        "parents": [agent.parent for agent in agents],
        "parent_generations": [agent.parent_generation for agent in agents],
        "mutations": [str(agent.mutation.as_used(config.as_used)) for agent in agents],
        "hyperparameters": [agent.hyperparameters for agent in agents],
        "architectures": [agent.describe()["architectures"] for agent in agents],
        "fitness_std": [score.std for score in scores],
        "fitness_episodes": [score.episodes for score in scores],
        "train_return": _list(counts.train_return),
        "train_length": _list(counts.train_length),
        "train_episodes": [int(episodes) for episodes in counts.train_episodes],
        "metrics": {name: _list(values) for name, values in counts.metrics.items()},
        "updates": _list(counts.updates),
        "state": [agent.state.metrics() for agent in agents],
    }


def evaluation_row(results: EpisodeResults, weights: Mapping[str, float], steps: int) -> dict[str, Any]:
    """Return the part of a generation's line on its evaluation, which took `steps` environment steps of all agents.

    If fitness is more than the return, `terms` has each agent's mean of every fitness term and of the return.
    """
    row: dict[str, Any] = {"evaluation_steps": steps}
    if dict(weights) != {RETURN: 1.0}:
        row["terms"] = {name: _list(values.mean(1)) for name, values in results.terms().items()}
    return row


def lineage_rows(agents: Sequence[Agent], generation: int) -> list[dict[str, Any]]:
    """Return the lines of `lineage.jsonl`: each agent with its parent, mutation and settings."""
    return [{"generation": generation, **agent.describe()} for agent in agents]


def _list(values: NDArray[np.float64]) -> list[float | None]:
    """Convert to JSON numbers, with null for non-finite values."""
    return [float(value) if np.isfinite(value) else None for value in values]
