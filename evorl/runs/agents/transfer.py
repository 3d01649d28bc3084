"""The agents that a run begins with: new ones, new ones around the settings of earlier runs, or those of another run.

Only the main process reads other runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.errors import shown
from evorl.config.fields import ENVIRONMENT
from evorl.distributed import Ranks
from evorl.population import Predecessor, check_agents, initial_population
from evorl.runs.reading.hub import local_run
from evorl.runs.reading.lineage import Stage, stage_of
from evorl.runs.storage.checkpoint_files import AGENTS, Checkpoints
from evorl.runs.storage.directory import CONFIG, LINEAGE, load_elite, saved_config, saved_settings
from evorl.runs.storage.json_lines import JsonLines
from evorl.system.files import CHECKPOINTS, file_errors, refuse_links_within
from evorl.system.formats import decode_agents, encode_agents
from evorl.types import INITIAL, Agent, UserError

LAST = 5
"""The number of a run's last generations whose agents are compared."""
MOST = 10_000
"""The maximum number of newest lines read from a run's lineage, which may be an untrusted file."""


def first_agents(config: AnyConfig, algorithm: Algorithm, ranks: Ranks) -> list[Agent]:
    """The initial population on all ranks: new agents, or those of the run `population.from`.

    Only the main process reads other runs. Raises UserError on all ranks if these are not what the algorithm can use.
    """
    source, runs = config.population.from_, config.evolution.earlier_runs
    if source is None and not runs:
        return initial_population(config, algorithm)

    def made() -> bytes:
        if source is not None:
            return encode_agents(_trained(config, algorithm, source))
        return encode_agents(initial_population(config, algorithm, read_predecessors(config, algorithm, runs)))

    return decode_agents(ranks.from_main(made, "the initial agents"), "the initial agents")


def _trained(config: AnyConfig, algorithm: Algorithm, run: Path) -> list[Agent]:
    """Agents of a run as an initial population: in order, repeated cyclically if there are too few.

    They keep their weights, optimiser states, hyperparameters and counters such as those of exploration, except
    those that count towards the end of a run.
    """
    where = f"population.from: {run}"
    try:
        with local_run(run) as path:
            found = _elite(path) if config.population.from_agents == "elite" else _newest(path)
            theirs = _config_of(path)
    except UserError as error:
        raise UserError(f"population.from: {error}") from error
    if not found:
        raise UserError(f"{where}: its newest checkpoint holds no agents")
    try:
        check_agents(found, algorithm, where)
    except UserError as error:
        there, here = theirs.environment.id, config.environment.id
        if there == here:
            raise
        # A tensor of another shape would not reveal that the environments differ.
        reason = str(error).removeprefix(f"{where}: ")
        raise UserError(
            f"{where}: was trained in environment.id {shown(there)}, but this run is in {shown(here)}: {reason}"
        ) from error
    agents = []
    for id in range(config.population.size):
        origin = found[id % len(found)]
        hyperparameters = {
            name: value for name, value in origin.hyperparameters.items() if not name.startswith(ENVIRONMENT)
        }
        try:
            agent = algorithm.adopt(replace(origin.child(id), parent=None, fault=None, ranks=()), theirs.algorithm)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        agent.hyperparameters = hyperparameters | config.first_environment_hyperparameters()
        agent.mutation = replace(INITIAL, target=f"agent {origin.id} of {run.name}")
        agents.append(agent)
    return agents


def _elite(run: Path) -> list[Agent]:
    return [load_elite(run)[1]]


def _newest(run: Path) -> list[Agent]:
    """The agents of a run's newest readable checkpoint. Raises UserError if there is none."""
    refuse_links_within(run)
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1)
    problem = "there is none"
    for generation in reversed(checkpoints.generations()):
        try:
            return checkpoints.agents(generation, AGENTS)
        except UserError as error:
            problem = str(error)
    raise UserError(f"{run}: no checkpoint can be read: {problem}")


def read_predecessors(config: AnyConfig, algorithm: Algorithm, runs: Sequence[Path]) -> list[Predecessor]:
    """The elite of each run, and the best quarter of the agents of its last generations.

    Raises UserError if a run cannot be read, or is of another environment or algorithm than `config`.
    """
    predecessors: list[Predecessor] = []
    for run in runs:
        try:
            with file_errors(run):
                _check_task(config, run)
                predecessors += _of(run, config, algorithm)
        except UserError as error:
            raise UserError(f"evolution.initial: {error}") from error
    return predecessors


def _check_task(config: AnyConfig, run: Path) -> None:
    """Raise UserError unless the run trained in the same environment with the same algorithm."""
    theirs = _config_of(run)
    names = {
        "environment.id": (theirs.environment.id, config.environment.id),
        "algorithm.name": (theirs.algorithm.name, config.algorithm.name),
    }
    for key, (their, own) in names.items():
        if their != own:
            raise UserError(f"{run / CONFIG}: {key} is {shown(their)}; list runs in which it is {shown(own)}, as here")


def _config_of(run: Path) -> AnyConfig:
    """The configuration of another run. Raises UserError if it cannot be read."""
    data = saved_settings(run)
    try:
        return saved_config(data)
    except UserError as error:
        raise UserError(f"{run / CONFIG}: {error}") from error


def _of(run: Path, config: AnyConfig, algorithm: Algorithm) -> list[Predecessor]:
    """The predecessors of one run, each agent once."""
    _, elite = load_elite(run)
    path, last = run / LINEAGE, None
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
    elites_settings = _settings(elite, run, config, algorithm)
    return [elites_settings, *(settings[id] for id in best if id != elite.id)]


def _settings(agent: Agent | Stage, run: Path, config: AnyConfig, algorithm: Algorithm) -> Predecessor:
    """The hyperparameters and layer sizes that this run uses; others in an untrusted file are dropped."""
    ranges, networks = config.evolution.hyperparameters or {}, algorithm.networks
    sizes = {
        name: {group: size for group, size in shape.sizes().items() if group in networks[name].architecture.sizes()}
        for name, shape in agent.architectures.items()
        if name in networks
    }
    settings_of_agent = {name: value for name, value in agent.hyperparameters.items() if name in ranges}
    return Predecessor(f"agent {agent.id} of {run.name}", settings_of_agent, sizes)
