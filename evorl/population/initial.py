"""Initial agents, and validation of agents read from files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig, check_name
from evorl.evolution.mutation import sample_hyperparameters, sample_sizes
from evorl.networks import ACTIVATIONS
from evorl.networks.stack import check_network, new_tensors
from evorl.seeding import numpy_generator, torch_generator
from evorl.system.processes import check_room
from evorl.types.agents import Agent, AgentState, Architecture
from evorl.types.outcomes import UserError


def initial_population(config: AnyConfig, algorithm: Algorithm) -> list[Agent]:
    """Create the first generation.

    Agents differ only in their random weights or, if `evolution.initial` is `sampled`, also in whatever evolution may
    change: hyperparameters are then drawn from their ranges, and sizes of layers from their limits. A twin has the
    same of all these as its island.
    """
    agents, evolution = [], config.evolution
    for id in range(config.population.agents):
        founder = id % config.population.founders
        generator = torch_generator(config.seed, generation=0, rank=founder, purpose="first parameters")
        agent = Agent(
            id=id,
            architectures={name: spec.architecture for name, spec in algorithm.networks.items()},
            hyperparameters=algorithm.settings.first_hyperparameters(),
            state=AgentState(acting=algorithm.initial_state()),
        )
        if evolution.initial == "sampled":
            rng = numpy_generator(config.seed, generation=0, rank=founder, purpose="first hyperparameters")
            agent.hyperparameters |= sample_hyperparameters(evolution.hyperparameters or {}, rng)
            if evolution.mutation.architecture > 0:
                agent.architectures = {
                    name: sample_sizes(shape, evolution.architecture, rng)
                    for name, shape in agent.architectures.items()
                }
        new_tensors(algorithm.networks, agent, generator)
        agents.append(agent)
    return agents


def check_memory(config: AnyConfig, algorithm: Algorithm) -> None:
    """Raise UserError if this process's agents, with Adam's moments and target networks, do not fit into memory."""
    agents = 1 if config.population.placement == "sharded" else config.population.agents
    numbers = 0
    for spec in algorithm.networks.values():
        sizes, copies = spec.architecture.sizes(), 4 if spec.target is not None else 3
        shapes = (one.shape(sizes) for one in spec.network.specs(spec.architecture).values())
        numbers += copies * sum(map(math.prod, shapes))
    where = f"environment.id: {agents} agents for its spaces, with the layers of network.hidden_sizes"
    check_room(4 * numbers * agents, where)


def not_finite(agent: Agent) -> str | None:
    """Name the first non-finite tensor or statistic, or None."""
    for module, roles in agent.tensors.items():
        for role, named in roles.items():
            for name, value in named.items():
                if not value.isfinite().all():
                    return f"{role} of {module}.{name} not finite"
    wrong = [name for name, value in agent.state.metrics().items() if not math.isfinite(value)]
    return f"{wrong[0]} not finite" if wrong else None


def _kind(shape: Architecture) -> tuple[object, ...]:
    """The attributes of an architecture that mutations never change."""
    counts = bool(shape.hidden_sizes), len(shape.convolutions)
    return shape.activation is None, shape.recurrent, shape.layer_norm, shape.branches, *counts


def check_description(agent: Agent, algorithm: Algorithm, where: str) -> None:
    """Raise UserError unless an agent's hyperparameters and kinds of architecture fit the algorithm."""
    hparams, networks = algorithm.settings.first_hyperparameters(), algorithm.networks
    if agent.architectures.keys() != networks.keys():
        raise UserError(f"{where}: has the networks {sorted(agent.architectures)}, not {sorted(networks)}")
    if agent.hyperparameters.keys() != hparams.keys():
        raise UserError(f"{where}: has the hyperparameters {sorted(agent.hyperparameters)}, not {sorted(hparams)}")
    for name, spec in networks.items():
        shape = agent.architectures[name]
        if shape.activation is not None:
            check_name(f"{where}: activation", shape.activation, ACTIVATIONS)
        if len(shape.residual_layers) != len(shape.hidden_sizes):
            raise UserError(
                f"{where}: {name} has {len(shape.hidden_sizes)} hidden_sizes and {len(shape.residual_layers)} "
                "residual_layers; give one of these for each hidden layer, 0 for none"
            )
        if _kind(shape) != _kind(spec.architecture):
            raise UserError(
                f"{where}: {name} differs from the configuration in its recurrent cell, layer_norm, branches or "
                "convolutions"
            )
    for name, value in agent.hyperparameters.items():
        if reason := algorithm.settings.validation_error(name, value):
            raise UserError(f"{where}: {reason}")


def check_agents(agents: Sequence[Agent], algorithm: Algorithm, where: str) -> None:
    """Raise UserError unless the agents are valid for this algorithm; call it before anything is built from them."""
    acting = algorithm.initial_state()
    if len({agent.id for agent in agents}) < len(agents):
        raise UserError(f"{where}: two agents have the same id")
    for agent in agents:
        here = f"{where}: agent {agent.id}"
        check_description(agent, algorithm, here)
        if agent.tensors.keys() != algorithm.networks.keys():
            raise UserError(f"{here}: has tensors of {sorted(agent.tensors)}, not {sorted(algorithm.networks)}")
        if agent.state.acting.keys() != acting.keys() or agent.state.updates.keys() != algorithm.networks.keys():
            raise UserError(f"{here}: its state is {sorted(agent.state.metrics())[:20]}, which is another algorithm's")
        for name, spec in algorithm.networks.items():
            check_network(agent, name, spec, here)
        if fault := not_finite(agent):
            raise UserError(f"{here}: {fault}")
