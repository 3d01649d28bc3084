"""Environments that fail in known ways."""

import gymnasium as gym
import numpy as np


class Failing(gym.Env):
    """Shows (born, episode, step). A copy with an odd seed fails in its second episode at step 2; if `always`, all do.

    `born` counts how often an environment was made in this process. Episodes end after 4 steps; each step rewards 1.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,))
    action_space = gym.spaces.Discrete(2)
    made = 0

    def __init__(self, how="step", always=False):
        type(self).made += 1
        self.how, self.always, self.born, self.episode, self.seed = how, always, type(self).made, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.episode = 0 if seed is not None else self.episode + 1
        self.step_number = 0
        if self.how == "reset" and self._now(0):
            raise RuntimeError("no reset today")
        return self._observation(), {}

    def step(self, action):
        self.step_number += 1
        fails = self._now(2)
        if self.how == "step" and fails:
            raise RuntimeError("the wheel came off")
        reward = float("nan") if self.how == "reward" and fails else 1.0
        observation = self._observation()
        if self.how == "observation" and fails:
            observation[2] = np.inf
        ended = self.step_number == 4
        if self.how == "last" and ended and self.seed % 2:
            observation[0] = np.nan
        return observation, reward, ended, False, {}

    def _now(self, step):
        return self.step_number == step and (self.always or (self.seed % 2 == 1 and self.episode == 1))

    def _observation(self):
        return np.array([self.born, self.episode, self.step_number], dtype=np.float32)


gym.register("Failing-v0", entry_point=Failing)
