"""The settings of the actor-critics: A2C, PPO, and those that learn from actor processes (A3C, IMPALA, APPO).

Axes: P agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from evorl.config.fields import (
    AlgorithmSettings,
    Fraction,
    HyperparameterRange,
    Initialisation,
    Positive,
    Rate,
    Size,
    Weight,
)

LOG_SCALES = (-5.0, 2.0)
"""Bounds of a squashed Gaussian's log-scale, and of the initial one of both Gaussians. The authors' code uses a lower
bound of -20, where the density loses all precision."""


def minibatches_of(steps: int, batch_size: ArrayLike, sequences: int) -> NDArray[np.int64]:
    """Number of minibatches [P] of `batch_size` [P] steps that a rollout of `steps` steps is split into.

    The count is rounded and lies between 1 and `sequences`.
    """
    return np.clip(np.round(steps / np.asarray(batch_size)), 1, sequences).astype(np.int64)


class A2CSettings(AlgorithmSettings):
    name: str = "a2c"
    rollout_steps: Size = 16
    """Steps of each environment in a rollout, on each rank; see `split_batches`."""
    sequence_length: Size = 16
    """Steps of backpropagation through time in a recurrent agent; without recurrence it has no effect."""
    learning_rate: Rate = 7e-4
    """The learning rate of Adam."""
    annealing: bool = False
    """Anneal the learning rate linearly to 0 over `training.max_steps` steps of the agent and its ancestors."""
    gamma: Fraction = 0.99
    """The discount of a step."""
    gae_lambda: Fraction = 1.0
    """The decay of generalised advantage estimates (arXiv 1506.02438); with 1 they are returns minus values."""
    entropy_coefficient: Weight = 0.01
    """The weight of the policy's entropy in the loss."""
    value_coefficient: Weight = 0.5
    """The weight of the value's error in the loss."""
    max_grad_norm: Positive | None = 0.5
    adam_epsilon: Rate = 1e-5
    normalize_advantage: bool = False
    """Shift and scale each agent's advantages to mean 0 and variance 1 in every batch."""
    distribution: Literal["gaussian", "squashed"] = "gaussian"
    """The policy for a `Box`: `gaussian` has a learned, state-independent scale, and actions are clipped to the bounds;
    `squashed` is a tanh-squashed Gaussian with a state-dependent scale, as in SAC."""
    initial_log_std: Annotated[float, Field(ge=LOG_SCALES[0], le=LOG_SCALES[1])] = 0.0
    """The initial log standard deviation of actions in a `Box`, whose bounds count as -1 and 1 (with `squashed`, of
    actions before the tanh)."""
    critic: Literal["separate", "shared"] = "separate"
    """`separate` gives the value its own hidden layers; image encoders are always shared."""
    normalize_rewards: bool = False
    """Divide rewards by the standard deviation of their running discounted sum, and clip them to ±10."""

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
    def frozen_on_resume(self) -> tuple[str, ...]:
        return ("training.max_steps",) if self.annealing else ()


class PPOSettings(A2CSettings):
    name: str = "ppo"
    rollout_steps: Size = 256
    learning_rate: Rate = 3e-4
    gae_lambda: Fraction = 0.95
    normalize_advantage: bool = True
    epochs: Size = 10
    """Passes over each rollout."""
    batch_size: Size = 64
    """Steps in a minibatch of an agent, on each rank; see `split_batches`."""
    clip: Positive = 0.2
    """The distance from 1 at which the ratio of new to old probability is clipped."""

    def effective_value(self, name: str, value: float, num_envs: int, *, recurrent: bool) -> float:
        """An agent's hyperparameter as training uses it: `batch_size` is the actual size of minibatches."""
        if name != "batch_size" or value <= 0:
            return super().effective_value(name, value, num_envs, recurrent=recurrent)
        rollout = self.rollout_steps * num_envs
        sequences = rollout // (self.sequence_length if recurrent else 1)
        return round(rollout / int(minibatches_of(rollout, value, sequences)))

    hyperparameters: ClassVar[tuple[str, ...]] = (*A2CSettings.hyperparameters, "epochs", "batch_size", "clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=3e-3),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
        "batch_size": HyperparameterRange(min=32, max=256),
        "clip": HyperparameterRange(min=0.1, max=0.4),
    }


class AsynchronousSettings(A2CSettings):
    """The settings of actor-critics that learn from actor processes."""

    rollout_steps: Size = 32
    """Steps of each environment that an actor takes with one set of parameters and sends together."""
    rollouts: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rollouts in a batch, on each rank, from any of its actors."""
    sequence_length: Literal[None] = None  # type: ignore[assignment]
    """Gradients of recurrent agents flow through whole rollouts, so there is nothing to set here."""
    normalize_rewards: Literal[False] = False
    split_batches: Literal[False] = False

    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=1e-4, max=1e-2),
        "entropy_coefficient": HyperparameterRange(min=1e-3, max=3e-2),
    }
    actor_messages: ClassVar[str | None] = "rollouts"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps


class A3CDataParallelSettings(AsynchronousSettings):
    name: str = "a3c_data_parallel"
    rollout_steps: Size = 4
    rollouts: Annotated[int, Field(ge=1, le=4096)] = 4
    entropy_scales: Annotated[tuple[Weight, ...], Field(min_length=1, max_length=4096)] = (1.0,)
    """Actor i multiplies each agent's entropy coefficient by entry i; after the last entry it starts again. i counts
    all actors of an agent, on every rank that holds it."""


class A3CSettings(A3CDataParallelSettings):
    name: str = "a3c"
    rollout_steps: Size = 20
    rollouts: Annotated[int, Field(ge=1, le=4096)] = 1
    """Gradients that are averaged for an update, on each rank; with 1 each is applied as it arrives."""
    grad_sync_steps: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rollouts whose gradients an actor averages before it sends them."""

    actor_messages: ClassVar[str | None] = "gradients"

    @property
    def sent_steps(self) -> int:
        return self.rollout_steps * self.grad_sync_steps


class A3CSharedSettings(A3CSettings):
    name: str = "a3c_shared"
    rollouts: Literal[1] = 1

    actor_messages: ClassVar[str | None] = "updates"


class IMPALASettings(AsynchronousSettings):
    name: str = "impala"
    learning_rate: Rate = 1e-3


class APPOSettings(IMPALASettings):
    name: str = "appo"
    passes: Annotated[int, Field(ge=1, le=1024)] = 2
    """Epochs over each batch, of `minibatches` updates each."""
    minibatches: Size = 1
    """Shuffled parts of a batch in each pass, of one update each; recurrent agents shuffle whole rollouts."""
    target_period: Size = 2
    """The number of batches between copies of the online network to the target network."""
    clip: Positive = 0.2
    """The distance from 1 at which the ratio of the new probability to that of the target network is clipped."""

    hyperparameters: ClassVar[tuple[str, ...]] = (*IMPALASettings.hyperparameters, "target_period", "clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        **IMPALASettings.ranges,
        "clip": HyperparameterRange(min=0.1, max=0.4),
    }
