"""Further environments whose right answers are known."""

import gymnasium as gym
import numpy as np


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


gym.register("LateMask-v0", entry_point=LateMask, disable_env_checker=True)
gym.register("MaskedChoices-v0", entry_point=MaskedChoices, disable_env_checker=True)
