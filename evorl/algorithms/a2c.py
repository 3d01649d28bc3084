"""Synchronous advantage actor-critic, A2C (arXiv 1602.01783, with workers in step), and what its relatives share.

Axes: P agents, E environments, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from evorl.config import Config
from evorl.distributed import Placement
from evorl.distributions import DISTRIBUTIONS, Likelihood
from evorl.losses import policy_gradient, squared_error
from evorl.networks import NETWORKS, Network, first_architecture
from evorl.networks.stacked import Stack
from evorl.replay import Pace
from evorl.replay.minibatches import check_rollout
from evorl.replay.rollout import RolloutExperience, RolloutSettings
from evorl.settings import AlgorithmSettings, Fraction, HyperparameterRange, Initialisation, Positive, Size, Weight
from evorl.spaces import Interface
from evorl.timing import Stopwatch
from evorl.types import Architecture, Batch, Decision, Head, Loss, Observation, Recall, Tensors, UserError, seen_in


class A2CSettings(AlgorithmSettings):
    name: Literal["a2c"] = "a2c"
    rollout_steps: Size = 16
    """Steps of each environment that an update learns from, on each rank; see `split_batches`."""
    sequence_length: Size = 16
    """Steps through which a recurrent agent's gradient flows; without a memory it does not matter."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 7e-4
    annealing: bool = False
    """Let the learning rate fall linearly to 0 at `training.max_steps`."""
    gamma: Fraction = 0.99
    gae_lambda: Fraction = 1.0
    entropy_coefficient: Weight = 0.01
    value_coefficient: Weight = 0.5
    max_grad_norm: Positive | None = 0.5
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-5
    normalize_advantage: bool = False
    """Shift and scale each agent's advantages to mean 0 and variance 1 in every batch."""
    critic: Literal["separate", "shared"] = "separate"
    """Whether the value has hidden layers of its own. Encoders of images are always shared."""
    normalize_observations: bool = False
    """Shift and scale vectors by each agent's running mean and variance."""
    normalize_rewards: bool = False
    """Divide rewards by the standard deviation of their running discounted sum, and cut them at 10."""

    initialisation: ClassVar[Initialisation] = "orthogonal"
    hyperparameters: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "gamma",
        "gae_lambda",
        "entropy_coefficient",
        "value_coefficient",
        "max_grad_norm",
    )
    near_one: ClassVar[tuple[str, ...]] = ("gamma", "gae_lambda")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=1e-2),
        "gae_lambda": HyperparameterRange(min=0.8, max=0.999),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
    }

    @property
    def rests_on(self) -> tuple[str, ...]:
        return ("training.max_steps",) if self.annealing else ()


