"""The settings that ended well in earlier runs of a task, around which initial agents are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from evorl.algorithms import SETTINGS, Algorithm
from evorl.config import AnyConfig, validate, without_removed
from evorl.config.errors import shown
from evorl.population import Predecessor
from evorl.runs.directory import CONFIG, JsonLines, load_elite, read_config
from evorl.runs.lineage import Stage, stage_of
from evorl.system.files import reason
from evorl.types import Agent, UserError

LAST = 5
"""The number of a run's last generations whose agents are compared."""
MOST = 10_000
"""The number of newest lines that are read of a run's lineage, which may be any stranger's file."""


def read_predecessors(config: AnyConfig, algorithm: Algorithm, runs: Sequence[Path]) -> list[Predecessor]:
    """The elite of each run, and the best quarter of the agents of its last generations.

    Raises UserError if a run cannot be read, or is of another environment or algorithm than `config`.
    """
    found: list[Predecessor] = []
    for run in runs:
        try:
            _check_task(config, run)
            found += _of(run, config, algorithm)
        except UserError as error:
            raise UserError(f"evolution.initial: {error}") from error
        except OSError as error:
            raise UserError(f"evolution.initial: {reason(error, run)}") from error
    return found


def _check_task(config: AnyConfig, run: Path) -> None:
    """Raise UserError unless the run trained in the same environment with the same algorithm."""
    data = read_config(run)
    try:
        theirs = validate(without_removed(data), SETTINGS)
    except UserError as error:
        raise UserError(f"{run / CONFIG}: {error}") from error
    names = {
        "environment.id": (theirs.environment.id, config.environment.id),
        "algorithm.name": (theirs.algorithm.name, config.algorithm.name),
    }
    for key, (their, own) in names.items():
        if their != own:
            raise UserError(f"{run / CONFIG}: {key} is {shown(their)}; list runs in which it is {shown(own)}, as here")


def _of(run: Path, config: AnyConfig, algorithm: Algorithm) -> list[Predecessor]:
    """The predecessors of one run, each agent once."""
    _, elite = load_elite(run)
    path, last = run / "lineage.jsonl", None
    fitness: dict[int, float] = {}
    settings: dict[int, Predecessor] = {}
    for row in islice(JsonLines(path).backwards(), MOST):
        last = row["generation"] if last is None else last
        if row["generation"] <= last - LAST:
            break
        stage = stage_of(row, path)
        if stage.id not in settings:
            settings[stage.id] = _settings(stage, run, config, algorithm)
            fitness |= {} if stage.fitness is None else {stage.id: stage.fitness}
    if not fitness:
        raise UserError(f"{path}: no agent of the last generations has a fitness; leave this run out")
    best = sorted(fitness, key=lambda id: (-fitness[id], -id))[: math.ceil(len(fitness) / 4)]
    own = _settings(elite, run, config, algorithm)
    return [own, *(settings[id] for id in best if id != elite.id)]


def _settings(agent: Agent | Stage, run: Path, config: AnyConfig, algorithm: Algorithm) -> Predecessor:
    """The part of an agent's settings that this run can use; a file does not decide how much is kept."""
    ranges, networks = config.evolution.hyperparameters or {}, algorithm.networks
    sizes = {
        name: {group: size for group, size in shape.sizes().items() if group in networks[name].architecture.sizes()}
        for name, shape in agent.architectures.items()
        if name in networks
    }
    own = {name: value for name, value in agent.hyperparameters.items() if name in ranges}
    return Predecessor(f"agent {agent.id} of {run.name}", own, sizes)
