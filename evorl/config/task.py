"""The tasks that shipped configurations are for, and what of a file holds for other tasks and algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GAMES = ("pettingzoo", "openspiel")
"""The prefixes of ids of PettingZoo's and OpenSpiel's games, which are one suite."""
SIMULATORS = ("gymnax", "brax", "playground")
"""The prefixes of ids of environments that a package simulates in tensors."""
OF_TASK = ("environment", "evaluation", "training")
"""Sections of a shipped file that are for its own task."""
LENGTH_AND_FITNESS = ("steps", "fitness")
"""Keys of `evolution` in a shipped file that are for its own task."""
OF_ALGORITHM = ("algorithm", "replay", "actors")
"""Sections of a file that are for its own algorithm."""


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

    def is_for(self, id: str) -> bool:
        """Return whether the file is tuned for the task `id`."""
        return self._entry(id) is not None

    def settings_for(self, id: str) -> Mapping[str, Any]:
        """Return the settings that the task `id` adds to the file, by dotted path."""
        return self._entry(id) or {}

    def _entry(self, id: str) -> Mapping[str, Any] | None:
        suite = id.partition(":")[0]
        if suite in SIMULATORS:
            return self.tasks.get(id, self.tasks.get(f"{suite}:*"))
        id = id.rpartition(":")[2]
        return self.tasks.get(id, self.tasks.get(f"{suite_of(id)}/*"))


def without_algorithm(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings without its algorithm, replay and actors, and the ranges of their hyperparameters."""
    settings = {name: section for name, section in data.items() if name not in OF_ALGORITHM}
    if isinstance(evolution := data.get("evolution"), dict):
        settings["evolution"] = {key: value for key, value in evolution.items() if key != "hyperparameters"}
    return settings


def without_target(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings without its target, which is for its own environment."""
    training = {key: value for key, value in data.get("training", {}).items() if key != "target_fitness"}
    return {**data, "training": training}


def without_task(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shipped file's settings of its algorithm: without its task's target, lengths, fitness and environment.

    The number of environments stays.
    """
    settings = {name: section for name, section in data.items() if name not in OF_TASK}
    evolution = data.get("evolution", {})
    settings["evolution"] = {key: value for key, value in evolution.items() if key not in LENGTH_AND_FITNESS}
    settings["environment"] = {key: value for key, value in data["environment"].items() if key == "num_envs"}
    return settings
