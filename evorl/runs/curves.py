"""The curves sent to trackers, from lines of `metrics.jsonl`: under standard names, constants left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evorl.config import AnyConfig
from evorl.runs.callbacks import LOGGED
from evorl.tracking.tracker import AgentRecord, Record

SIZES: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "layers": lambda network: len(network["hidden_sizes"]) + sum(network["residual_layers"]),
    "units": lambda network: sum(network["hidden_sizes"]),
    "recurrent_units": lambda network: network["recurrent_size"],
    "channels": lambda network: sum(layer["channels"] for layer in network["convolutions"]),
}
"""Size metrics of an agent's architectures, summed over its networks; sums of 0 are not drawn."""

PER_ACTOR = "steps_per_second/"


def perturbed(config: AnyConfig) -> frozenset[str]:
    """Return the names of the hyperparameters that evolution can change, and `architecture` if it can change those."""
    evolution = config.evolution
    names: set[str] = set()
    if config.population.size > 1:
        names |= set(evolution.hyperparameters or ()) if evolution.mutation.hyperparameters else set()
        names |= {"architecture"} if evolution.mutation.architecture else set()
    if evolution.schedule is not None:
        names |= {mutation.target for mutation in evolution.schedule.mutations if mutation.kind == "hyperparameters"}
        names |= {"architecture" for mutation in evolution.schedule.mutations if mutation.kind == "architecture"}
    return frozenset(names)


Use = Callable[[str, float], float]
"""Maps a hyperparameter's name and stored value to the value that training uses."""


def record_of(row: Mapping[str, Any], varying: frozenset[str], use: Use) -> Record:
    """Convert a line of `metrics.jsonl` to a tracker record with the hyperparameters in `varying` only."""
    places = range(len(row["agents"]))
    agents = [_agent(row, place, varying, use) for place in places]
    names = {name: None for agent in agents for name in agent.points}
    means = {name: _mean(agent.points[name] for agent in agents if name in agent.points) for name in names}
    means.pop("fitness/agents", None)
    points = {
        **means,
        "charts/SPS": row["env_steps_per_second"],
        "fitness/best": row["best_fitness"],
        "fitness/mean": row["mean_fitness"],
        "fitness/elite": row["elite_fitness"],
        "time/updates_per_second": row["updates_per_second"],
        **{f"time/{name}": value for name, value in row["seconds"].items()},
        **{f"callbacks/{name}": value for name, value in row.get(LOGGED, {}).items()},
        **{f"actors/{name}": value for name, value in row.get("actors", {}).items() if not name.startswith(PER_ACTOR)},
    }
    return Record(row["generation"], row["global_steps"], _finite(points), agents)


def _agent(row: Mapping[str, Any], place: int, varying: frozenset[str], use: Use) -> AgentRecord:
    hyperparameters = {name: use(name, value) for name, value in row["hyperparameters"][place].items()}
    architectures = row["architectures"][place]
    sizes = {name: sum(map(size, architectures.values())) for name, size in SIZES.items()}
    lengths, generations = row.get("train_length"), row.get("parent_generations")
    points = {
        "charts/episodic_return": row["train_return"][place],
        "charts/episodic_length": lengths[place] if lengths else None,
        "fitness/agents": row["fitness"][place],
        **{f"fitness/{name}": values[place] for name, values in row.get("terms", {}).items()},
        **{f"losses/{name}": values[place] for name, values in row["metrics"].items()},
        **{f"hyperparameters/{name}": value for name, value in hyperparameters.items() if name in varying},
        **{f"architecture/{name}": size for name, size in sizes.items() if size and "architecture" in varying},
    }
    return AgentRecord(
        id=row["agents"][place],
        parent=row["parents"][place],
        parent_generation=generations[place] if generations else None,
        mutation=row["mutations"][place],
        points=_finite(points),
        hyperparameters=hyperparameters,
        architectures=architectures,
    )


def _finite(points: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in points.items() if value is not None and math.isfinite(value)}


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
