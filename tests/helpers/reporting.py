"""An environment that reports more than rewards."""

import gymnasium as gym
import numpy as np


class Reporting(gym.Env):
    """Episodes of 4 steps, each of which rewards 1 for action 0; the info counts the other action as `others`.

    At the end it also tells `done`, after a reset `others` as -1, and always a `text`.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.others = 0, 0
        return self._see(), {"others": -1, "text": "first"}

    def step(self, action):
        self.steps += 1
        self.others += int(action)
        ended = self.steps == 4
        info = {"others": self.others, "text": "later", **({"done": True} if ended else {})}
        return self._see(), 1.0 - action, ended, False, info

    def _see(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


gym.register("Reporting-v0", entry_point=Reporting)
