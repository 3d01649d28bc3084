"""The agents that a run begins with: new ones, or copies of another run's elite, which only the main process reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig, validate
from evorl.distributed import Ranks
from evorl.population import check_agents, initial_population
from evorl.runs.reading.hub import local_run
from evorl.runs.storage.directory import load_elite
from evorl.system.formats import decode_agents, encode_agents
from evorl.types.agents import INITIAL, Agent
from evorl.types.messages import shown
from evorl.types.outcomes import UserError


def first_agents(config: AnyConfig, algorithm: Algorithm, ranks: Ranks) -> list[Agent]:
    """The initial population on all ranks: new agents, or copies of the elite of the run `population.from`.

    Only the main process reads other runs. Raises UserError on all ranks if these are not what the algorithm can use.
    """
    source = config.population.from_
    if source is None:
        return initial_population(config, algorithm)
    encoded = ranks.from_main(lambda: encode_agents(_trained(config, algorithm, source)), "the initial agents")
    return decode_agents(encoded, "the initial agents")


def _trained(config: AnyConfig, algorithm: Algorithm, run: Path) -> list[Agent]:
    """Copies of a run's elite as an initial population.

    They keep their weights, optimiser states, hyperparameters, but for those in `population.hyperparameters`, and
    counters such as those of exploration, except those that count towards the end of a run.
    """
    where = f"population.from: {run}"
    try:
        with local_run(run) as path:
            settings, elite = load_elite(path)
        theirs = validate(settings)
    except UserError as error:
        raise UserError(f"population.from: {error}") from error
    configured, named = algorithm.settings.first_hyperparameters(), config.population.hyperparameters
    kept = {name: value for name, value in elite.hyperparameters.items() if name not in named}
    elite.hyperparameters = kept | {name: configured[name] for name in named if name in configured}
    try:
        check_agents([elite], algorithm, where)
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
    for id in range(config.population.agents):
        try:
            agent = algorithm.adopt(replace(elite.child(id), parent=None, fault=None, ranks=()), theirs.algorithm)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        agent.mutation = replace(INITIAL, target=f"agent {elite.id} of {run.name}")
        agents.append(agent)
    return agents
