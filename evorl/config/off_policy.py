"""The settings of the algorithms with a replay buffer: DQN and the parts of Rainbow, DDPG, TD3, SAC and Ape-X.

Axes: P agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from evorl.config.fields import (
    AlgorithmSettings,
    Count,
    Finite,
    Fraction,
    HyperparameterRange,
    Positive,
    Rate,
    Section,
    Size,
    Weight,
)

UpdatePeriod = Annotated[float, Field(ge=1e-3, le=1e9)]
CRITIC_RANGES: Mapping[str, HyperparameterRange] = {
    "learning_rate": HyperparameterRange(min=1e-4, max=3e-3),
    "actor_learning_rate": HyperparameterRange(min=1e-5, max=3e-3),
    "tau": HyperparameterRange(min=1e-3, max=2e-2),
}
"""The ranges of algorithms with an actor and critics."""


class OffPolicySettings(AlgorithmSettings):
    """The settings of all algorithms that learn from a replay buffer."""

    batch_size: Size = 256
    """Transitions in an agent's update, on each rank; see `split_batches`."""
    learning_rate: Rate = 1e-3
    """The learning rate of Adam."""
    gamma: Fraction = 0.99
    """The discount of a step."""
    learn_step: UpdatePeriod = 1
    """Environment steps of an agent for each of its updates, on each rank; see `split_batches`."""
    tau: Rate = 5e-3
    """The Polyak coefficient of target networks: target += tau * (parameters - target) in each of their updates."""

    replayed: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "learning_rate",
        "gamma",
        "learn_step",
        "tau",
        "max_grad_norm",
    )
    near_one: ClassVar[tuple[str, ...]] = ("gamma",)


class EpsilonGreedy(Section):
    """Random actions, whose probability falls from `start` to `end`."""

    schedule: Literal["exponential", "linear"] = "exponential"
    """`exponential` multiplies it by `decay` in each step; `linear` reaches `end` after `steps` (Mnih et al. 2015)."""
    start: Fraction = 1.0
    """The initial probability."""
    end: Fraction = 0.05
    """The minimum probability, from the first counted step on, even if `start` is lower."""
    decay: Rate = 0.9995
    """The factor for each step of each of an agent's environments, over all ranks."""
    steps: Count | None = None
    """Steps of an agent, over all its environments and ranks, after which `linear` reaches `end`."""

    def ineffective(self, name: str) -> str | None:
        return "because `schedule` is linear" if name == "decay" and self.schedule == "linear" else None

    @model_validator(mode="after")
    def _has_steps_where_they_count(self) -> Self:
        if (self.schedule == "linear") != (self.steps is not None):
            raise ValueError("`schedule: linear` needs `steps`, and `exponential` does not take it")
        return self


class ActionNoise(Section):
    """Initial steps of uniformly random actions, then noise on actions, which are scaled to [-1, 1]."""

    random_steps: Annotated[int, Field(ge=0, le=10**12)] = 1_000
    """Steps in which each agent acts uniformly at random before it follows its policy, over all ranks; the steps of its
    ancestors count."""
    noise: Literal["none", "gaussian", "ornstein_uhlenbeck"] = "gaussian"
    """`gaussian` is independent in each step; `ornstein_uhlenbeck` is correlated over the steps of an episode."""
    scale: Weight = 0.1
    """The standard deviation of the noise drawn in each step; the sigma of an Ornstein-Uhlenbeck process."""
    reversion: Rate = 0.15
    """`ornstein_uhlenbeck`: the mean reversion rate theta, per step."""

    def ineffective(self, name: str) -> str | None:
        used_by = {"scale": ("gaussian", "ornstein_uhlenbeck"), "reversion": ("ornstein_uhlenbeck",)}
        return None if self.noise in used_by.get(name, (self.noise,)) else f"because `noise` is {self.noise}"

    @property
    def kept(self) -> float:
        """The share of the noise that carries over to the next step."""
        return 1 - self.reversion if self.noise == "ornstein_uhlenbeck" else 0.0


Atoms = Annotated[int, Field(ge=2, le=1024)]


class CategoricalSettings(Section):
    """The support of the distribution of returns (C51, arXiv 1707.06887), which must cover all possible returns."""

    atoms: Atoms = 51
    """The number of atoms of the support."""
    v_min: Finite = -10.0
    """The lowest atom."""
    v_max: Finite = 10.0
    """The highest atom."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min {self.v_min:g} must be below v_max {self.v_max:g}")
        return self


class QuantileSettings(Section):
    """Quantile regression (arXiv 1710.10044); its defaults are the paper's."""

    quantiles: Atoms = 200
    """The number of quantiles."""
    kappa: Weight = 1.0
    """The error up to which the loss is quadratic; with 0 it is linear everywhere."""


class NoisyLayerSettings(Section):
    """Layers whose weights have noise of a learned scale."""

    sigma: Positive = 0.5
    """The initial noise scale of a layer with n inputs is this divided by sqrt(n)."""


