"""Read the offline W&B files of runs with the client's own protobuf records, and count the panels that W&B opens.

    python tests/helpers/offline_wandb.py runs/my-run ...

Every logged scalar opens a panel unless it is hidden, and so does every custom chart, table and video.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
"""Sizes in bytes of the file's blocks, and of the header before each fragment of a record."""
FULL, LAST = 1, 4
"""The fragment types that end a record."""
PATIENCE = 10.0
"""Seconds to wait for W&B's helper process to write the end of a file, since `finish` does not."""


def records(directory: Path) -> list[Any]:
    """Read all records of an offline directory of a run that has ended."""
    (path,) = Path(directory).glob("*.wandb")
    deadline = time.monotonic() + PATIENCE
    while True:
        found = list(_records(path.read_bytes()))
        if any(record.HasField("exit") for record in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _records(data: bytes) -> Iterator[Any]:
    position, whole = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if position + HEADER + length > len(data):  # It is being written.
            return
        whole += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def panels(directory: Path) -> Counter[str]:
    """Return the number of panels of each kind that W&B opens for the run of an offline directory."""
    hidden: set[str] = set()
    kinds: dict[str, str] = {}
    for record in records(directory):
        if record.HasField("metric") and record.metric.options.hidden:
            hidden.add(record.metric.name)
        for item in record.config.update:
            if list(item.nested_key[:2]) == ["_wandb", "visualize"]:
                kinds[item.nested_key[2]] = "charts of all agents"
        # A table may be in the summary only; for scalars, the summary repeats the last value.
        for item in (*record.history.item, *record.summary.update):
            name, *rest = item.nested_key or (item.key,)
            if rest == ["_type"]:
                kinds[name] = json.loads(item.value_json)
            elif not rest and not name.startswith("_"):
                value = json.loads(item.value_json)
                if isinstance(value, dict) and "_type" in value:
                    kinds.setdefault(name, value["_type"])
                elif record.HasField("history"):
                    kinds.setdefault(name, "numbers")
    return Counter(kind for name, kind in kinds.items() if name not in hidden)


def main() -> None:
    for run in sys.argv[1:]:
        newest = sorted((Path(run) / "wandb").glob("offline-run-*"))[-1]
        counts = panels(newest)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(f"{run}: {counts.total()} panels: {told}")


if __name__ == "__main__":
    main()
