"""The length of a generation beside an environment's longest episode, and its consequences."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import gymnasium as gym

from evorl.config import AnyConfig, Environment
from evorl.system.console import say
from evorl.types import EvorlWarning

EPISODES_IN_A_GENERATION = 2
"""With `environment.carry_over: auto`, generations with room for so many of the longest episodes begin new ones."""

MIN_SHARE = 0.1
"""The share of a generation below which the rest of `training.max_steps` is left: it would be evaluation most of all.
Steps in which an environment only resets are not counted, so that such a rest is usual."""


@dataclass(frozen=True)
class Horizon:
    """The steps of a rank's environments in a generation, and of the longest episode, None where nothing bounds it.

    A step of all of them is `counted` steps of each agent, and there are a multiple of `period` steps.
    `carries_over` says whether episodes run on from one generation to the next. Where there are several `actors`, each
    makes a share of the steps; where they are `free`, it is not known which. `continued` says whether another process
    can go on with running episodes.
    """

    steps: int
    longest: int | None
    carries_over: bool
    actors: int = 1
    free: bool = False
    counted: int = 1
    period: int = 1
    continued: bool = True

    @property
    def of_each(self) -> int:
        """Return the steps of each environment."""
        return self.steps // self.actors

    def within(self, left: int) -> Horizon:
        """Return the horizon of a generation in which each agent makes the steps that are `left`, in whole periods."""
        pieces = -(-left // (self.counted * self.period))
        return replace(self, steps=min(self.steps, max(1, pieces) * self.period))

    def is_spent(self, left: int) -> bool:
        """Return whether the `left` steps of each agent are too few for a generation."""
        return left <= MIN_SHARE * self.steps * self.counted

    def sentence(self) -> str:
        """Return what becomes of episodes at a generation's end, and what that means for a resumed run."""
        bound = "have no known limit" if self.longest is None else f"may take {self.longest:,}"
        numbers = f"a generation has {self.of_each:,} steps of each environment, and episodes {bound}"
        if self.free:
            begins = "Episodes run on over evolution" if self.carries_over else "Each generation begins new episodes"
            return f"Actors run freely, so resuming will not be bit-exact. {begins} ({numbers})."
        if self.carries_over:
            runs_on = f"Episodes run on from one generation to the next ({numbers})"
            if self.continued:
                return f"{runs_on}: resuming plays them again, and is bit-exact on the same number of ranks."
            return f"{runs_on} and cannot be played again: resuming will not be bit-exact."
        return f"Each generation begins new episodes ({numbers}): resuming is bit-exact on the same number of ranks."

    def shortfall(self, evaluated: int | None) -> str | None:
        """Return in words which states are evaluated (up to `evaluated` steps) and never trained on, if any."""
        bounds = [bound for bound in (self.longest, evaluated) if bound is not None]
        if self.carries_over or self.longest is None or self.of_each >= min(bounds):
            return None
        return (
            f"environment.carry_over: each generation begins new episodes after {self.of_each:,} steps of each "
            f"environment, but evaluation plays up to {min(bounds):,}: later states are never trained on; take auto or "
            "true, or more evolution.steps"
        )


def horizon(config: AnyConfig, copies: int, period: int) -> Horizon:
    """Return the horizon of a run: `copies` ranks train each agent, `period` steps of each environment at a time."""
    environment = config.environment
    each = environment.num_envs * copies * period
    steps = -(-config.evolution.steps // each) * period
    longest, actors = longest_episode(environment), config.actors
    count = 1 if actors is None else actors.count
    if environment.carry_over == "auto":
        carries_over = longest is None or steps // count < EPISODES_IN_A_GENERATION * longest
    else:
        carries_over = environment.carry_over
    free, counted = actors is not None and not actors.lockstep, environment.num_envs * copies
    return Horizon(steps, longest, carries_over, count, free, counted, period)


def longest_episode(settings: Environment) -> int | None:
    """Return the registration's limit on an episode's steps; None where there is none."""
    spec = gym.spec(settings.id.rpartition(":")[2])
    options = {**spec.kwargs, **settings.kwargs}
    bounds = [options.get("max_episode_steps", spec.max_episode_steps)]
    if "max_num_frames_per_episode" in options:
        # Atari counts frames. A step takes `frameskip` of them, or a random number between two.
        skip = options.get("frameskip", 1)
        bounds.append(math.ceil(options["max_num_frames_per_episode"] / (skip if isinstance(skip, int) else min(skip))))
    return min((bound for bound in bounds if bound is not None and bound > 0), default=None)


def announce(horizon: Horizon, evaluated: int | None) -> None:
    """Say what becomes of episodes, and warn of states that are evaluated and never trained on."""
    say(horizon.sentence())
    if shortfall := horizon.shortfall(evaluated):
        warnings.warn(shortfall, EvorlWarning, stacklevel=2)
