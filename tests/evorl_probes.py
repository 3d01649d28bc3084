"""Environments whose right answers are known."""

import gymnasium as gym
import numpy as np


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


gym.register("Counter-v0", entry_point=Counter)
gym.register("Probe-v0", entry_point=Probe)