class DQNSettings(OffPolicySettings):
    name: str = "dqn"
    distribution: Literal["none", "categorical", "quantile"] = "none"
    """Learn the distribution of returns rather than their mean: by the sections `categorical` or `quantile`."""
    loss: Literal["mse", "huber"] = "huber"
    """The loss of the td_error, where `distribution` is `none`."""
    categorical: CategoricalSettings = CategoricalSettings()
    quantile: QuantileSettings = QuantileSettings()
    double: bool = True
    """Double Q-learning: the online network chooses the action that the target network evaluates (arXiv 1509.06461)."""
    dueling: bool = False
    """Estimate state values and action advantages in separate branches (arXiv 1511.06581)."""
    learning_rate: Rate = 2e-3
    learn_step: UpdatePeriod = 8
    target: Literal["polyak", "periodic"] = "polyak"
    """`polyak`: each update moves the target network a fraction `tau` towards the online one. `periodic`: the online
    one is copied every `target_period` updates (Mnih et al. 2015)."""
    tau: Rate = 2e-2
    target_period: Size | None = None
    """The number of updates between copies of the online network to the target network."""
    sequence_length: Size = 16
    """Steps of the sequences that a recurrent agent learns from; `batch_size` counts steps, and is rounded down to
    whole sequences, at least one. Like `burn_in`, `sequence_length` has no effect without recurrence."""
    burn_in: Annotated[int, Field(ge=0, le=1_000)] = 16
    """Steps before a sequence, within its episode, that warm up the recurrent state."""
    noisy: NoisyLayerSettings | None = None
    """Explore by noise on the weights of the last hidden layer and of the heads (arXiv 1706.10295)."""
    exploration: EpsilonGreedy = Field(
        default_factory=lambda given: EpsilonGreedy(start=0, end=0) if given.get("noisy") else EpsilonGreedy()
    )
    """With `noisy`, epsilon is 0 unless this section is set, because the weight noise already explores."""

    hyperparameters: ClassVar[tuple[str, ...]] = (*OffPolicySettings.hyperparameters, "target_period")
    layer_norm: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        "learning_rate": HyperparameterRange(min=2e-4, max=8e-3),
        "batch_size": HyperparameterRange(min=128, max=512),
        "learn_step": HyperparameterRange(min=4, max=16),
    }

    def effective_value(self, name: str, value: float, num_envs: int, *, recurrent: bool) -> float:
        """An agent's hyperparameter as training uses it: a recurrent agent's batches are whole sequences."""
        used = super().effective_value(name, value, num_envs, recurrent=recurrent)
        if name != "batch_size" or not recurrent:
            return used
        return max(1, int(used) // self.sequence_length) * self.sequence_length

    def ineffective(self, name: str) -> str | None:
        if name == "tau" and self.target == "periodic":
            return "because `target: periodic` copies the whole network"
        used_by = {"loss": "none", "categorical": "categorical", "quantile": "quantile"}
        is_used = self.distribution == used_by.get(name, self.distribution)
        return super().ineffective(name) if is_used else f"because `distribution` is {self.distribution}"

    @property
    def representation(self) -> tuple[Any, ...]:
        """The distribution and its support, which are equal for networks that can be exchanged."""
        ends = (self.categorical.v_min, self.categorical.v_max) if self.distribution == "categorical" else ()
        return self.distribution, *ends

    def warning(self, metrics: Mapping[str, NDArray[np.float64]], returns: NDArray[np.float64]) -> str | None:
        """Warn if some returns lay outside the support, and name the episodes' `returns` [P]."""
        shares = metrics.get("outside_support", np.zeros(1))
        share = shares[np.isfinite(shares)].max(initial=0.0)
        if not share:
            return None
        low, high = self.categorical.v_min, self.categorical.v_max
        ended = returns[np.isfinite(returns)]
        means = f"; episodes returned {ended.min():.4g} to {ended.max():.4g} before discounting" if ended.size else ""
        return (
            f"algorithm.categorical: {share:.2%} of the returns learned from lay outside v_min {low:g} to v_max "
            f"{high:g} and were learned as the nearest end; set both so that all discounted returns lie between "
            f"them{means}"
        )

    @model_validator(mode="after")
    def _has_a_period_where_it_counts(self) -> Self:
        if (self.target == "periodic") != (self.target_period is not None):
            raise ValueError("`target: periodic` and `target_period` go together")
        return self


class DDPGExploration(ActionNoise):
    """Initial steps of uniformly random actions, then noise on actions, which are scaled to [-1, 1]."""

    noise: Literal["none", "gaussian", "ornstein_uhlenbeck"] = "ornstein_uhlenbeck"
    scale: Weight = 0.2


class DDPGSettings(OffPolicySettings):
    name: str = "ddpg"
    actor_learning_rate: Rate | None = None
    """Null is the critics' `learning_rate`."""
    exploration: DDPGExploration = DDPGExploration()

    hyperparameters: ClassVar[tuple[str, ...]] = (*OffPolicySettings.hyperparameters, "actor_learning_rate")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = CRITIC_RANGES


class TD3Settings(DDPGSettings):
    name: str = "td3"
    policy_delay: Size = 2
    """Updates of an agent's critics for each update of its actor and of its target networks."""
    target_noise: Weight = 0.2
    """The standard deviation of the noise on the target policy's actions, which are scaled to [-1, 1]."""
    target_noise_clip: Weight = 0.5
    """The absolute value at which this noise is clipped."""
    exploration: ActionNoise = ActionNoise()  # type: ignore[assignment]

    hyperparameters: ClassVar[tuple[str, ...]] = (*DDPGSettings.hyperparameters, "target_noise", "target_noise_clip")
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = {
        **DDPGSettings.ranges,
        "target_noise": HyperparameterRange(min=0.05, max=0.4),
    }


class StateDependentNoiseSettings(Section):
    """Exploration noise that is a function of the state (gSDE, arXiv 2005.05719)."""

    every: Size | None = 64
    """Steps after which an environment's function is redrawn. It is also redrawn at the start of each episode; null
    redraws it only then. The paper uses 8 to 64."""
    initial_log_scale: Annotated[float, Field(ge=-20, le=2)] = -3.0
    """The initial log sigma: the log standard deviation of the noise matrix's entries."""


class SACExploration(ActionNoise):
    noise: Literal["none", "gaussian", "ornstein_uhlenbeck"] = "none"
    """Noise added to the policy's samples, for a `Box` only; `ornstein_uhlenbeck` is correlated over steps and so
    explores further."""


class SACSettings(OffPolicySettings):
    name: str = "sac"
    learning_rate: Rate = 3e-4
    """The learning rate of the critics and the temperature."""
    actor_learning_rate: Rate | None = None
    """Null is `learning_rate`."""
    initial_temperature: Positive = 1.0
    """The initial temperature (weight of the entropy), which is then learned."""
    target_entropy: Finite | None = None
    """The target entropy in nats, of actions scaled to [-1, 1]. Null is minus the number of dimensions of a `Box`, and
    for discrete actions `target_entropy_share` of the maximum entropy. With discrete actions a value set here is
    limited to 98 % of that maximum."""
    target_entropy_share: Rate = 0.98
    """The target entropy of discrete actions as a fraction of the maximum, used where `target_entropy` is null. In each
    state the maximum is the logarithm of the number of allowed actions."""
    exploration: SACExploration = SACExploration()
    state_dependent_noise: StateDependentNoiseSettings | None = None
    """Explore with a random function of the state that is redrawn periodically (gSDE, arXiv 2005.05719): the policy's
    variance is that of these draws, and its scale in a state follows from the features of its last hidden layer."""

    hyperparameters: ClassVar[tuple[str, ...]] = (
        *OffPolicySettings.hyperparameters,
        "actor_learning_rate",
        "target_entropy",
        "target_entropy_share",
    )
    ranges: ClassVar[Mapping[str, HyperparameterRange]] = CRITIC_RANGES

    def ineffective(self, name: str) -> str | None:
        replaced = name == "target_entropy_share" and self.target_entropy is not None
        return "because `target_entropy` is set" if replaced else super().ineffective(name)


NO_EPSILON = EpsilonGreedy(start=0.0, end=0.0, decay=1.0)


class EpsilonLadder(Section):
    """Environment i of N (from 0) takes random actions with probability `base` ** (1 + i / (N - 1) * `exponent`)
    (arXiv 1803.00933, section 4). N counts the environments of all actors of an agent."""

    base: Rate = 0.4
    """The probability in the first environment."""
    exponent: Weight = 7.0
    """The paper's alpha: the larger, the faster the probability falls over the environments."""


class ApeXSettings(Section):
    """The settings of both algorithms that learn from actors' transitions."""

    rollout_steps: Size = 16
    """Steps of each environment that an actor takes with one set of parameters and sends together."""

    actor_messages: ClassVar[str | None] = "transitions"

    @property
    def sent_steps(self) -> int:
        """Steps of each environment in one message of an actor."""
        return self.rollout_steps


class ApeXDQNSettings(ApeXSettings, DQNSettings):
    name: str = "apex_dqn"
    ladder: EpsilonLadder = EpsilonLadder()
    exploration: EpsilonGreedy = NO_EPSILON
    """Fixed: `ladder` sets epsilon for each environment."""

    @model_validator(mode="after")
    def _explores_by_the_ladder(self) -> Self:
        if self.exploration != NO_EPSILON:
            raise ValueError("exploration: is fixed; set `ladder`, the epsilons of the environments")
        return self


class ApeXDDPGSettings(ApeXSettings, DDPGSettings):
    name: str = "apex_ddpg"
