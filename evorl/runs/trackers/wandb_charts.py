"""Weights & Biases charts of all agents: one chart per metric, with one line per agent.

W&B's standard charts draw one line per run, so these are custom charts. All of them read one table, whose rows are the
living agents and their ancestors: each line is the lineage of an agent, labelled with its id and its last mutation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evorl.runs.trackers.paths import Node, Paths, thinned
from evorl.runs.trackers.record import Record

TABLE = "agents"
SPECIFICATION = "wandb/lineseries/v0"
OWN = ("global_steps", "line", "generation", "agent", "mutation")
MEANS = ("losses/", "hyperparameters/", "architecture/")
"""Metrics whose means over agents are hidden, since there are charts of all agents."""
MOST_ROWS = 2_000
"""The maximum number of rows of a table, and so of points in a chart over all lines."""
EACH = 50
"""Up to this generation tables are uploaded every time; later only if the generation is 5 % beyond the last upload."""

LINEAGE = ("generation", "id", "parent", "mutation", "fitness", "architectures", "hyperparameters")


class AgentTables:
    """The W&B tables of a run: the lineage, and the curves of agents."""

    def __init__(self) -> None:
        self._paths = Paths()
        self._lineage: list[list[Any]] = []
        self._last = 0

    def add(self, record: Record) -> None:
        """Add a generation."""
        self._paths.add(record)
        for agent in record.agents:
            fitness = agent.points.get("fitness/agents")
            shown = cell(agent.architectures), cell(agent.hyperparameters)
            self._lineage.append([record.generation, agent.id, agent.parent, agent.mutation, fitness, *shown])
        del self._lineage[:-MOST_ROWS]

    def are_due(self, generation: int) -> bool:
        """Return True if this generation uploads tables: uploading every time would cost quadratically many rows."""
        due = generation <= EACH or generation >= 1.05 * self._last
        self._last = generation if due else self._last
        return due

    def lineage(self) -> list[list[Any]]:
        """Return the newest rows of the lineage, with the columns `LINEAGE`."""
        return self._lineage

    def curves(self) -> tuple[tuple[str, ...], list[list[Any]]]:
        """Return the column names and the rows of the agents' curves."""
        living = self._paths.living()
        each = max(2, MOST_ROWS // max(1, len(living)))
        lines = {_label(path): thinned(path, each) for path in living.values()}
        names = list({name: None for path in lines.values() for node in path for name in node.agent.points})
        rows = [
            [node.step, label, node.generation, node.agent.id, node.agent.mutation]
            + [node.agent.points.get(name) for name in names]
            for label, path in lines.items()
            for node in path
        ]
        return (*OWN, *names), rows


def charts(tables: AgentTables, record: Record) -> dict[str, Any]:
    """Return one chart per metric of the agents in `record`, by W&B key."""
    import wandb
    from wandb.plot.custom_chart import CustomChart, CustomChartSpec

    class OfOneTable(CustomChartSpec):
        """A custom chart that reads the table shared by all charts."""

        @property
        def table_key(self) -> str:
            return TABLE

    columns, rows = tables.curves()
    table = wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
    found = {}
    for name in dict.fromkeys(name for agent in record.agents for name in agent.points):
        fields = {"step": "global_steps", "lineKey": "line", "lineVal": name}
        words = {"title": name.rpartition("/")[2].replace("_", " "), "xname": "environment steps of all agents"}
        shown = name in record.points and not name.startswith(MEANS)
        found[f"{name}_by_agent" if shown else name] = CustomChart(table, OfOneTable(SPECIFICATION, fields, words))
    return found


def cell(value: Any) -> Any:
    """Format settings for a table cell."""
    if not isinstance(value, Mapping):
        return value
    return ", ".join(f"{key}=({cell(v)})" if isinstance(v, Mapping) else f"{key}={v}" for key, v in value.items())


def _label(path: Sequence[Node]) -> str:
    last = next((node.agent for node in reversed(path) if node.agent.mutation not in ("none", "initial")), None)
    return f"#{path[-1].agent.id}" + (f" {last.mutation}" if last else "")
