"""What evorl uses of EnvPool, made of Gymnasium's environments, for tests where the package is not installed."""

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv

KNOWN = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "Shown-v0")


def list_all_envs():
    return [*KNOWN, "Blackjack-v1"]


class Pool(SyncVectorEnv):
    """Copies that are seeded as they are made, and no more."""

    def __init__(self, name, seeds, limit, kwargs):
        assert all(0 <= seed < 2**31 for seed in seeds), "Seed should be in range of int32"
        makers = [lambda: gym.make(name, max_episode_steps=limit, **kwargs)] * len(seeds)
        super().__init__(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._seeds = list(seeds)

    def reset(self, *, seed=None, options=None):
        assert seed is None, "seeds are fixed when the environment is created"
        seeds, self._seeds = self._seeds, None
        return super().reset(seed=seeds)


def make(name, *, env_type, num_envs, num_threads, max_episode_steps=None, seed=42, **kwargs):
    assert env_type == "gymnasium"
    assert num_threads >= 1
    if name == "Blackjack-v1":
        name = "CartPole-v1"  # Spaces that are not Gymnasium's.
    seeds = [seed + copy for copy in range(num_envs)] if isinstance(seed, int) else seed
    return Pool(name, seeds, max_episode_steps, kwargs)
