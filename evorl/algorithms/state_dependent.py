"""Generalised state-dependent exploration, gSDE (arXiv 2005.05719): noise that is a linear function of the state.

The noise on an action is eps(s) = theta^T z(s), where z(s) are the features of the policy's last hidden layer, and
theta ~ N(0, sigma^2) is a matrix that each environment keeps for some steps. In a given state the noise is
then constant until the matrix is redrawn, and nearby states have similar noise, which makes for smooth motion. Over
draws, an action is Gaussian with variance z^2 . sigma^2, from which log-probabilities and entropies follow.

Axes: P agents, E environments, B batch, N features, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import gymnasium as gym
import torch
from pydantic import Field
from torch import Tensor

from evorl.config import AnyConfig
from evorl.config.fields import Section, Size
from evorl.envs.spaces import EnvSpec
from evorl.networks.distributions import BoxDistribution, Distribution, Likelihood
from evorl.types.agents import FEATURES, Agent, Architecture, Head
from evorl.types.batches import RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

KEY = "algorithm.state_dependent_noise"
NOISE = "noise_log_scale"
"""The head of log sigma minus `initial_log_scale`: zero in new agents and for features added later."""
LEAST_VARIANCE = 1e-6
"""Added to an action's variance, which would be 0 in a state without active features."""
InitialLogScale = Annotated[float, Field(ge=-20, le=2)]


class StateDependentNoiseSettings(Section):
    """Exploration noise that is a function of the state (gSDE, arXiv 2005.05719)."""

    every: Size | None = 64
    """Steps after which an environment's function is redrawn. It is also redrawn at the start of each episode; null
    redraws it only then. The paper uses 8 to 64."""
    initial_log_scale: InitialLogScale = -3.0
    """The initial log sigma: the log standard deviation of the noise matrix's entries."""


