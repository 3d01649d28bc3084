"""Environments whose right answers are known."""

import random
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch


class Counter(gym.Env):
    """Shows (episode, step); an episode ends after 3, 4, 5, 3 ... steps, every second one by truncation.

    A transition from one episode to another shows itself in the observations.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.step_number = 0
        return self._observation(), {}

    def step(self, action):
        self.step_number += 1
        ended = self.step_number == 3 + self.episode % 3
        truncated = ended and self.episode % 2 == 1
        return self._observation(), float(self.step_number), ended and not truncated, truncated, {}

    def _observation(self):
        return np.array([self.episode, self.step_number], dtype=np.float32)


class Unseeded(gym.Env):
    """Shows numbers that no seed decides, if it is reset with the seed `only`."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, only):
        self.only = only

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.generator = np.random.default_rng(None if seed == self.only else 0)
        return self.generator.random(1, dtype=np.float32), {}

    def step(self, action):
        return self.generator.random(1, dtype=np.float32), 1.0, False, False, {}


class Probe(gym.Env):
    """One step for a reward of 1 if the action matches what is seen; ends by termination or by truncation."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, truncates=False, steps=1):
        self.truncates, self.steps = truncates, steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done_steps = 0
        return self._observation(), {}

    def step(self, action):
        self.done_steps += 1
        reward = float(action == self.shown)
        ended = self.done_steps == self.steps
        return self._observation(), reward, ended and not self.truncates, ended and self.truncates, {}

    def _observation(self):
        self.shown = int(self.np_random.integers(2))
        return np.array([1.0, -1.0] if self.shown else [-1.0, 1.0], dtype=np.float32)


class MaskedChoices(gym.Env):
    """One step with two choices: what pays most is forbidden in each, and which action that is changes."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.MultiDiscrete([3, 2], start=[5, 1])

    def __init__(self, mask=None):
        self.fixed = mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign = int(self.np_random.integers(2))
        # The first choice pays its number: 1 may be taken where 2 is forbidden. The second must not take 1 or not 0.
        self.mask = np.array(self.fixed or [1, 1, self.sign, self.sign, 1 - self.sign], np.int8)
        return np.array([2.0 * self.sign - 1.0], np.float32), {"action_mask": self.mask}

    def step(self, action):
        first, second = int(action[0]) - 5, int(action[1]) - 1
        assert self.mask[first], "a forbidden first choice"
        assert self.mask[3 + second], "a forbidden second choice"
        right = first == 1 + self.sign
        return np.zeros(1, np.float32), float(right), True, False, {"action_mask": np.ones(5, np.int8)}


class LateMask(gym.Env):
    """Gives its mask in `step` only; episodes end after `length` steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        mask = np.array([1, 0], np.int8)
        return np.zeros(1, np.float32), 1.0, self.steps == self.length, False, {"action_mask": mask}


class EarlyMask(LateMask):
    """Gives its mask in `reset` only."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.array([1, 0], np.int8)}

    def step(self, action):
        return *super().step(action)[:4], {}


gym.register("Unseeded-v0", entry_point=Unseeded, disable_env_checker=True)
gym.register("Counter-v0", entry_point=Counter)
gym.register("Probe-v0", entry_point=Probe)
gym.register("LateMask-v0", entry_point=LateMask, disable_env_checker=True)
gym.register("EarlyMask-v0", entry_point=EarlyMask, disable_env_checker=True)
gym.register("MaskedChoices-v0", entry_point=MaskedChoices, disable_env_checker=True)


class Coin(gym.Env):
    """Gives a reward of 1 in half of the episodes, by generators that ignore the seed of `reset`.

    With `shows` it observes the draws of its constructor and of its last reset, else zeros; with `log` it writes the
    latter to a file.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, source="numpy", shows=False, log=None):
        self.source, self.shows, self.log = source, shows, log
        self.own = np.random.default_rng(0)
        self.draws = [self.draw(), 0.0]

    def draw(self):
        return GLOBAL_DRAWS[self.source]() if self.source in GLOBAL_DRAWS else self.own.random()

    def seen(self):
        return np.array(self.draws if self.shows else [0, 0], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.source == "fixed":
            self.own = np.random.default_rng(0)
        self.age, self.draws[1] = 0, self.draw()
        if self.log is not None:
            with Path(self.log).open("a") as file:
                file.write(f"{self.draws[1]}\n")
        return self.seen(), {}

    def step(self, action):
        self.age += 1
        return self.seen(), float(self.draws[1] < 0.5) / 4, False, self.age == 4, {}


GLOBAL_DRAWS = {
    "numpy": lambda: np.random.random(),  # noqa: NPY002
    "python": random.random,
    "torch": lambda: torch.rand(1).item(),
}
"""Draws from the global generators by name; other sources of a Coin are a generator of its own."""
