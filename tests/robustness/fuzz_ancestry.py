"""Hostile lineages, for `evorl lineage --settings`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from fuzz_files import EXTREME, changed, several
from fuzz_places import prepared
from fuzz_rooms import RUN, Room
from fuzz_texts import Family, pick

SETTINGS = ("lineage", RUN, "--settings")
KINDS = ("none", "hyperparameters", "parameters", "activation", "architecture", "dormant", "initial", "x", "")
TARGETS = (
    "learning_rate", "gamma", "hidden.0", "hidden.9", "hidden.0.residual_layers", "hidden.x", "kernel.0", "q.hidden.0",
    "noise", "activation", "", ".", "environment.kwargs.x", "a\x1b[2J", "x" * 9000,
)  # fmt: skip


def mutation(rng: np.random.Generator) -> dict[str, Any]:
    """A record of a mutation, of which any part may be wrong."""
    before, after = (pick(rng, (*EXTREME, 1e-3, 16, 32, "tanh", "merged into the next")) for _ in range(2))
    return {"kind": pick(rng, KINDS), "target": pick(rng, TARGETS), "before": before, "after": after}


def lineages(rng: np.random.Generator, room: Room) -> None:
    """Change lines of the lineage: who came from whom, by which mutation, and what it was."""
    lines = [json.loads(line) for line in (room.run / "lineage.jsonl").read_bytes().splitlines()]
    for _ in range(int(rng.integers(1, 6))):
        place = int(rng.integers(len(lines)))
        how = rng.random()
        if how < 0.3:
            lines[place] = {**lines[place], "mutation": mutation(rng)}
        elif how < 0.6:
            key = pick(rng, ("id", "parent", "parent_generation", "generation"))
            lines[place] = {**lines[place], key: pick(rng, (*range(12), None, *EXTREME))}
        elif how < 0.9:
            lines[place] = several(rng, lines[place])
        else:
            del lines[place]
        if not all(isinstance(line, dict) for line in lines) or not lines:
            break
    room.put("lineage.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def metrics(rng: np.random.Generator, room: Room) -> None:
    """Change what the metrics say of the generation that the best agent is of, and of its steps."""
    lines = [json.loads(line) for line in (room.run / "metrics.jsonl").read_bytes().splitlines()]
    place = int(rng.integers(len(lines)))
    key = pick(rng, ("elite_generation", "generation", "agent_steps", "fitness", "agents"))
    lines[place] = {**lines[place], key: changed(rng, lines[place][key])}
    room.put("metrics.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))


ANCESTRY: tuple[Family, ...] = (
    prepared("lineage: lineage --settings", SETTINGS, lineages),
    prepared("metrics: lineage --settings", SETTINGS, metrics),
)
