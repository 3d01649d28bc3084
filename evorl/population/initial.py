"""Initial agents, and checks of agents that are read from files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig, check_name
from evorl.config.fields import ENVIRONMENT
from evorl.evolution.founders import sample_hyperparameters, sample_sizes
from evorl.networks import ACTIVATIONS
from evorl.networks.stacked import check_network, new_tensors
from evorl.randomness import numpy_generator, torch_generator
from evorl.types import Agent, AgentState, Architecture, UserError

MAX_COUNT = 1e15
"""A bound above all that an agent counts."""


def initial_population(config: AnyConfig, algorithm: Algorithm) -> list[Agent]:
    """Return the first generation.

    Agents differ only in their random weights, or, with `evolution.initial: sampled`, in what evolution may change too.
    """
    agents, evolution = [], config.evolution
    for id in range(config.population.size):
        generator = torch_generator(config.seed, generation=0, rank=id, purpose="first parameters")
        agent = Agent(
            id=id,
            architectures={name: spec.architecture for name, spec in algorithm.networks.items()},
            hyperparameters=algorithm.settings.first_hyperparameters() | config.first_environment_hyperparameters(),
            tensors={},
            state=AgentState(acting=algorithm.initial_state()),
        )
        if evolution.schedule is not None:
            agent.hyperparameters = dict(evolution.schedule.hyperparameters)
            agent.architectures = dict(evolution.schedule.architectures)
            check_description(agent, algorithm, "evolution.schedule")
            check_environment_hyperparameters([agent], config, "evolution.schedule")
        elif evolution.initial == "sampled":
            rng = numpy_generator(config.seed, generation=0, rank=id, purpose="first hyperparameters")
            agent.hyperparameters = sample_hyperparameters(agent.hyperparameters, evolution.hyperparameters or {}, rng)
            if evolution.mutation.architecture > 0:
                shapes = agent.architectures.items()
                agent.architectures = {name: sample_sizes(shape, evolution.architecture, rng) for name, shape in shapes}
        new_tensors(algorithm.networks, agent, generator)
        agents.append(agent)
    return agents


def not_finite(agent: Agent) -> str | None:
    """Return what of an agent is not a finite number, if anything is."""
    for module, roles in agent.tensors.items():
        for role, named in roles.items():
            for name, value in named.items():
                if not value.isfinite().all():
                    return f"{role} of {module}.{name} not finite"
    wrong = [name for name, value in agent.state.metrics().items() if not math.isfinite(value)]
    return f"{wrong[0]} not finite" if wrong else None


def _kind(shape: Architecture) -> tuple[object, ...]:
    """Return what no mutation changes of an architecture."""
    counts = bool(shape.hidden_sizes), len(shape.convolutions)
    return shape.activation is None, shape.recurrent, shape.layer_norm, shape.streams, *counts


def check_description(agent: Agent, algorithm: Algorithm, where: str) -> None:
    """Raise UserError unless an agent's hyperparameters and kinds of architectures are this algorithm's."""
    hparams, networks = algorithm.settings.first_hyperparameters(), algorithm.networks
    own = {name: value for name, value in agent.hyperparameters.items() if not name.startswith(ENVIRONMENT)}
    if agent.architectures.keys() != networks.keys():
        raise UserError(f"{where}: has the networks {sorted(agent.architectures)}, not {sorted(networks)}")
    if own.keys() != hparams.keys():
        raise UserError(f"{where}: has the hyperparameters {sorted(own)}, not {sorted(hparams)}")
    for name, spec in networks.items():
        shape = agent.architectures[name]
        if shape.activation is not None:
            check_name(f"{where}: activation", shape.activation, ACTIVATIONS)
        if _kind(shape) != _kind(spec.architecture):
            raise UserError(f"{where}: {name} is of another kind than the configuration asks for")
    for name, value in own.items():
        if reason := algorithm.settings.validation_error(name, value):
            raise UserError(f"{where}: {reason}")


def check_environment_hyperparameters(agents: Sequence[Agent], config: AnyConfig, where: str) -> None:
    """Raise UserError unless agents have those settings of environments that evolution may perturb, in their ranges."""
    first, ranges = config.first_environment_hyperparameters(), config.evolution.hyperparameters or {}
    for agent in agents:
        own = {name: value for name, value in agent.hyperparameters.items() if name.startswith(ENVIRONMENT)}
        if own.keys() != first.keys():
            raise UserError(
                f"{where}: agent {agent.id} has {sorted(own) or 'no'} settings of environments, not {sorted(first)}"
            )
        for name, value in own.items():
            if not min(first[name], ranges[name].min) <= value <= max(first[name], ranges[name].max):
                raise UserError(f"{where}: agent {agent.id} has {name} {value:g}, which is outside its range")


def check_agents(agents: Sequence[Agent], algorithm: Algorithm, where: str) -> None:
    """Raise UserError unless the agents could be this algorithm's; nothing has been built from them before this."""
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
        counts = *agent.state.acting.values(), *agent.state.updates.values()
        if not all(abs(count) <= MAX_COUNT for count in counts):
            raise UserError(f"{here}: its state counts beyond {MAX_COUNT:g}")
        if fault := not_finite(agent):
            raise UserError(f"{here}: {fault}")
