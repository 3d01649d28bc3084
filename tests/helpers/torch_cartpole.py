"""CartPole in torch, with Gymnasium's equations: the reference of tensor environments. Axes: N copies.

Its id is `tensor:helpers.torch_cartpole:make`.
"""

import math

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

MISTAKES = {
    "poison": 0,  # A reward that is no number in this step of an episode.
    "fails": False,  # An error in each step.
    "unseeded": False,  # No seeds.
    "alike": False,  # Copies that begin alike.
    "fake": False,  # Last observations that are the first of the next episode.
    "masks": False,  # Masks of actions.
    "whole": False,  # A space of whole numbers, which the observations are not.
}
LIMITS = np.array([4.8, np.inf, 24 * math.pi / 180, np.inf], np.float32)


def make(num_envs, device, seed, **kwargs):
    return CartPole(num_envs, device, **kwargs)


class CartPole:
    """N copies, with true last observations under `final`. With `mode` None it does not say when it resets."""

    single_observation_space = gym.spaces.Box(-LIMITS, LIMITS)
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs, device="cpu", final="final_obs", mode="SameStep", limit=500, **mistakes):
        self.num_envs, self.device, self.final, self.mistakes = num_envs, device, final, {**MISTAKES, **mistakes}
        if unknown := mistakes.keys() - MISTAKES.keys():
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
        self.metadata = {"render_fps": 50} | ({} if mode is None else {"autoreset_mode": AutoresetMode(mode)})
        self.max_episode_length, self.mode = limit, mode
        self.random = torch.Generator(device=device)
        if self.mistakes["whole"]:
            self.single_observation_space = gym.spaces.MultiDiscrete([5] * 4)

    def render(self):
        """The first copy's cart as a white column."""
        picture = np.zeros((8, 16, 3), np.uint8)
        picture[:, int(self.state[0, 0].clamp(-2.4, 2.3) / 0.3 + 8)] = 255
        return picture

    def reset(self, *, seed=None, options=None):
        if seed is not None and not self.mistakes["unseeded"]:
            self.random.manual_seed(seed)
        self.state = self._drawn()
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.resetting = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.state.float(), {"action_mask": self.resetting} if self.mistakes["masks"] else {}

    def _drawn(self):
        uniform = torch.rand(self.num_envs, 4, generator=self.random, dtype=torch.float64, device=self.device)
        return (uniform[:1].expand(self.num_envs, 4) if self.mistakes["alike"] else uniform) * 0.1 - 0.05

    def step(self, action):
        if self.mistakes["fails"]:
            return self.stats["no such key"]
        x, speed, angle, turn = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0).double()
        cosine, sine = angle.cos(), angle.sin()
        pushed = (force + 0.05 * turn.square() * sine) / 1.1
        turning = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cosine.square() / 1.1))
        moving = pushed - 0.05 * turning * cosine / 1.1
        moved = (x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning)
        self.state, self.steps = torch.stack(moved, 1), self.steps + 1
        terminated = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * 2 * math.pi / 360)
        truncated = self.steps >= self.max_episode_length
        reward, info = (
            torch.ones(self.num_envs, device=self.device),
            {"angle": self.state[:, 2].float(), "oldest": self.steps.max()[None]},
        )
        if self.mistakes["poison"] and bool((self.steps == self.mistakes["poison"]).any()):
            reward[0] = math.nan
        over = terminated | truncated
        if self.mode == "NextStep":
            over, resets = over & ~self.resetting, self.resetting
            reward[resets], terminated, truncated = 0.0, terminated & ~resets, truncated & ~resets
            self.resetting = over
        else:
            resets = over
            info |= {self.final: self.state.float()} if self.final else {}
        self.state = torch.where(resets[:, None], self._drawn(), self.state)
        self.steps = self.steps.masked_fill(resets, 0)
        info |= {self.final: self.state.float()} if self.mistakes["fake"] else {}
        return self.state.float(), reward, terminated, truncated, info
