"""Compare what two runs have left, without what a clock measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED = ("seconds", "wall_clock_seconds", "env_steps_per_second", "updates_per_second")
"""Keys of metrics and states that a clock decides."""


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of the files that differ between two runs, or that only one of them has."""
    first, second = _contents(one), _contents(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def drifts(run: Path) -> int:
    """Return the number of generations in which replicas drifted apart."""
    return sum(json.loads(line)["drifts"] > 0 for line in (run / "metrics.jsonl").read_text().splitlines())


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics."""
    return [_unmeasured(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _contents(run: Path) -> dict[str, Any]:
    """Return agents, checkpoints, metrics and lineage of a run by file name."""
    contents: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            contents[name] = metrics(run)
        elif path.suffix == ".safetensors" or path.name in ("agent.json", "lineage.jsonl"):
            contents[name] = path.read_bytes()
        elif path.name == "state.json":
            contents[name] = _unmeasured(json.loads(path.read_bytes()))
    return contents


def _unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in MEASURED}