class A2C:
    """How a stack of actor-critic agents acts and what it minimises: one update with each fresh rollout."""

    statistics: tuple[str, ...] = ("loss", "policy_loss", "value_loss", "entropy")

    def __init__(self, config: Config[Any], interface: Interface) -> None:
        self.config = config
        self.settings = config.algorithm
        self.interface = interface
        kind = type(interface.action)
        if kind not in DISTRIBUTIONS:
            known = ", ".join(sorted(space.__name__ for space in DISTRIBUTIONS))
            raise UserError(
                f"algorithm.name: {self.settings.name} cannot act in {interface.action} of {interface.environment}; "
                f"it takes {known}"
            )
        self.distribution = DISTRIBUTIONS[kind](interface.action)
        heads = (*self.distribution.heads, Head("value", 1))
        make = NETWORKS[config.network.name]
        network = make(config.network, interface.parts, heads, self.settings.normalize_observations)
        self.networks: Mapping[str, Network] = {"policy": network}
        self.losses: Mapping[str, Callable[[Stack, Batch], Loss]] = {"policy": self.loss}
        architecture = self.first_architecture()
        network.cost(architecture)
        self._sequence = self.settings.sequence_length if architecture.recurrent else 1
        self.pace(copies=1)

    def first_architecture(self) -> Architecture:
        """The architecture that the configuration asks for."""
        streams: Literal["all", "shared"] = "all" if self.settings.critic == "separate" else "shared"
        return first_architecture(self.config.network, self.interface.parts, streams)

    def first_state(self) -> dict[str, float]:
        """What acting moves: the steps made, by which the learning rate may fall."""
        return {"steps": 0.0}

    def pace(self, copies: int) -> Pace:
        """How much and how often a new agent learns. Raises UserError where so many ranks cannot share its rollouts."""
        settings, envs = self.settings, self.config.environment.num_envs
        numbers = settings.first_hyperparameters()
        shared = copies if settings.split_batches else 1
        if wrong := check_rollout(settings.rollout_steps, envs, self._sequence, numbers.get("batch_size"), shared):
            raise UserError(wrong)
        rollout = settings.rollout_steps * envs
        batch = int(numbers.get("batch_size", rollout))
        ranks = copies // shared
        return Pace(batch * ranks, updates=numbers.get("epochs", 1.0) * rollout / batch, steps=float(rollout * ranks))

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> RolloutExperience:
        """This rank's rollouts."""
        settings, ranks = self.settings, placement.ranks
        shared = placement.copies if settings.split_batches else 1
        vectors = [name for name, part in self.interface.parts.items() if part.kind == "vector"]
        return RolloutExperience(
            RolloutSettings(
                steps=settings.rollout_steps // shared,
                num_envs=self.config.environment.num_envs,
                sequence=self._sequence,
                reward_clip=settings.reward_clip,
                normalize_advantage=settings.normalize_advantage,
                normalize_rewards=settings.normalize_rewards,
                normalized=tuple(vectors) if settings.normalize_observations else (),
                copies=shared,
            ),
            self.interface.parts,
            gather=placement.gather_copies,
            seed=self.config.seed,
            rank=ranks.rank,
            device=ranks.device,
            stopwatch=stopwatch,
        )

    def act(
        self, stack: Stack, observation: Observation, recall: Recall | None, generator: torch.Generator
    ) -> tuple[Decision, Tensor | None]:
        """Sampled actions for observations [P, E, ...], what else to remember of them, and the memory after them."""
        outputs, memory = stack.modules["policy"].remember(observation, recall)
        mask = observation.get("action_mask")
        raw = self.distribution.sample(outputs, mask, generator)
        decision = {
            "action": self.distribution.to_environment(raw),
            "raw": raw,
            "log_prob": self.distribution.likelihood(outputs, mask, raw).log_prob,
            "value": outputs["value"].squeeze(-1),
        }
        return decision, memory

    def best(self, stack: Stack, observation: Observation, recall: Recall | None) -> tuple[Decision, Tensor | None]:
        """The most likely actions for observations [P, E, ...], and the memory after them."""
        outputs, memory = stack.modules["policy"].remember(observation, recall)
        raw = self.distribution.mode(outputs, observation.get("action_mask"))
        return {"action": self.distribution.to_environment(raw)}, memory

    def value(self, stack: Stack, observation: Observation, recall: Recall | None) -> Tensor:
        """The value [P, E] of observations [P, E, ...]."""
        return stack.modules["policy"](observation, recall)["value"].squeeze(-1)

    def after_acting(self, stack: Stack, steps: Tensor | float) -> None:
        """Count `steps` further transitions of each agent [P] or of every one, over all ranks."""
        stack.state["steps"] += steps

    def learning_rate(self, stack: Stack) -> Tensor:
        """The learning rate [P] now."""
        rate = stack.hyperparameters["learning_rate"]
        if not self.settings.annealing:
            return rate
        return rate * (1 - stack.state["steps"] / self.config.training.max_steps).clamp(min=0)

    def loss(self, stack: Stack, batch: Batch) -> Loss:
        """The policy's objective, the value's error and the entropy bonus [P] of a batch."""
        numbers, fields, weight = stack.hyperparameters, batch.fields, batch.weight
        seen = seen_in(fields, "observation.")
        outputs = stack.modules["policy"](seen, batch.recall)
        likelihood = self.distribution.likelihood(outputs, seen.get("action_mask"), fields["raw"])
        policy = self.policy_loss(stack, batch, likelihood)
        value = self.value_loss(stack, batch, outputs["value"].squeeze(-1))
        objective = torch.addcmul(policy, numbers["value_coefficient"].unsqueeze(-1), value)
        objective = objective.addcmul(numbers["entropy_coefficient"].unsqueeze(-1), likelihood.entropy, value=-1)
        said = {"policy_loss": policy, "value_loss": value, "entropy": likelihood.entropy}
        said |= self.remarks(batch, likelihood)
        # One product and one sum for all of them: calls are what small networks spend their time on.
        means = (torch.stack([values.detach() for values in said.values()]) * weight).sum(-1)
        return Loss((objective * weight).sum(-1), dict(zip(said, means, strict=True)))

    def policy_loss(self, stack: Stack, batch: Batch, likelihood: Likelihood) -> Tensor:
        """What improves the policy [P, B]."""
        return policy_gradient(likelihood.log_prob, batch.fields["advantage"])

    def remarks(self, batch: Batch, likelihood: Likelihood) -> Tensors:
        """What else there is to say about each element [P, B]."""
        return {}

    def value_loss(self, stack: Stack, batch: Batch, value: Tensor) -> Tensor:
        """Half the squared error of each value [P, B]."""
        return 0.5 * squared_error(value, batch.fields["return"])

    def after_update(self, stack: Stack, due: Tensor) -> None:
        """Nothing follows an update."""
