"""Epsilon-greedy schedules and action noise. Axes: P agents, E environments, A action dimensions or choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from evorl.config.fields import Count, Fraction, Rate, Section, Weight
from evorl.types.batches import RecurrentInput


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

    @model_validator(mode="after")
    def _has_steps_where_they_count(self) -> Self:
        if (self.schedule == "linear") != (self.steps is not None):
            raise ValueError("`schedule: linear` needs `steps`, and `exponential` does not take it")
        return self

    def after(self, epsilon: Tensor, steps: Tensor | float) -> Tensor:
        """Epsilon [P] after `steps` ([P] or one number) further steps, not below `end`."""
        if self.schedule == "linear":
            return (epsilon - max(0.0, self.start - self.end) / (self.steps or 1) * steps).clamp(min=self.end)
        return (epsilon * self.decay**steps).clamp(min=self.end)


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

    @property
    def kept(self) -> float:
        """The share of the noise that carries over to the next step."""
        return 1 - self.reversion if self.noise == "ornstein_uhlenbeck" else 0.0

    def random_at_first(self, action: Tensor, steps: Tensor, random: Callable[[], Tensor]) -> Tensor:
        """Replace actions [P, E, ...] by `random` ones for agents with fewer than `random_steps` `steps` [P]."""
        if not self.random_steps:
            return action
        first = (steps < self.random_steps).view(-1, *[1] * (action.dim() - 1))
        return torch.where(first, random(), action)

    def draw(
        self, action: Tensor, recurrent: RecurrentInput | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Draw noise for actions [P, E, A], and its state [P, E, 1, A] if it carries over from step to step.

        With dt = 1 step, the Ornstein-Uhlenbeck process is x' = (1 - reversion) x + scale n. It starts at 0 (Uhlenbeck
        & Ornstein 1930; arXiv 1509.02971, section 7).
        """
        if self.noise == "none":
            return torch.zeros_like(action), None
        fresh = self.scale * torch.randn(action.shape, generator=generator, device=action.device)
        if recurrent is None:
            return fresh, None
        before = recurrent.state.squeeze(2).masked_fill(recurrent.started.squeeze(1).unsqueeze(-1), 0.0)
        noise = fresh + self.kept * before
        return noise, noise.unsqueeze(2)


def random_numbers(action: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform samples between -1 and 1, of the shape of `action` [P, E, A]."""
    return 2 * torch.rand(action.shape, generator=generator, device=action.device) - 1


def random_choices(actions: int, shape: torch.Size, mask: Tensor | None, generator: torch.Generator) -> Tensor:
    """Uniformly random choices of `shape` [P, E] from all `actions`, or from those `mask` [P, E, A] allows."""
    if mask is None:
        return torch.randint(actions, shape, generator=generator, device=generator.device)
    scores = torch.rand(mask.shape, generator=generator, device=mask.device)
    return scores.masked_fill(~mask, -1.0).argmax(-1)
