"""The agents that a run begins with: new ones, or those of another run (`population.from`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.fields import ENVIRONMENT
from evorl.distributed import Ranks
from evorl.evolution.strategy import Tuner
from evorl.population import check_agents, initial_population
from evorl.runs.directory import AGENTS, Checkpoints, load_elite
from evorl.runs.predecessors import read_predecessors
from evorl.system.files import refuse_links_within
from evorl.system.formats import decode_agents, encode_agents
from evorl.types import INITIAL, Agent, UserError


def first_agents(config: AnyConfig, algorithm: Algorithm, ranks: Ranks, tuner: Tuner | None = None) -> list[Agent]:
    """The initial population on all ranks: new agents, or those of the run `population.from`.

    Only the main process reads other runs, and has the `tuner` of `evolution.strategy`, which chooses the
    hyperparameters of new agents. Raises UserError on all ranks if these are not what the algorithm can use.
    """
    source, runs = config.population.from_, config.evolution.earlier_runs
    if source is None and not runs and config.evolution.strategy is None:
        return initial_population(config, algorithm)

    def made() -> bytes:
        if source is not None:
            return encode_agents(_trained(config, algorithm, source))
        agents = initial_population(config, algorithm, read_predecessors(config, algorithm, runs))
        if tuner is not None:
            tuner.begin(agents)
        return encode_agents(agents)

    return decode_agents(ranks.from_main(made, "the initial agents"), "the initial agents")


def _trained(config: AnyConfig, algorithm: Algorithm, run: Path) -> list[Agent]:
    """Agents of a run as an initial population: in order, repeated cyclically if there are too few.

    They keep their weights, optimiser states, hyperparameters and counters, such as the exploration's.
    """
    where = f"population.from: {run}"
    try:
        found = _elite(run) if config.population.from_agents == "elite" else _newest(run)
    except UserError as error:
        raise UserError(f"population.from: {error}") from error
    check_agents(found, algorithm, where)
    agents = []
    for id in range(config.population.size):
        origin = found[id % len(found)]
        own = {name: value for name, value in origin.hyperparameters.items() if not name.startswith(ENVIRONMENT)}
        agent = replace(origin.child(id), parent=None, fault=None)
        agent.hyperparameters = own | config.first_environment_hyperparameters()
        agent.mutation = replace(INITIAL, target=f"agent {origin.id} of {run.name}")
        agents.append(agent)
    return agents


def _elite(run: Path) -> list[Agent]:
    return [load_elite(run)[1]]


def _newest(run: Path) -> list[Agent]:
    """The agents of a run's newest readable checkpoint. Raises UserError if there is none."""
    refuse_links_within(run)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    problem = "there is none"
    for generation in reversed(checkpoints.generations()):
        try:
            return decode_agents(checkpoints.read(generation, AGENTS), str(checkpoints.path(generation) / AGENTS))
        except UserError as error:
            problem = str(error)
    raise UserError(f"{run}: no checkpoint can be read: {problem}")