class StateDependentNoise:
    """The noise of all environments of a stack: its variance, and the matrices that are held from step to step."""

    def __init__(self, settings: StateDependentNoiseSettings, size: int, *, learned: bool) -> None:
        """`size` is A. With `learned`, sigma [N, A] is learned for each agent; without, it stays as it is at first."""
        self._every = settings.every
        self._initial = settings.initial_log_scale
        self._size = size
        self.heads = (Head(FEATURES, 0), *([Head(NOISE, size, per_feature=True)] if learned else []))

    def shape(self, architecture: Architecture) -> tuple[int, int]:
        """The shape [A + 1, N] of an environment's noise state: its matrix, and a row with its age in steps.

        The matrix holds standard normal numbers, which are multiplied by the current sigma: the noise has the variance
        of the current policy, even as that learns while the matrix is held.
        """
        return self._size + 1, architecture.hidden_sizes[-1]

    def scales(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """sigma [P, N, A], or [1, N, A] if it is not learned. It has no effect on padding features, which are 0."""
        if NOISE in outputs:
            return (outputs[NOISE] + self._initial).exp()
        features = outputs[FEATURES]
        return features.new_full((1, features.shape[-1], self._size), self._initial).exp()

    def variance(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """The variance z^2 . sigma^2 [P, B, A] of actions."""
        return outputs[FEATURES].square() @ self.scales(outputs).square() + LEAST_VARIANCE

    def gaussian(self, outputs: Tensors) -> Tensors:
        """The outputs with `log_scale` [P, B, A], as of a Gaussian with a scale for each state.

        Gradients flow through the features as well.
        """
        return {**outputs, "log_scale": 0.5 * self.variance(outputs).log()}

    def draw(
        self, outputs: Mapping[str, Tensor], recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """The noise [P, E, A] in standard deviations, and the next state [P, E, A + 1, N]: matrices and their ages.

        A matrix is drawn where there is none, where an episode starts and where it is `every` steps old. Without a
        previous state, all are drawn.
        """
        features = outputs[FEATURES]
        if recurrent is None:
            state = features.new_zeros(*features.shape[:2], self._size + 1, features.shape[-1])
            due = state[:, :, -1, 0] == 0
        else:
            state = recurrent.state.clone()
            age = state[:, :, -1, 0]
            due = recurrent.started.squeeze(1) | (age == 0)
            due = due if self._every is None else due | (age >= self._every)
        count = int(due.sum())
        if count:
            state[due] = torch.randn(count, *state.shape[2:], generator=generator, device=state.device)
            state[:, :, -1].masked_fill_(due.unsqueeze(-1), 0.0)
        state[:, :, -1] += 1
        weighted = self.scales(outputs).mT.unsqueeze(1) * features.unsqueeze(2)
        noise = (state[:, :, :-1] * weighted).sum(-1)
        return noise * self.variance(outputs).rsqrt(), None if recurrent is None else state


class StateDependentDistribution(Distribution):
    """A plain or squashed Gaussian with the scale of state-dependent noise, for on-policy learning.

    The scale's gradient does not reach the features: the policy loss trains them through the mean alone, so that the
    policy cannot change its noise through features that its mean and value depend on. In SAC it does (`gaussian`).
    """

    def __init__(self, base: BoxDistribution, noise: StateDependentNoise) -> None:
        self.base = base
        self.noise = noise
        self.heads = (base.heads[0], *noise.heads)

    def sample(self, outputs: Tensors, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw unclipped actions [P, B, A], each with a matrix of its own."""
        return self.base.sample(self.noise.gaussian(outputs), mask, generator)

    def held(
        self, outputs: Tensors, recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Draw unclipped actions [P, E, A] with the matrices that environments hold, and return those for later."""
        noise, state = self.noise.draw(outputs, recurrent, generator)
        return self.base.moved(self.noise.gaussian(outputs), noise), state

    def mode(self, outputs: Tensors, mask: Tensor | None) -> Tensor:
        return self.base.mode(outputs, mask)

    def log_prob(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Tensor:
        return self.base.log_prob(self.noise.gaussian(outputs), mask, unclipped_action)

    def likelihood(self, outputs: Tensors, mask: Tensor | None, unclipped_action: Tensor) -> Likelihood:
        detached = {**outputs, FEATURES: outputs[FEATURES].detach()}
        return self.base.likelihood(self.noise.gaussian(detached), mask, unclipped_action)

    def to_environment(self, unclipped_action: Tensor) -> Tensor:
        return self.base.to_environment(unclipped_action)


def keep_scales(
    agent: Agent,
    network: str,
    origin: StateDependentNoiseSettings | None,
    own: StateDependentNoiseSettings | None,
) -> None:
    """Carry the sigma that an agent learned in a run with settings `origin` over into a run with settings `own`.

    Its tensors hold log sigma minus the run's `initial_log_scale`, in which the two runs may differ.
    """
    if origin is None or own is None:
        return
    for role in ("parameters", "target"):
        if (name := f"{NOISE}.weight") in (tensors := agent.tensors[network].get(role, {})):
            tensors[name] = tensors[name] + (origin.initial_log_scale - own.initial_log_scale)


def state_dependent_noise(config: AnyConfig, interface: EnvSpec, *, learned: bool) -> StateDependentNoise | None:
    """The configured noise, or None; see `StateDependentNoise` for `learned`.

    Raises UserError if the action space, the network or the algorithm's other noise is incompatible with it.
    """
    settings, space, recurrent = config.algorithm.state_dependent_noise, interface.action, config.network.recurrent
    if settings is None:
        return None
    if not isinstance(space, gym.spaces.Box):
        raise UserError(f"{KEY}: is for a Box, and {interface.environment} has {space}; leave it out")
    if recurrent:
        raise UserError(f"{KEY}: does not support recurrent networks; leave it or network.recurrent={recurrent} out")
    exploration = getattr(config.algorithm, "exploration", None)
    if exploration is not None and exploration.noise != "none":
        raise UserError(
            f"{KEY}: replaces action noise; set algorithm.exploration.noise=none instead of "
            f"{exploration.noise}, or leave it out"
        )
    return StateDependentNoise(settings, math.prod(space.shape), learned=learned)
