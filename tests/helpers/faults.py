"""Environments that fail in known ways."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from evorl.types.outcomes import UserError


class Failing(gym.Env):
    """Shows (seed % 1000, episode, step); episodes end after 4 steps, each of which rewards 1.

    A copy whose seed is one of `seeds`, which may be "all", fails in its episode number `episode`, at
    step `step` of it, in the way `how`; the copy with the seed `stuck` does not come back from there.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, how="step", seeds=(5, 7), episode=1, step=2, stuck=None):
        self.how, self.seeds, self.place, self.stuck = how, seeds, (episode, step), stuck
        self.seed, self.episode, self.step_number = 0, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.episode = 0 if seed is not None else self.episode + 1
        self.step_number = 0
        self._raise("reset")
        return self._observation(), {}

    def step(self, action):
        self.step_number += 1
        if self.seed == self.stuck and (self.episode, self.step_number) == self.place:
            time.sleep(60)
        self._raise("step")
        reward = {"reward": np.nan, "huge reward": 1e39, "high reward": 1e38}.get(self.how, 1.0) if self._now() else 1.0
        return self._observation(), reward, self.step_number == 4, False, {"fault": "the environment's own word"}

    def _raise(self, where):
        if not self._now():
            return
        match self.how:
            case "die" if where == "step":
                os._exit(1)
            case "interrupt" if where == "step":
                raise KeyboardInterrupt
            case "panic" if where == "step":
                raise GeneratorExit("a panic of an extension, which is no Exception")
            case "no_grad" if where == "step":
                torch.set_grad_enabled(False)
            case "exit" if where == "step":
                sys.exit(0)
            case "move" if where == "step":
                os.chdir("/")
            case "user":
                raise UserError("environment.kwargs: the wheel must be round")
            case "step" | "reset" if where == self.how:
                raise RuntimeError(f"the wheel came off\nin a {where}")

    def _now(self):
        return (self.seeds == "all" or self.seed in self.seeds) and (self.episode, self.step_number) == self.place

    def _observation(self):
        shown = np.array([self.seed % 1000, self.episode, self.step_number], dtype=np.float32)
        if self.how in ("nan", "inf", "sentinel") and self._now():
            shown[2] = np.finfo(np.float32).min if self.how == "sentinel" else float(self.how)
        return shown


class Swallows(gym.Env):
    """Sends its process SIGTERM in a call, the one number `step` of all copies, and swallows every exception there."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def __init__(self, step):
        type(self).steps, self.told = 0, step

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return np.zeros(1, np.float32), {}

    def step(self, action):
        type(self).steps += 1
        self.left -= 1
        try:
            if type(self).steps == self.told:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
        except:  # noqa: E722
            pass
        return np.zeros(1, np.float32), 1.0, not self.left, False, {}


class Parted(gym.Env):
    """Shows a picture and a position, which is infinite at step 3; forbids action 0 at even steps."""

    observation_space = gym.spaces.Dict(
        {"picture": gym.spaces.Box(0, 255, (3, 3), np.uint8), "position": gym.spaces.Box(-np.inf, np.inf, (2,))}
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return self._shown()

    def step(self, action):
        self.step_number += 1
        observation, info = self._shown()
        return observation, 1.0, False, False, info

    def _shown(self):
        position = np.array([0.0, np.inf if self.step_number == 3 else self.step_number], dtype=np.float32)
        allowed = np.array([self.step_number % 2, 1], dtype=np.int8)
        return {"picture": np.zeros((3, 3), np.uint8), "position": position}, {"action_mask": allowed}


class Hanging(gym.Env):
    """Does not come back from its third step."""

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            time.sleep(3600)
        return self.observation_space.sample(), 0.0, False, False, {}


class SlowReset(gym.Env):
    """Takes three seconds to reset. Its spaces are those of CartPole."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        time.sleep(3)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Recorded(gym.Env):
    """Writes into `file` when it is made and closed; in step `at` of an episode, or in `close`, it fails as `how` says.

    Episodes end after 5 steps. Its spaces are those of CartPole.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, file, how="", at=3):
        self.file, self.how, self.at, self.steps = file, how, at, 0
        self._note("made")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if self.how == "first reset":
            self._look_up({})
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            match self.how:
                case "bug":
                    self._look_up({})
                case "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                case "lost":
                    raise UserError("environment.kwargs: lost")
                case "wait":
                    time.sleep(60)
                case "exit":
                    sys.exit(0)
        return np.zeros(4, np.float32), 1.0, self.steps == 5, False, {}

    def close(self):
        try:
            match self.how:
                case "hang":
                    time.sleep(60)
                case "raise":
                    raise KeyError("window")
        finally:  # After the alarm of a close that hangs, of which there is one.
            self._note("closed")

    def _note(self, what):
        with Path(self.file).open("a") as file:
            file.write(f"{what} {os.getpid()} {id(self)}\n")

    def _look_up(self, info):
        return info["reward"]


class Helped(gym.Env):
    """Forks a helper that it never ends, and raises from its step `at` on. Its spaces are those of CartPole."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, at=None):
        self.at, self.steps = at, 0
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.at is not None and self.steps >= self.at:
            raise RuntimeError("the wheel came off")
        return np.zeros(4, np.float32), 1.0, False, False, {}


def still_open(file):
    """How many recorded environments were made and not closed; each must have been closed only once."""
    notes = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
    made, closed = ([which for what, which in notes if what == kind] for kind in ("made", "closed"))
    assert len(closed) <= len(made)
    return len(made) - len(closed)


gym.register("Helped-v0", entry_point=Helped)
gym.register("Hanging-v0", entry_point=Hanging)
gym.register("Failing-v0", entry_point=Failing)
gym.register("Parted-v0", entry_point=Parted)
gym.register("Recorded-v0", entry_point=Recorded)
