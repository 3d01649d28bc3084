"""Acting side of a population: stacked agents. Axes: P agents, E environments, K numbers for each of N units.

A policy holds parameters and observation statistics. A learner adds target networks, optimisers and losses. Agents keep
their order however they are grouped into stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.algorithms import Algorithm
from evorl.algorithms.base import ActInput
from evorl.networks.stack import Architectures, Layout, Shapes, Stack, StackedNetwork, plan_stacks
from evorl.replay.statistics import Moments
from evorl.system.formats import load_like, part_of, with_prefix
from evorl.types.agents import Agent
from evorl.types.batches import Batch, PolicyOutput, RecurrentInput
from evorl.types.tensors import Observation, Tensors

WHERE = "the policy"
ACTING, RECURRENT, GENERATOR = "acting.", "recurrent", "generator"
"""Tensor names, or prefixes of names, in a state."""


class Policy:
    """The agents of this rank in one generation, for acting.

    `flat` holds all parameters and observation statistics in one buffer that can be sent as is; `version` counts the
    updates applied to it.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        algorithm: Algorithm,
        generator: torch.Generator,
        flat: Callable[[int], Tensor] | None = None,
        planned_for: torch.device | None = None,
    ) -> None:
        """Load the agents' parameters; if `flat` is given, use the values in the memory that it returns instead.

        Stacks are planned for the generator's device, or for `planned_for` where `flat` has the layout of a policy on
        another device.
        """
        self.algorithm = algorithm
        self.agents = list(agents)
        self.generator = generator
        self.version = 0
        self._recurrent: Tensor | None = None
        networks = {name: spec.network for name, spec in algorithm.networks.items()}
        architectures = [{name: agent.architectures[name] for name in networks} for agent in agents]
        plan = plan_stacks(architectures, self._cost, planned_for or generator.device)
        shapes = [{name: Shapes.of(networks[name], layout) for name, layout in layouts.items()} for _, layouts in plan]
        sizes = [
            [network.numel(len(members)) for network in stack.values()]
            for (members, _), stack in zip(plan, shapes, strict=True)
        ]
        size = sum(map(sum, sizes))
        self.flat = torch.zeros(size, device=generator.device) if flat is None else flat(size)
        self._is_loaded = flat is not None
        self.stacks: list[Stack] = []
        offset = 0
        for (members, layouts), stack_shapes, lengths in zip(plan, shapes, sizes, strict=True):
            memory = dict(zip(stack_shapes, self.flat[offset : offset + sum(lengths)].split(lengths), strict=True))
            offset += sum(lengths)
            self.stacks.append(self._stack(members, layouts, stack_shapes, memory))
        self._is_recurrent = any(
            network.recurrent_shape[0] for stack in self.stacks for network in stack.networks.values()
        )

    def initial_state(self, num_envs: int) -> Tensor:
        """The recurrent state [P, E, K, N] at the start of an episode, all zero.

        It has no elements unless there are recurrent networks or exploration noise that persists across steps.
        """
        shapes = [network.recurrent_shape for stack in self.stacks for network in stack.networks.values()]
        shapes += [stack.noise_shape for stack in self.stacks]
        slots, units = (max(sizes) for sizes in zip(*shapes, strict=True))
        return torch.zeros(len(self.agents), num_envs, slots, units, device=self.generator.device)

    @torch.no_grad()
    def act(
        self, observation: Observation, started: Tensor, state: Tensor, deterministic: bool = False
    ) -> tuple[PolicyOutput, Tensor]:
        """Choose actions for observations [P, E, ...]; also returns the next recurrent state.

        `started` [P, E] marks the first observation of an episode; `state` [P, E, K, N] comes from `initial_state` or
        the previous call. With `deterministic`, actions are greedy, without exploration.
        """
        after = torch.zeros_like(state) if state.numel() else state
        actions, extras = [], []
        for stack in self.stacks:
            recurrent = _recurrent(stack, state, started)
            seen = observation if self._is_one_stack else _part(observation, stack)
            output = self.algorithm.act(stack, ActInput(seen, recurrent, self.generator, deterministic))
            actions.append(output.action)
            extras.append(output.extras)
            if (next_state := output.recurrent_state) is not None:
                after[stack.members, :, :, : next_state.shape[-1]] = next_state
        joined = {name: self.joined([each[name] for each in extras]) for name in extras[0]}
        # No loss depends on exploration noise, so nobody needs to store it with a step.
        states = (state, after) if self._is_recurrent else (state[:0], after[:0])
        return PolicyOutput(self.joined(actions), joined, *states), after

    def explore(self, observation: Observation, started: Tensor) -> PolicyOutput:
        """Choose exploring actions for observations [P, E, ...], always of the same environments.

        The policy carries their recurrent state from call to call; it begins with the initial one.
        """
        if self._recurrent is None:
            self._recurrent = self.initial_state(started.shape[1])
        output, self._recurrent = self.act(observation, started, self._recurrent)
        return output

    def state_dict(self) -> Tensors:
        """Parameters, acting states, recurrent state and generator."""
        recurrent = torch.zeros(0) if self._recurrent is None else self._recurrent
        tensors = {"flat": self.flat, RECURRENT: recurrent, GENERATOR: self.generator.get_state()}
        return tensors | with_prefix(ACTING, self.acting_states()) | {"version": torch.tensor(self.version)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict` of a policy of the same agents. Raises UserError for another one."""
        recurrent = state.get(RECURRENT, torch.zeros(0))
        if recurrent.dim() > 1:
            self._recurrent = self.initial_state(recurrent.shape[1])
        tensors = self.state_dict()
        load_like(state, tensors, WHERE)
        self.set_acting_states(part_of(ACTING, tensors))
        self.generator.set_state(tensors[GENERATOR])
        self.version = int(tensors["version"])

    @torch.no_grad()
    def value(self, observation: Observation, state: Tensor | None) -> Tensor:
        """State values V(s) [P, E] for observations [P, E, ...] and recurrent state [P, E, K, N]."""
        shape = next(iter(observation.values())).shape[:2]
        started = torch.zeros(shape, dtype=torch.bool, device=self.generator.device)
        return self.joined(
            [
                self.algorithm.value(stack, _part(observation, stack), _recurrent(stack, state, started))
                for stack in self.stacks
            ]
        )

    @torch.no_grad()
    def batch_targets(self, batch: Batch) -> Tensors:
        """The targets [P, B] of a batch that stay fixed during its updates, by name; many algorithms have none.

        Where they depend on target networks, a learner must have been made on this policy.
        """
        parts = [
            self.algorithm.batch_targets(stack, part)
            for stack, part in zip(self.stacks, self.parts(batch), strict=True)
        ]
        return {name: self.joined([each[name] for each in parts]) for name in parts[0]}

    def acted(self, steps: NDArray[np.float64]) -> None:
        """Record `steps` [P] new transitions of each agent, summed over all ranks that hold it."""
        # If all agents made the same number of steps, a Python float avoids a copy to the device.
        same, device = bool((steps == steps[0]).all()), self.generator.device
        for stack in self.stacks:
            taken = float(steps[0]) if same else torch.from_numpy(steps).to(device)[stack.members]
            before = dict(stack.state)
            self.algorithm.after_acting(stack, taken)
            for name, values in before.items():
                if stack.state[name] is not values:  # Captured updates read this tensor.
                    stack.state[name] = values.copy_(stack.state[name])

    def acting_states(self) -> Tensors:
        """The acting states [P] of all agents by name, in the algorithm's order."""
        names = self.algorithm.initial_state()
        return {name: self.joined([stack.state[name] for stack in self.stacks]) for name in names}

    def set_acting_states(self, states: Mapping[str, Tensor]) -> None:
        """Load the output of `acting_states`."""
        for name, values in states.items():
            for stack in self.stacks:
                stack.state[name] = values[stack.members].clone()

    @torch.no_grad()
    def update_observation_stats(self, part: str, moments: Moments) -> None:
        """Update the running statistics with which each agent's networks normalise an observation part, if they do."""
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
        """The population indices of a stack's agents."""
        places: list[int] = torch.arange(len(self.agents), device=self.generator.device)[stack.members].tolist()
        return places

    def parts(self, batch: Batch) -> list[Batch]:
        """Split a batch by stack."""
        # Slicing costs 12 us, 1 % of an update of small networks; a single stack needs none.
        if self._is_one_stack:
            return [batch]
        return [batch.part(stack.members, stack.recurrent_units) for stack in self.stacks]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join per-stack values into values [P, ...] in population order."""
        if self._is_one_stack:
            return parts[0]
        joined = parts[0].new_empty(len(self.agents), *parts[0].shape[1:])
        for stack, part in zip(self.stacks, parts, strict=True):
            joined[stack.members] = part
        return joined

    @property
    def _is_one_stack(self) -> bool:
        """True if a single stack holds all agents in population order, so no joining is needed."""
        return len(self.stacks) == 1 and isinstance(self.stacks[0].members, slice)

    def _cost(self, architectures: Architectures) -> float:
        return sum(spec.network.cost(architectures[name]) for name, spec in self.algorithm.networks.items())

    def _stack(
        self, members: list[int], layouts: dict[str, Layout], shapes: dict[str, Shapes], memory: dict[str, Tensor]
    ) -> Stack:
        agents, device = [self.agents[member] for member in members], self.generator.device
        networks = {
            name: StackedNetwork.allocate(spec.network, layouts[name], shapes[name], memory[name])
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
            noise_shape=self.algorithm.noise_shape({name: each.architecture for name, each in layouts.items()}),
        )


def _index(members: list[int], device: torch.device) -> slice | Tensor:
    """Indices as a slice if they are consecutive, which avoids copies, else as a tensor."""
    first = members[0]
    if members == list(range(first, first + len(members))):
        return slice(first, first + len(members))
    return torch.tensor(members, device=device)


def _part(observation: Observation, stack: Stack) -> Observation:
    members = stack.members
    return {name: value[members] for name, value in observation.items()}


def _recurrent(stack: Stack, state: Tensor | None, started: Tensor) -> RecurrentInput | None:
    """A stack's recurrent input, from the states [P, E, K, N] and the episode starts [P, E] of all agents."""
    if state is None or stack.recurrent_units == 0:
        return None
    return RecurrentInput(state, started.unsqueeze(1)).part(stack.members, stack.recurrent_units)
