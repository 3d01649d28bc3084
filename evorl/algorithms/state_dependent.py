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

import gymnasium as gym
import torch
from torch import Tensor

from evorl.config import AnyConfig
from evorl.config.off_policy import StateDependentNoiseSettings
from evorl.envs.spaces import EnvSpec
from evorl.types.agents import FEATURES, Architecture, Head
from evorl.types.batches import RecurrentInput
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

KEY = "algorithm.state_dependent_noise"
NOISE = "noise_log_scale"
"""The head of log sigma minus `initial_log_scale`: zero in new agents and for features added later."""
LEAST_VARIANCE = 1e-6
"""Added to an action's variance, which would be 0 in a state without active features."""


class StateDependentNoise:
    """The noise of all environments of a stack: its variance, and the matrices that are held from step to step."""

    def __init__(self, settings: StateDependentNoiseSettings, size: int) -> None:
        """`size` is A."""
        self._every = settings.every
        self._initial = settings.initial_log_scale
        self._size = size
        self.heads = Head(FEATURES, 0), Head(NOISE, size, per_feature=True)

    def shape(self, architecture: Architecture) -> tuple[int, int]:
        """The shape [A + 1, N] of an environment's noise state: its matrix, and a row with its age in steps.

        The matrix holds standard normal numbers, which are multiplied by the current sigma: the noise has the variance
        of the current policy, even as that learns while the matrix is held.
        """
        return self._size + 1, architecture.hidden_sizes[-1]

    def scales(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """sigma [P, N, A], which each agent learns. It has no effect on padding features, which are 0."""
        return (outputs[NOISE] + self._initial).exp()

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


def state_dependent_noise(config: AnyConfig, interface: EnvSpec) -> StateDependentNoise | None:
    """The configured noise, or None. Raises UserError if the action space or other noise is incompatible with it."""
    settings, space = config.algorithm.state_dependent_noise, interface.action
    if settings is None:
        return None
    if not isinstance(space, gym.spaces.Box):
        raise UserError(f"{KEY}: is for a Box, and {interface.environment} has {space}; leave it out")
    if (other := config.algorithm.exploration.noise) != "none":
        raise UserError(
            f"{KEY}: replaces action noise; set algorithm.exploration.noise=none instead of {other}, or leave it out"
        )
    return StateDependentNoise(settings, math.prod(space.shape))
