"""Epsilon-greedy schedules and action noise. Axes: P agents, E environments, A action dimensions or choices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evorl.config.off_policy import ActionNoise, EpsilonGreedy
from evorl.types.batches import RecurrentInput


def decayed(epsilon: Tensor, schedule: EpsilonGreedy, steps: Tensor | float) -> Tensor:
    """Epsilon [P] after `steps` ([P] or one number) further steps of a schedule, not below its `end`."""
    if schedule.schedule == "linear":
        fall = max(0.0, schedule.start - schedule.end) / (schedule.steps or 1)
        return (epsilon - fall * steps).clamp(min=schedule.end)
    return (epsilon * schedule.decay**steps).clamp(min=schedule.end)


def draw_noise(
    settings: ActionNoise, action: Tensor, recurrent: RecurrentInput | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Draw noise for actions [P, E, A], and its state [P, E, 1, A] if it carries over from step to step.

    With dt = 1 step, the Ornstein-Uhlenbeck process is x' = (1 - reversion) x + scale n. It starts at 0 (Uhlenbeck &
    Ornstein 1930; arXiv 1509.02971, section 7).
    """
    if settings.noise == "none":
        return torch.zeros_like(action), None
    fresh = settings.scale * torch.randn(action.shape, generator=generator, device=action.device)
    if recurrent is None:
        return fresh, None
    before = recurrent.state.squeeze(2).masked_fill(recurrent.started.squeeze(1).unsqueeze(-1), 0.0)
    noise = fresh + settings.kept * before
    return noise, noise.unsqueeze(2)


def random_at_first(settings: ActionNoise, action: Tensor, steps: Tensor, random: Callable[[], Tensor]) -> Tensor:
    """Replace actions [P, E, ...] by `random` ones for agents with fewer than `random_steps` `steps` [P]."""
    if not settings.random_steps:
        return action
    first = (steps < settings.random_steps).view(-1, *[1] * (action.dim() - 1))
    return torch.where(first, random(), action)


def random_numbers(action: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform samples between -1 and 1, of the shape of `action` [P, E, A]."""
    return 2 * torch.rand(action.shape, generator=generator, device=action.device) - 1


def random_choices(actions: int, shape: torch.Size, mask: Tensor | None, generator: torch.Generator) -> Tensor:
    """Uniformly random choices of `shape` [P, E] from all `actions`, or from those `mask` [P, E, A] allows."""
    if mask is None:
        return torch.randint(actions, shape, generator=generator, device=generator.device)
    scores = torch.rand(mask.shape, generator=generator, device=mask.device)
    return scores.masked_fill(~mask, -1.0).argmax(-1)
