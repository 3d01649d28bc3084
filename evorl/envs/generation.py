"""Generation length relative to the longest episode, and what follows for resets and resuming."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import gymnasium as gym

from evorl.config import AnyConfig, Environment
from evorl.envs.games import is_game
from evorl.envs.tensor.sources import is_tensor, simulator_of

EPISODES_IN_A_GENERATION = 2
"""With `environment.carry_over: auto`, each generation starts new episodes if it is at least this many times as long as
the longest episode."""

MIN_SHARE = 0.1
"""Fraction of a generation below which the remainder of `training.max_steps` is skipped: it would be mostly evaluation.
Steps in which an environment only resets are not counted, so such a remainder is common."""


@dataclass(frozen=True)
class GenerationPlan:
    """Vector steps of a rank in a generation, and the steps of the longest episode (None if unbounded).

    One vector step is `agent_steps_per_vector_step` steps of each agent, over all ranks that hold it; the number of
    vector steps is a multiple of `period`. `carries_over` means that episodes continue across generations,
    `can_carry_over` that they may. With several `actors`, each takes a share of the steps.
    """

    steps: int
    longest: int | None
    carries_over: bool
    actors: int = 1
    agent_steps_per_vector_step: int = 1
    period: int = 1
    can_carry_over: bool = True

    @property
    def steps_of_each_environment(self) -> int:
        """The steps of each environment in a generation."""
        return self.steps // self.actors

    def within(self, left: int) -> GenerationPlan:
        """The length for the `left` steps of each agent, rounded up to whole periods."""
        pieces = -(-left // (self.agent_steps_per_vector_step * self.period))
        return replace(self, steps=min(self.steps, max(1, pieces) * self.period))

    def is_spent(self, left: int) -> bool:
        """True if the `left` steps of each agent are too few for another generation."""
        return left <= MIN_SHARE * self.steps * self.agent_steps_per_vector_step

    def shortfall(self, evaluated: int | None) -> str | None:
        """A warning if states within `evaluated` steps are evaluated but never trained on, else None."""
        bounds = [bound for bound in (self.longest, evaluated) if bound is not None]
        if self.carries_over or self.longest is None or self.steps_of_each_environment >= min(bounds):
            return None
        advice = ", or set carry_over to true" if self.can_carry_over else ""
        return (
            f"environment.carry_over: each generation begins new episodes after {self.steps_of_each_environment:,} "
            f"steps of each environment, but evaluation plays up to {min(bounds):,}: later states are never trained "
            f"on; raise evolution.steps{advice}"
        )


def steps_of_generation(config: AnyConfig, copies: int, period: int) -> int:
    """Vector steps of a rank in a generation, over its actors: `evolution.steps` of an agent on `copies` ranks, rounded
    up to whole rollouts of `period` steps."""
    return -(-config.evolution.steps // (config.environment.num_envs * copies * period)) * period


def generation_plan(config: AnyConfig, copies: int, period: int) -> GenerationPlan:
    """The generation length of a run in which `copies` ranks train each agent, in rollouts of `period` steps."""
    environment = config.environment
    steps = steps_of_generation(config, copies, period)
    longest, actors = longest_episode(environment), config.actors
    count = 1 if actors is None else actors.count
    can_carry_over = not is_tensor(environment.id) or simulator_of(environment).can_save
    # A resumed run does not replay episodes of actors, and those in lockstep are to repeat it exactly.
    if (
        is_game(environment.id)
        or (actors is not None and actors.lockstep and environment.carry_over == "auto")
        or not can_carry_over
    ):
        carries_over = False
    elif environment.carry_over == "auto":
        carries_over = longest is None or steps // count < EPISODES_IN_A_GENERATION * longest
    else:
        carries_over = environment.carry_over
    return GenerationPlan(steps, longest, carries_over, count, environment.num_envs * copies, period, can_carry_over)


def longest_episode(settings: Environment) -> int | None:
    """The registered limit on episode steps; None if there is none."""
    if is_game(settings.id):
        return None
    if is_tensor(settings.id):
        return simulator_of(settings).limit
    spec = gym.spec(settings.id.rpartition(":")[2])
    options = {**spec.kwargs, **settings.kwargs}
    limit = options.get("max_episode_steps")
    bounds = [spec.max_episode_steps if limit is None else limit]
    if (frames := options.get("max_num_frames_per_episode")) is not None:
        # Atari limits frames, not steps. A step is `frameskip` frames, or a random number within a range.
        skip = options.get("frameskip", 1)
        bounds.append(math.ceil(frames / (skip if isinstance(skip, int) else min(skip))))
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=None)
