"""The landing that all systems of benchmarks/experiments/search_cost.py must show: 100 fresh episodes with a mean return of 200."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

ENVIRONMENT, TARGET, EPISODES = "LunarLander-v3", 200.0, 100
FIRST_SEED = 2**30
"""Of the first of these episodes; by chance, training may meet a few of them too."""


def mean_return(act: Callable[[np.ndarray], Any], seed: int) -> float:
    """The mean return of a policy, which maps an observation [8] to an action, over `EPISODES` fresh episodes."""
    returns = []
    with gym.make(ENVIRONMENT) as env:
        for episode in range(EPISODES):
            observation, _ = env.reset(seed=FIRST_SEED + EPISODES * seed + episode)
            total, over = 0.0, False
            while not over:
                observation, reward, terminated, truncated, _ = env.step(int(act(observation)))
                total, over = total + float(reward), terminated or truncated
            returns.append(total)
    return float(np.mean(returns))
