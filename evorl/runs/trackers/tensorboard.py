"""TensorBoard: the same curves, and the lineage as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evorl.config import AnyConfig
from evorl.runs.trackers.history import History, Points, lacking, with_words
from evorl.runs.trackers.shared import shared_settings


class TensorBoard:
    """Event files below `tensorboard/` in the run's directory. Raises ImportError without the extra."""

    def __init__(self, config: AnyConfig, directory: Path, history: History = ()) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("install it with `pip install -e '.[tensorboard]'`") from error
        events = directory / "tensorboard"
        known = _generations(events)
        first = next((generation for generation, _, _ in history if generation not in known), len(history) + 1)
        missing = lacking(history, first)
        last = history[-1][1] if history else -1
        # TensorBoard forgets everything from here on: it is logged again below, or about to be re-run after resume.
        begin = missing[0][1] if missing else last + 1
        self._writer = SummaryWriter(str(events), purge_step=begin)
        self._step = last
        self._note("config", f"```yaml\n{yaml.safe_dump(shared_settings(config), sort_keys=False)}```")
        for entry in missing:
            self.log(*entry)

    def log(self, generation: int, step: int, scalars: Points) -> None:
        self._step = step
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        lines = ["| generation | agent | parent | mutation | fitness |", "|---|---|---|---|---|"]
        columns = ("generation", "id", "parent", "mutation", "fitness")
        lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in map(with_words, lineage)]
        self._note("lineage", "\n".join(lines))
        self._note("summary", str(dict(summary)))
        self._writer.close()

    def _note(self, name: str, text: str) -> None:
        # One step beyond the last generation, so that a run that goes on from there replaces it.
        self._writer.add_text(name, text, self._step + 1)


def _generations(events: Path) -> set[int]:
    """Return the generations that event files already hold."""
    if not events.is_dir():
        return set()
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    everything = {event_accumulator.SCALARS: 0}
    known = event_accumulator.EventAccumulator(str(events), size_guidance=everything).Reload()
    if "generation" not in known.Tags()[event_accumulator.SCALARS]:
        return set()
    return {int(event.value) for event in known.Scalars("generation")}
