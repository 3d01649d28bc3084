"""TensorBoard: curves of the population, one line per agent, and the lineage as text."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig
from evorl.config.schema import as_yaml
from evorl.system.files import make_subdirectory
from evorl.tracking.tracker import History, Node, Paths, Points, Record, Tracker, lineage_table, shared_settings

MOST_AGENTS = 500
"""The most agents of a generation with a line: each has an open file and a thread."""


class TensorBoard(Tracker):
    """Writes event files below `tensorboard/` in the run's directory.

    TensorBoard draws one line per directory: the population's is `tensorboard/` itself, agents have directories below
    it. An agent's line begins at its parent's point when it was created, with the mutation logged as text. A resumed
    run writes its curves anew from its whole history.
    """

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        _silence_threads()
        self._events = directory / "tensorboard"
        if self._events.exists():
            shutil.rmtree(self._events)
        self._writer = self._new_writer(self._events)
        self._step = 0
        self._note("config", f"```yaml\n{as_yaml(shared_settings(config))}```")
        self._paths = Paths()
        self._agents: dict[int, Any] = {}
        for record in history:
            self.log(record)

    def log(self, record: Record) -> None:
        self._log_population(record.step, record.points)
        self._log_agents(record)

    def log_within(self, step: int, points: Points) -> None:
        self._log_population(step, points)

    def log_video(self, step: int, path: Path) -> None:
        self._note("video", str(path))

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        self._note("lineage", lineage_table(lineage))
        self._note("summary", str(dict(summary)))
        self._writer.close()
        for writer in self._agents.values():
            writer.close()

    def _log_population(self, step: int, points: Points) -> None:
        self._step = step
        for name, value in points.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _log_agents(self, record: Record) -> None:
        living = {node.agent.id: node for node in self._paths.add(record)[:MOST_AGENTS]}
        for agent in self._agents.keys() - living.keys():
            self._agents.pop(agent).close()
        for agent, node in living.items():
            if agent not in self._agents:
                self._begin(node)
            for name, value in node.agent.points.items():
                self._agents[agent].add_scalar(name, value, node.step)
            self._agents[agent].flush()

    def _begin(self, node: Node) -> None:
        writer = self._agents[node.agent.id] = self._new_writer(self._events / f"agent-{node.agent.id:04d}")
        if node.before is not None:
            for name, value in node.before.agent.points.items():
                writer.add_scalar(name, value, node.before.step)
        writer.add_text("mutation", node.agent.mutation, node.step)

    def _new_writer(self, path: Path) -> Any:
        # A writer would make the outer directories, too, also those of a run that was moved away.
        make_subdirectory(path)
        return self._writer_class(str(path))

    def _note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, self._step)


def _silence_threads() -> None:
    """Keep tracebacks of TensorBoard's threads from the terminal: the next call of their writer raises the error."""
    report = threading.excepthook
    if report.__module__ == __name__:
        return

    def report_others(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            report(arguments)

    threading.excepthook = report_others
