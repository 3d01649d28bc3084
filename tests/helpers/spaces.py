"""Environments of every kind of observation and action whose right answers are known."""

import gymnasium as gym
import numpy as np

PATTERN = np.zeros((2, 12, 12), np.uint8)
PATTERN[0, :6], PATTERN[1, :, :6] = 255, 255


class Shown(gym.Env):
    """One step: the right one of two actions, which what is shown tells, pays 1."""

    action_space = gym.spaces.Discrete(2)
    spaces = {  # noqa: RUF012
        "image": gym.spaces.Box(0, 255, (12, 12), np.uint8),
        "category": gym.spaces.Discrete(2, start=3),
        "categories": gym.spaces.MultiDiscrete([2, 3]),
        "flags": gym.spaces.MultiBinary(2),
        "dict": gym.spaces.Dict(a=gym.spaces.Box(0, 255, (12, 12), np.uint8), b=gym.spaces.Box(-1, 1, (1,))),
        "tuple": gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,)))),
    }

    def __init__(self, kind):
        self.kind, self.observation_space = kind, self.spaces[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        first, second = (int(value) for value in self.np_random.integers(2, size=2))
        vector = np.array([2.0 * second - 1.0], np.float32)
        self.right = first ^ second if self.kind in ("dict", "tuple") else first
        shown = {
            "image": PATTERN[first],
            "category": 3 + first,
            "categories": np.array([first, 2 * second]),
            "flags": np.array([first, second], np.int8),
            "dict": {"a": PATTERN[first], "b": vector},
            "tuple": (first, vector),
        }
        self.shown = shown[self.kind]
        return self.shown, {}

    def step(self, action):
        return self.shown, float(action == self.right), True, False, {}


class Done(gym.Env):
    """One step: reward for the right action of each kind."""

    observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, kind):
        self.kind = kind
        spaces = {"choices": gym.spaces.MultiDiscrete([2, 3]), "continuous": gym.spaces.Box(0.0, 4.0, (1,))}
        self.action_space = spaces[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.kind == "choices":
            reward = 0.5 * (action[0] == 1) + 0.5 * (action[1] == 2)
        else:
            assert self.action_space.contains(action), action
            reward = 1.0 - abs(float(action[0]) - 3.0)
        return np.zeros(1, np.float32), float(reward), True, False, {}


class Masked(gym.Env):
    """Two steps; what pays most is forbidden, and whoever does it all the same is told so."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done_steps = 0
        return self._seen()

    def step(self, action):
        assert self.mask[action], "a forbidden action"
        self.done_steps += 1
        reward = [0.0, 1.0, 2.0, 3.0][action]
        observation, info = self._seen()
        return observation, reward, self.done_steps == 2, False, info

    def _seen(self):
        """First 1 is the best that is allowed, then 2."""
        self.mask = np.array([1, 1, self.done_steps == 1, 0], np.int8)
        return np.array([self.done_steps], np.float32), {"action_mask": self.mask}


class Recall(gym.Env):
    """A cue at the first of four steps says which action pays at the last."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.done_steps = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action):
        self.done_steps += 1
        last = self.done_steps == 4
        return np.array([0.0, self.done_steps / 4], np.float32), float(last and action == self.cue), last, False, {}


class Endless(gym.Env):
    """A reward of 1 a step, in episodes of three; each is cut or ends there."""

    observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, truncates, continuous=False):
        self.truncates = truncates
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if continuous else gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done_steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.done_steps += 1
        ended = self.done_steps == 3
        return np.ones(1, np.float32), 1.0, ended and not self.truncates, ended and self.truncates, {}


class SometimesMasked(gym.Env):
    """Cut after one step; only every second environment gives a mask with its last observation."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.gives = seed is None or seed % 2 == 0
        return np.zeros(1, np.float32), {"action_mask": np.array([1, 0, 1], np.int8)}

    def step(self, action):
        info = {"action_mask": np.array([0, 0, 1], np.int8)} if self.gives else {}
        return np.ones(1, np.float32), 1.0, False, True, info


gym.register("SometimesMasked-v0", entry_point=SometimesMasked, disable_env_checker=True)
gym.register("Shown-v0", entry_point=Shown)
gym.register("Done-v0", entry_point=Done)
gym.register("Masked-v0", entry_point=Masked, disable_env_checker=True)
gym.register("Recall-v0", entry_point=Recall)
gym.register("Endless-v0", entry_point=Endless)
