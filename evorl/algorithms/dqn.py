"""Deep Q-learning, DQN (Mnih et al. 2015), and the parts of Rainbow (arXiv 1710.02298), each with its own setting.

The parts are double Q-learning (arXiv 1509.06461), dueling networks (1511.06581), distributional values (`values.py`),
noisy layers (1706.10295) and soft target updates (1509.02971). N-step returns and prioritised replay are settings of
the replay buffer. With a recurrent network agents learn from sequences, as in R2D2 (Kapturowski et al. 2019) but
without stored states.

Axes: P agents, E environments, B batch, S sequences, T steps of a sequence, A actions, N atoms of an action's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from evorl.algorithms.base import ActInput, ActOutput, hyperparameter
from evorl.algorithms.exploration import decayed, random_choices
from evorl.algorithms.functional import dueling, of_action
from evorl.algorithms.off_policy import OffPolicy
from evorl.algorithms.values import VALUES
from evorl.config import Config
from evorl.config.off_policy import DQNSettings
from evorl.envs.spaces import EnvSpec, wrong_actions
from evorl.networks.distributions import allowed
from evorl.networks.stack import Periodic, Polyak, Stack, StackedNetwork, TargetRule
from evorl.types.agents import Agent, Branches, Head
from evorl.types.batches import Batch, Loss, RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Observation, Tensors

TARGETS: Mapping[str, TargetRule] = {"polyak": Polyak("tau"), "periodic": Periodic("target_period")}


class DQN(OffPolicy):
    """Deep Q-learning for a stack of agents."""

    explores_by_noise = True
    stored_action = (), torch.int64

    def __init__(self, config: Config[DQNSettings], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        if not isinstance(interface.action, gym.spaces.Discrete):
            raise wrong_actions(self.settings.name, interface, "Discrete")
        if config.network.recurrent and config.replay.n_step > 1:
            raise UserError(
                f"replay.n_step: recurrent agents learn from returns of one step; use replay.n_step=1, not "
                f"{config.replay.n_step}"
            )
        self.actions = int(interface.action.n)
        self.values = VALUES[self.settings.distribution](self.settings)
        self.metrics = self.values.metrics
        outputs = self.actions * self.values.atoms
        heads = [Head("q_values", outputs)]
        if self.settings.dueling:
            heads = [Head("advantage", outputs), Head("value", self.values.atoms)]
        # The branches of a dueling network split before the last hidden layer.
        branches: Branches = "last" if self.settings.dueling else "shared"
        target, noisy = TARGETS[self.settings.target], self.settings.noisy
        spec = self.network(interface.parts, heads, branches, target, None if noisy is None else noisy.sigma)
        self.networks = {"q": spec}
        self.objectives = [self.objective("q", self.loss, hyperparameter("learning_rate"))]

    @property
    def sequences(self) -> tuple[int, int] | None:
        recurrent = self.config.network.recurrent is not None and self.settings.actor_messages is None
        return (self.settings.sequence_length, self.settings.burn_in) if recurrent else None

    def adopt(self, agent: Agent, origin: Any) -> Agent:
        """Return the agent if its network's outputs mean the same here. Raises UserError otherwise."""
        if origin.representation != self.settings.representation:
            theirs, ours = (", ".join(map(str, each.representation)) for each in (origin, self.settings))
            raise UserError(f"its agents represent values as {theirs}, and here as {ours} (algorithm.distribution)")
        return super().adopt(agent, origin)

    def initial_state(self) -> dict[str, float]:
        return {"epsilon": self.settings.exploration.start}

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Choose epsilon-greedy actions, or greedy ones if `deterministic`.

        Noisy layers draw new noise in each step, shared by all of an agent's environments. With `deterministic`, the
        mean weights are used.
        """
        mask, generator = inputs.action_mask, inputs.generator
        network = stack.networks["q"] if inputs.deterministic else stack.networks["q"].with_noise(generator)
        outputs, state = network.forward_recurrent(inputs.observation, inputs.recurrent)
        greedy = allowed(self.q_values(outputs), mask).argmax(-1)
        if inputs.deterministic:
            return ActOutput(greedy, recurrent_state=state)
        explores = torch.rand(greedy.shape, generator=generator, device=greedy.device)
        random = random_choices(self.actions, greedy.shape, mask, generator)
        # [P, 1], or [P, E] in actors whose environments differ.
        epsilon = stack.state["epsilon"].view(len(explores), -1)
        return ActOutput(torch.where(explores < epsilon, random, greedy), recurrent_state=state)

    def value(self, stack: Stack, observation: Observation, recurrent: RecurrentInput | None) -> Tensor:
        """The largest Q(s, a) [P, E] over allowed actions."""
        q_values = self.q_values(stack.networks["q"](observation, recurrent))
        return allowed(q_values, observation.get("action_mask")).amax(-1)

    def q_values(self, outputs: Tensors) -> Tensor:
        """Q(s, a) of all actions [P, B, A] from the heads' outputs."""
        return self.values.mean(self.atoms(outputs))

    def atoms(self, outputs: Tensors) -> Tensor:
        """The value atoms (scalar, logits or quantiles) of all actions [P, B, A, N] from the heads' outputs."""
        head = "advantage" if self.settings.dueling else "q_values"
        atoms = outputs[head].unflatten(-1, (self.actions, self.values.atoms))
        return dueling(outputs["value"], atoms) if self.settings.dueling else atoms

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        stack.state["epsilon"] = decayed(stack.state["epsilon"], self.settings.exploration, steps)

    def loss(self, stack: Stack, batch: Batch, generator: torch.Generator) -> Loss:
        """Temporal-difference loss of a batch; the online and target networks each draw new noise."""
        discount = self.discount(stack.hyperparameters["gamma"])
        network, target = (networks["q"].with_noise(generator) for networks in (stack.networks, stack.target_networks))
        values_of = self._single if batch.recurrent is None else self._sequences
        atoms, target_atoms, choosing_atoms = values_of(network, target, batch)
        with torch.no_grad():
            next_mask = batch.next_observation.get("action_mask")
            next_action = allowed(self.values.mean(choosing_atoms), next_mask).argmax(-1)
            next_atoms = of_action(target_atoms, next_action)
        return self.values.loss(of_action(atoms, batch.columns["action"]), next_atoms, batch.columns, discount)

    def _single(self, network: StackedNetwork, target: StackedNetwork, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The value atoms [P, B, A, N] of an observation, those of the next one by the target network, and those that
        choose the next action: in double Q-learning the online network's."""
        with torch.no_grad():
            target_atoms = self.atoms(target(batch.next_observation))
            # An actor of Ape-X has one network for both.
            chooses = self.settings.double and network is not target
            choosing = self.atoms(network(batch.next_observation)) if chooses else target_atoms
        # Last, so that what the backward pass reads is still in the cache.
        return self.atoms(network(batch.observation)), target_atoms, choosing

    def _sequences(
        self, network: StackedNetwork, target: StackedNetwork, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `_single`, for sequences: each network is unrolled from the burn-in to the observation after the end."""
        recurrent = batch.recurrent
        assert recurrent is not None
        count, split = recurrent.started.shape[2], recurrent.started.shape[1] - self.settings.sequence_length
        before, started = recurrent.started.split((split, self.settings.sequence_length), 1)
        started = torch.cat((started, torch.zeros_like(started[:, :1])), 1)
        rows = {
            name: torch.cat((seen, batch.next_observation[name][:, -count:]), 1)
            for name, seen in batch.observation.items()
        }

        def unrolled(network: StackedNetwork) -> Tensor:
            """Atoms [P, (T + 1) * S, A, N]."""
            state = network.state_after(recurrent.burn_in, before)
            return self.atoms(network(rows, RecurrentInput(state, started)))

        atoms = unrolled(network)
        with torch.no_grad():
            target_atoms = unrolled(target)[:, count:]
        choosing = atoms[:, count:].detach() if self.settings.double else target_atoms
        return atoms[:, :-count], target_atoms, choosing
