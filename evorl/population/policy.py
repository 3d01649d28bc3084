"""Agents as they act: stacked, so that one product serves many. Axes: P agents, E environments, K numbers for N units.

A policy knows parameters and observation statistics and nothing of targets, optimisers or losses. Agents keep their
order whatever the packing of stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Algorithm
from evorl.networks.layout import Architectures, Layout, plan_stacks
from evorl.networks.stacked import Shapes, Stack, StackedNetwork
from evorl.replay.moments import Moments
from evorl.types import Agent, Observation, PolicyOutput, RecurrentInput, Tensors


class Policy:
    """The agents of this rank for one generation, as far as they act.

    `flat` holds all parameters and observation statistics, in one buffer that can be sent as it is; `version` counts
    the updates that it has seen.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        algorithm: Algorithm,
        generator: torch.Generator,
        flat: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Take the agents' parameters; or where `flat` gives memory of so many values, those that are there."""
        self.algorithm = algorithm
        self.agents = list(agents)
        self.generator = generator
        self.version = 0
        networks = {name: spec.network for name, spec in algorithm.networks.items()}
        plan = plan_stacks([{name: agent.architectures[name] for name in networks} for agent in agents], self._cost)
        shapes = [{name: Shapes.of(networks[name], layout) for name, layout in own.items()} for _, own in plan]
        sizes = [
            [each.numel(len(members)) for each in own.values()] for (members, _), own in zip(plan, shapes, strict=True)
        ]
        size = sum(map(sum, sizes))
        self.flat = torch.zeros(size, device=generator.device) if flat is None else flat(size)
        self._is_loaded = flat is not None
        self.stacks: list[Stack] = []
        offset = 0
        for (members, layouts), own, lengths in zip(plan, shapes, sizes, strict=True):
            memory = dict(zip(own, self.flat[offset : offset + sum(lengths)].split(lengths), strict=True))
            offset += sum(lengths)
            self.stacks.append(self._stack(members, layouts, own, memory))

    def initial_state(self, num_envs: int) -> Tensor:
        """Return the recurrent state [P, E, K, N] of episodes that begin.

        It has no elements without recurrent networks, or noise that goes on from step to step.
        """
        shapes = [network.recurrent_shape for stack in self.stacks for network in stack.networks.values()]
        shapes.append(self.algorithm.noise_shape)
        slots, units = (max(sizes) for sizes in zip(*shapes, strict=True))
        return torch.zeros(len(self.agents), num_envs, slots, units, device=self.generator.device)

    @torch.no_grad()
    def act(
        self, observation: Observation, started: Tensor, state: Tensor, deterministic: bool = False
    ) -> tuple[PolicyOutput, Tensor]:
        """Return actions for observations [P, E, ...] and the recurrent state after them.

        `started` [P, E] says where an episode begins, `state` [P, E, K, N] is what `initial_state` or the last call
        gave. `deterministic` actions are the best known, without exploration.
        """
        after = torch.zeros_like(state) if state.numel() else state
        actions, extras = [], []
        for stack in self.stacks:
            recurrent = _recurrent(stack, state, started)
            seen = observation if self._is_one_stack else _part(observation, stack)
            action, more, next_state = self.algorithm.act(stack, seen, recurrent, self.generator, deterministic)
            actions.append(action)
            extras.append(more)
            if next_state is not None:
                after[stack.members, :, :, : next_state.shape[-1]] = next_state
        joined = {name: self.joined([each[name] for each in extras]) for name in extras[0]}
        return PolicyOutput(self.joined(actions), joined, state, after), after

    @torch.no_grad()
    def value(self, observation: Observation, state: Tensor | None) -> Tensor:
        """Return what the agents expect [P, E] from observations [P, E, ...], in recurrent state [P, E, K, N]."""
        shape = next(iter(observation.values())).shape[:2]
        started = torch.zeros(shape, dtype=torch.bool, device=self.generator.device)
        return self.joined(
            [
                self.algorithm.value(stack, _part(observation, stack), _recurrent(stack, state, started))
                for stack in self.stacks
            ]
        )

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Note `steps` [P] further transitions of each agent, over all ranks that hold it; all of them say the same."""
        # Where all agents made equally many, a plain number spares a copy to the device.
        same, device = bool((steps == steps[0]).all()), self.generator.device
        for stack in self.stacks:
            own = float(steps[0]) if same else torch.from_numpy(steps).to(device)[stack.members]
            self.algorithm.after_acting(stack, own)

    def acting_states(self) -> Tensors:
        """Return the acting states [P] of all agents by name, in the order in which the algorithm names them."""
        names = self.algorithm.initial_state()
        return {name: self.joined([stack.state[name] for stack in self.stacks]) for name in names}

    def set_acting_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over what `acting_states` gave."""
        for name, values in states.items():
            for stack in self.stacks:
                stack.state[name] = values[stack.members].clone()

    @torch.no_grad()
    def update_observation_stats(self, part: str, moments: Moments) -> None:
        """Add to the statistics by which each agent's networks, those that do, normalise a part of what they read."""
        names = [f"normal.{part}.{name}" for name in Moments._fields]
        for stack in self.stacks:
            members = stack.members if isinstance(stack.members, slice) else stack.members.numpy(force=True)
            for network in stack.networks.values():
                room = [network.buffers.views[name] for name in names if name in network.buffers.views]
                if not room:
                    continue
                count, mean, variance = (view.flatten(1).double().cpu().numpy() for view in room)
                merged = Moments(count[:, 0], mean, variance).merged(moments.part(members))
                for view, values in zip(room, merged, strict=True):
                    view.copy_(torch.from_numpy(values).reshape(view.shape))

    def places(self, stack: Stack) -> list[int]:
        """Return the places in the population of a stack's agents."""
        places: list[int] = torch.arange(len(self.agents))[stack.members].tolist()
        return places

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return values [P, ...] in the population's order from those of each stack."""
        if self._is_one_stack:
            return parts[0]
        joined = parts[0].new_empty(len(self.agents), *parts[0].shape[1:])
        for stack, part in zip(self.stacks, parts, strict=True):
            joined[stack.members] = part
        return joined

    @property
    def _is_one_stack(self) -> bool:
        """Tell whether one stack holds all agents in the population's order, so that nothing is to be put together."""
        return len(self.stacks) == 1 and isinstance(self.stacks[0].members, slice)

    def _cost(self, architectures: Architectures) -> float:
        return sum(spec.network.cost(architectures[name]) for name, spec in self.algorithm.networks.items())

    def _stack(
        self, members: list[int], layouts: dict[str, Layout], shapes: dict[str, Shapes], memory: dict[str, Tensor]
    ) -> Stack:
        agents, device = [self.agents[member] for member in members], self.generator.device
        networks = {
            name: StackedNetwork.allocate(spec.network, layouts[name], shapes[name], len(agents), memory[name])
            for name, spec in self.algorithm.networks.items()
        }
        for name, network in networks.items():
            if self._is_loaded:
                network.use_masks()
            else:
                network.load([agent.tensors[name] for agent in agents])

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Stack(
            members=_index(members, device),
            networks=networks,
            hyperparameters={
                name: column([agent.hyperparameters[name] for agent in agents], torch.float32)
                for name in agents[0].hyperparameters
            },
            state={
                name: column([agent.state.acting[name] for agent in agents], torch.float64)
                for name in self.algorithm.initial_state()
            },
            noise_units=self.algorithm.noise_shape[1],
        )


def _index(members: list[int], device: torch.device) -> slice | Tensor:
    """Return places as a slice where they stand side by side, which spares copies, else as a tensor."""
    first = members[0]
    if members == list(range(first, first + len(members))):
        return slice(first, first + len(members))
    return torch.tensor(members, device=device)


def _part(observation: Observation, stack: Stack) -> Observation:
    """Return what the agents of one stack see."""
    members = stack.members
    return {name: value[members] for name, value in observation.items()}


def _recurrent(stack: Stack, state: Tensor | None, started: Tensor) -> RecurrentInput | None:
    """Return the recurrent input of a stack, from the state [P, E, K, N] and the starts [P, E] of all agents."""
    if state is None or stack.recurrent_units == 0:
        return None
    return RecurrentInput(state, started.unsqueeze(1)).part(stack.members, stack.recurrent_units)
