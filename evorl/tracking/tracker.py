"""The base class of trackers, the records that they receive, and the lineages that they draw as lines.

Subclass `Tracker` and register the class in `trackers.py` to add one.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from evorl.config import AnyConfig
from evorl.config.fields import without
from evorl.config.learning import Network
from evorl.system.files import read_json, write_json
from evorl.types.agents import Architecture, Mutation
from evorl.types.messages import shown
from evorl.types.outcomes import UserError

Row = Mapping[str, Any]
"""A line of `metrics.jsonl` or `lineage.jsonl`, or the content of `summary.json`."""
Points = Mapping[str, float]
"""Scalars by name, such as `losses/q_loss`; the part before the slash groups charts."""
TRACKER_PATIENCE = 60.0
"""Seconds that a tracker may take to connect, and at the end to upload what is left."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one generation: its `points`, its parent, and the `mutation` that created it, in words."""

    id: int
    parent: int | None = None
    mutation: str = "initial"
    points: Points = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One generation, which ended after `step` environment steps of all agents.

    `points` are the metrics of the population; for metrics of agents, the mean over agents.
    """

    generation: int
    step: int
    points: Points
    agents: Sequence[AgentRecord] = ()


History = Iterable[Record]
"""The generations of a run before it was resumed, in order; can be iterated several times."""


class Tracker(ABC):
    """An experiment tracker of one run: a chart per metric, over the environment steps of all agents.

    Constructed as (configuration, run directory, history). On resume, it logs the part of the history that it lacks and
    discards what it logged after it. Any method may raise: the tracker is then dropped, and training continues.
    Methods that are not abstract may be left out.
    """

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log a generation; generations and steps are increasing."""

    def log_within(self, step: int, points: Points) -> None:  # noqa: B027
        """Log population metrics from within a generation, at approximately `step`."""

    def log_video(self, step: int, path: Path) -> None:  # noqa: B027
        """Log the video of a new elite, found at `step`."""

    @abstractmethod
    def finish(self, summary: Row, lineage: Sequence[Row]) -> None:
        """Log the summary and the newest lines of the lineage, and close the tracker."""


def shared_settings(config: AnyConfig) -> dict[str, Any]:
    """Return all settings except those in `tracking.exclude`."""
    # One entry may name a setting within the section that another names, and a published run lacks what it excludes.
    return without(config.model_dump(mode="json"), config.tracking.exclude)


def check_exclusions(config: AnyConfig) -> None:
    """Raise UserError if `tracking.exclude` names an unknown setting, or one that trackers are sent with each agent."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    carried = [f"algorithm.{name}" for name in config.algorithm.hyperparameters]
    carried += [f"network.{each.name}" for each in fields(Architecture) if each.name in Network.model_fields]
    for path in config.tracking.exclude:
        if without(settings, [path]) == settings:
            raise UserError(f"tracking.exclude: there is no setting {shown(path)} to leave out")
        if "environment.id.".startswith(f"{path}."):
            raise UserError(f"tracking.exclude: {path} cannot be left out, because runs are named by environment.id")
        for name in carried:
            if f"{name}.".startswith(f"{path}."):
                raise UserError(
                    f"tracking.exclude: {path} cannot be left out, because {name} belongs to each agent, and trackers "
                    "show the settings of agents; take it off the list"
                )


def with_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `lineage.jsonl` with its mutation described in words."""
    return {**row, "mutation": str(Mutation(**row["mutation"]))}


def lineage_table(lineage: Sequence[Row]) -> str:
    columns = ("generation", "id", "parent", "mutation", "fitness")
    rows = [[str(row[column]) for column in columns] for row in map(with_words, lineage)]
    headings = [["generation", "agent", *columns[2:]], ["---"] * len(columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*headings, *rows])


@dataclass(frozen=True, eq=False)
class Node:
    """An agent in one generation, which ended at environment step `step`.

    `before` is the same agent a generation earlier, or its parent when it was born; None for an initial agent.
    """

    generation: int
    step: int
    agent: AgentRecord
    before: Node | None

    def path(self) -> list[Node]:
        """The agent's line of descent, from an initial agent to itself."""
        path, node = [self], self.before
        while node is not None:
            path.append(node)
            node = node.before
        return path[::-1]


class Paths:
    """The agents of the newest generation, each with its line of descent."""

    def __init__(self) -> None:
        self._newest: dict[int | None, Node] = {}

    def add(self, record: Record) -> list[Node]:
        """Add the agents of a generation, and return them in their order."""
        living = [
            Node(record.generation, record.step, agent, self._newest.get(agent.id) or self._newest.get(agent.parent))
            for agent in record.agents
        ]
        self._newest = {node.agent.id: node for node in living}
        return living


def thinned(items: Sequence[Item], most: int) -> Sequence[Item]:
    """At most `most` evenly spaced items, including the last one."""
    stride = max(1, -(-len(items) // most))
    return items[(len(items) - 1) % stride :: stride]


def run_id(directory: Path) -> str:
    """The id of the run in `directory` for W&B and Trackio, drawn at random once and stored in its `tracking.json`."""
    path = directory / "tracking.json"
    if path.exists():
        return str(read_json(path)["wandb"])
    # A sweep agent waits for the run with the id that it passed.
    swept = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    drawn = swept or secrets.token_hex(8)
    write_json(path, {"wandb": drawn})
    return drawn
