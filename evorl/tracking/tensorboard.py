"""TensorBoard: the same curves, and the lineage as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config import AnyConfig


class TensorBoard:
    """Event files below `tensorboard/` in the run's directory. Raises ImportError without the extra."""

    def __init__(self, config: AnyConfig, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("install it with `pip install -e '.[tensorboard]'`") from error
        self._writer = SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("config", f"```yaml\n{config.to_yaml()}```")
        self._step = 0

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._step = step
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> None:
        lines = ["| generation | agent | parent | mutation | fitness |", "|---|---|---|---|---|"]
        columns = ("generation", "id", "parent", "mutation", "fitness")
        lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in lineage]
        self._writer.add_text("lineage", "\n".join(lines), self._step)
        self._writer.add_text("summary", str(dict(summary)), self._step)
        self._writer.close()
