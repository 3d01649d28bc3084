"""The configuration that a command line names, and the program that trains it.

Neither needs torch, so a mistyped key is told before that is imported, which takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evorl.config import AnyConfig, validate
from evorl.config.fields import RETURN
from evorl.config.yaml import ROOT, is_for_another_task, read_settings

ONLINE = ROOT / "demos" / "online.py"
ASYNCHRONOUS = ROOT / "demos" / "asynchronous.py"
"""The program for algorithms that learn from actor processes."""


def read_config(path: Path, assignments: Sequence[str]) -> AnyConfig:
    """Read a configuration file and apply `key.path=value` assignments. Raises UserError.

    Where a shipped file is of another environment, the reward threshold of the one that fitness counts is the target.
    """
    settings = read_settings(path, assignments)
    config = validate(settings)
    if "target_fitness" in settings.get("training", {}) or not is_for_another_task(path, settings):
        return config
    threshold = None
    if config.evolution.fitness == {RETURN: 1.0}:
        from evorl.envs.vector import reward_threshold

        threshold = reward_threshold(config.evaluation_environment)
    target = None if threshold is None else float(threshold)
    return config.model_copy(update={"training": config.training.model_copy(update={"target_fitness": target})})


def program_for(config: AnyConfig) -> Path:
    """The demo that trains with this configuration."""
    return ONLINE if config.actors is None else ASYNCHRONOUS
