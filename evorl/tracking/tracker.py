"""The base class of trackers, the records that they receive, and the lineages that they draw as lines.

Subclass `Tracker` and register the class in `trackers.py` to add one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from evorl.config import AnyConfig
from evorl.config.errors import shown
from evorl.system.files import read_bytes, write_json
from evorl.types.agents import Mutation
from evorl.types.outcomes import EvorlWarning, UserError

Row = Mapping[str, Any]
"""A line of `metrics.jsonl` or `lineage.jsonl`, or the content of `summary.json`."""
Points = Mapping[str, float]
"""Scalars by name, such as `losses/q_loss`; the part before the slash groups charts."""
TRACKER_PATIENCE = 60.0
"""Seconds that a tracker may take to connect, and at the end to upload what is left."""
RUN_ID = re.compile(r"[a-z0-9]{1,64}")


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one generation: its `points`, its parent, and the `mutation` that created it, in words."""

    id: int
    parent: int | None = None
    parent_generation: int | None = None
    mutation: str = "initial"
    points: Points = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    architectures: Mapping[str, Any] = field(default_factory=dict)


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
    settings: dict[str, Any] = config.model_dump(mode="json")
    # One entry may name a setting within the section that another names, and a published run lacks what it excludes.
    for path in config.tracking.exclude:
        _section_of(path, settings).pop(path.rpartition(".")[2], None)
    return settings


def check_exclusions(config: AnyConfig) -> None:
    """Raise UserError if `tracking.exclude` names an unknown setting."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    for path in config.tracking.exclude:
        if path.rpartition(".")[2] not in _section_of(path, settings):
            raise UserError(f"tracking.exclude: there is no setting {shown(path)} to leave out")


def _section_of(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The section that would hold the setting at `path`; empty if there is none."""
    section: Any = settings
    for name in path.split(".")[:-1]:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def with_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `lineage.jsonl` with its mutation described in words."""
    return {**row, "mutation": str(Mutation(**row["mutation"]))}


def lineage_table(lineage: Sequence[Row]) -> str:
    columns = ("generation", "id", "parent", "mutation", "fitness")
    rows = [[str(row[column]) for column in columns] for row in map(with_words, lineage)]
    headings = [["generation", "agent", *columns[2:]], ["---"] * len(columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*headings, *rows])


class Node(NamedTuple):
    """An agent in one generation, which ended at environment step `step`."""

    generation: int
    step: int
    agent: AgentRecord


RECENT = 50
"""The number of newest generations of which all agents are kept, since they may still become parents; of older
generations only ancestors are kept."""


class Paths:
    """The agents so far, by id. The curve of an agent begins with that of its ancestors.

    Agents without descendants are dropped, so with selection memory grows with the number of generations, not of
    agents; without selection none are dropped.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, list[Node]] = {}
        self._living: list[int] = []

    def add(self, record: Record) -> None:
        for agent in record.agents:
            drawn = replace(agent, hyperparameters={}, architectures={})
            self._nodes.setdefault(agent.id, []).append(Node(record.generation, record.step, drawn))
        self._living = [agent.id for agent in record.agents]
        if record.generation % RECENT == 0:
            self._forget(record.generation - RECENT)

    def living(self) -> dict[int, list[Node]]:
        """Return the lineage of each agent of the newest generation, from an initial agent to itself."""
        return {agent: self._path(agent) for agent in self._living}

    def parent(self, node: Node) -> Node | None:
        """Return the parent of an agent in the generation in which the child was created, or None if not known."""
        before = node.agent.parent_generation or node.generation - 1
        older = [one for one in self._nodes.get(node.agent.parent or 0, ()) if one.generation <= before]
        return older[-1] if node.agent.parent is not None and older else None

    def _forget(self, generation: int) -> None:
        """Drop nodes up to `generation` that have no descendants in later generations."""
        newest: dict[int, int] = {}  # The newest generation needed of each agent.
        for nodes in self._nodes.values():
            node: Node | None = nodes[-1]
            if nodes[-1].generation <= generation:
                continue
            while node is not None and newest.get(node.agent.id, 0) < node.generation:
                newest[node.agent.id] = node.generation
                node = self.parent(self._nodes[node.agent.id][0])
        self._nodes = {
            id: [node for node in nodes if node.generation <= newest[id]]
            for id, nodes in self._nodes.items()
            if id in newest
        }

    def _path(self, agent: int) -> list[Node]:
        path: list[Node] = []
        nodes = self._nodes[agent]
        while nodes:
            path = nodes + path
            parent = self.parent(nodes[0])
            nodes = [] if parent is None else [one for one in self._nodes[parent.agent.id] if one.step <= parent.step]
        return path


def thinned(path: list[Node], most: int) -> list[Node]:
    """Return at most `most` evenly spaced nodes of a path, including the last one."""
    stride = -(-len(path) // most)
    return path[(len(path) - 1) % stride :: stride]


def run_id(directory: Path) -> str:
    """The id of the run in `directory` for W&B and Trackio, drawn at random once and stored in its `tracking.json`."""
    path = directory / "tracking.json"
    try:
        id = json.loads(read_bytes(path))["wandb"]
        if RUN_ID.fullmatch(id):
            return str(id)
        reason = "its id is not 1 to 64 lowercase letters and digits"
    except FileNotFoundError:
        reason = None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        reason = f"it holds no id ({type(error).__name__})"
    if reason:
        warnings.warn(
            f"{path}: {reason}; the tracker gets a new run, with the whole history", EvorlWarning, stacklevel=2
        )
    # A sweep agent waits for the run with the id that it passed.
    swept = os.environ.get("WANDB_RUN_ID", "") if os.environ.get("WANDB_SWEEP_ID") else ""
    drawn = swept if RUN_ID.fullmatch(swept) else secrets.token_hex(8)
    write_json(path, {"wandb": drawn})
    return drawn
