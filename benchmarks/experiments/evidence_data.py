"""The runs of the first experiments of docs/protocols.md, and their scores."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from score_statistics import Array

sys.path.append(str(Path(__file__).parents[1]))
from records import read_lines

CARTPOLE, ACROBOT, LUNAR_LANDER = (22.14, 475.0), (-499.62, -100.0), (-181.37, 200.0)
ENDS = {
    "cartpole": CARTPOLE,
    "cartpole_dqn": CARTPOLE,
    "acrobot": ACROBOT,
    "acrobot_wide": ACROBOT,
    "acrobot_wider": ACROBOT,
    "lunar_lander": LUNAR_LANDER,
    "lunar_lander_wide": LUNAR_LANDER,
    "lunar_lander_less_wide": LUNAR_LANDER,
}
"""The mean returns of a random policy and of a solved task, which define the scores 0 and 1."""
Line = Mapping[str, Any]


def read(*paths: Path) -> dict[tuple[str, str], list[Line]]:
    """Return the runs of these files."""
    runs: dict[tuple[str, str], list[Line]] = {}
    for path in paths:
        for line in read_lines(path):
            runs.setdefault((line["task"], line["arm"]), []).append(line)
    return runs


def normalised(values: Any, task: str) -> Array:
    """Normalise mean returns to scores: 0 for a random policy, 1 for a solved task."""
    low, high = ENDS[task]
    return (np.asarray(values, dtype=float) - low) / (high - low)


def score(line: Line) -> float:
    """Return the held-out score of a run's final agent."""
    return float(normalised(line["held_out"]["mean"], line["task"]))


def scores_of(lines: Iterable[Line]) -> Array:
    """Return the held-out scores of runs [runs]."""
    return np.array([score(line) for line in lines])


def trials_of(pools: Iterable[Line]) -> list[Array]:
    """Return for each pool the final fitness and the held-out score of its agents, [agents, 2]."""
    return [np.stack([line["fitness"][-1], normalised(line["members"], line["task"])], axis=1) for line in pools]
