"""The tasks that shipped configurations are for, and what of a file holds for other tasks and algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GAMES = ("pettingzoo", "openspiel")
"""The prefixes of ids of PettingZoo's and OpenSpiel's games, which are one suite."""
SIMULATORS = ("gymnax", "brax")
"""The prefixes of ids of environments that a package simulates in tensors."""
OF_TASK = ("environment", "evaluation", "training", "evolution.steps", "evolution.fitness")
"""Settings of a shipped file that are for its own task; of the environment's, the number of copies holds for others."""
OF_ALGORITHM = ("algorithm", "replay", "actors", "evolution.hyperparameters")
"""Settings of a file that are for its own algorithm."""


def environment_of(data: Mapping[str, Any]) -> str:
    """Return the environment id in a file's settings, or an empty string."""
    section = data.get("environment")
    id = section.get("id") if isinstance(section, dict) else section
    return id if isinstance(id, str) else ""


def suite_of(id: str) -> str:
    """Return the suite of an environment id, such as ALE of ALE/Pong-v5, or an empty string."""
    before = id.partition(":")[0]
    if before in GAMES and before != id:
        return "games"
    return id.rpartition(":")[2].rpartition("/")[0]


@dataclass(frozen=True)
class Tuned:
    """A shipped configuration's entry in `configs/tasks.yaml`: its algorithm, and the tasks that it is for.

    `tasks` maps an environment id, or `SUITE/*` for all of a suite, to the settings that this task adds to the file.
    """

    algorithm: str
    tasks: Mapping[str, Mapping[str, Any]]

    def settings_for(self, id: str) -> Mapping[str, Any] | None:
        """Return the settings that the task `id` adds to the file, by dotted path; None if the file is not for it."""
        suite = id.partition(":")[0]
        if suite in SIMULATORS:
            return self.tasks.get(id, self.tasks.get(f"{suite}:*"))
        name = id.rpartition(":")[2]
        return self.tasks.get(id, self.tasks.get(name, self.tasks.get(f"{suite_of(name)}/*")))
