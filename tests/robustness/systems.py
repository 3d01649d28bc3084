"""Small systems of every algorithm and kind of observation and action, which train for some seconds."""

from __future__ import annotations

PLACEMENTS = {
    "one process": (1, ()),
    "replicated": (2, ()),
    "sharded": (2, ("population.placement=sharded",)),
}
"""How many ranks there are, and how that is asked for."""
COMMON = (
    "population.size=4", "evaluation={episodes: 2, max_steps: 20, confirmation_episodes: 3}", "tracking.backends=[]",
    "run={timeout: 120, threads: 1}", "network={hidden_sizes: [16, 16]}",
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 0.5,"
    " new_layer: 0.5}",
    "evolution.architecture={min_units: 4, max_units: 64, max_layers: 4}",
    "evolution.steps=48", "training.max_steps=192",
)  # fmt: skip
DQN = (
    "algorithm={name: dqn, batch_size: 8, learn_step: 3}", "replay={capacity: 400, learning_starts: 20}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, batch_size: {min: 4, max: 16},"
    " learn_step: {min: 2, max: 6, grow: 1.5, shrink: 0.75}}",
)  # fmt: skip
TD3 = (
    "algorithm={name: td3, batch_size: 8, learn_step: 3, exploration: {random_steps: 20}}",
    "replay={capacity: 400, learning_starts: 20}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, target_noise: {min: 0.1, max: 0.4},"
    " learn_step: {min: 2, max: 6, grow: 1.5, shrink: 0.75}}",
)  # fmt: skip
DDPG = (
    "algorithm={name: ddpg, batch_size: 8, learn_step: 3, exploration: {random_steps: 20}}",
    "replay={capacity: 400, learning_starts: 20, n_step: 3, prioritised: {}}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, tau: {min: 1e-3, max: 1e-1}}",
)  # fmt: skip
SAC = (
    "algorithm={name: sac, batch_size: 8, learn_step: 3, exploration: {random_steps: 20}}",
    "replay={capacity: 400, learning_starts: 20}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}}",
)
PPO = (
    "algorithm={name: ppo, rollout_steps: 16, sequence_length: 8, batch_size: 16, epochs: 2,"
    " normalize_observations: true, normalize_rewards: true}",
    "evolution.hyperparameters={clip: {min: 0.1, max: 0.4}, epochs: {min: 1, max: 3}}", "training.max_steps=256",
)  # fmt: skip
IMAGES = "network.convolutions=[{channels: 4, kernel: 4, stride: 2}, {channels: 4, kernel: 3}]"

LEAGUE = ("evolution.fitness=rating", "league={games: 4, archive: 3, margin: 0}")


def world(name: str, more: str = "", carry_over: str = "false") -> str:
    """Return the setting for an environment that begins afresh in each generation, unless episodes carry over."""
    return f"environment={{id: '{name}', num_envs: 2, carry_over: {carry_over}{more}}}"


CASES = {
    "dqn": (*COMMON, *DQN, world("CartPole-v1")),
    "dqn-split-batches": (
        *COMMON, *DQN, world("LunarLander-v3"), "algorithm.split_batches=true", "algorithm.dueling=true",
    ),
    "dqn-prioritised": (
        *COMMON, *DQN, world("CartPole-v1", ", vectorization: sync"),
        "replay={capacity: 400, learning_starts: 20, n_step: 3, prioritised: {exponent: 0.6}}",
    ),
    "dqn-recurrent-running": (
        *COMMON, *DQN, world("CartPole-v1", ", vectorization: sync, observation_indices: [0, 2]", "true"),
        "network={hidden_sizes: [16], recurrent: gru, recurrent_size: 12}", "replay.prioritised={exponent: 0.6}",
        "algorithm.sequence_length=4", "algorithm.burn_in=3",
    ),
    "dqn-images": (*COMMON, *DQN, world("helpers.spaces:Shown-v0", ", kwargs: {kind: image}"), IMAGES),
    "a2c": (*COMMON, "algorithm={name: a2c, rollout_steps: 8, annealing: true}", world("CartPole-v1")),
    "ppo": (*COMMON, *PPO, world("CartPole-v1", ", vectorization: sync")),
    "ppo-recurrent": (
        *COMMON, *PPO, world("CartPole-v1", ", vectorization: sync, observation_indices: [0, 2]"),
        "network={hidden_sizes: [16], recurrent: gru, recurrent_size: 12}",
    ),
    "ppo-continuous": (*COMMON, *PPO, world("Pendulum-v1")),
    "ddpg": (*COMMON, *DDPG, world("Pendulum-v1")),
    "sac": (*COMMON, *SAC, world("Pendulum-v1"), "replay.prioritised={}"),
    "sac-discrete": (
        *COMMON, *SAC, world("CartPole-v1"), "replay.n_step=3",
        "evolution.hyperparameters.target_entropy_share={min: 0.3, max: 0.99}",
    ),
    "td3": (*COMMON, *TD3, world("Pendulum-v1")),
    "dqn-running": (*COMMON, *DQN, world("CartPole-v1", carry_over="true")),
    "dqn-lander-running": (*COMMON, *DQN, world("LunarLander-v3", carry_over="true"), "replay.n_step=3"),
    "ppo-running": (*COMMON, *PPO, world("CartPole-v1", carry_over="true")),
    "ppo-recurrent-running": (
        *COMMON, *PPO, world("CartPole-v1", ", vectorization: sync, observation_indices: [0, 2]", "true"),
        "network={hidden_sizes: [16], recurrent: gru, recurrent_size: 12}",
    ),
    "ppo-async-running": (*COMMON, *PPO, world("CartPole-v1", ", vectorization: async", "true")),
    "sac-running": (
        *COMMON, *SAC, world("LunarLander-v3", ", kwargs: {continuous: true}", "true"), "replay.prioritised={}",
    ),
    "td3-running": (
        *COMMON, *TD3, world("Pendulum-v1", carry_over="true"),
        "algorithm.exploration={noise: ornstein_uhlenbeck, random_steps: 20}",
    ),
    "sac-state-dependent": (
        *COMMON, *SAC, world("Pendulum-v1", carry_over="true"), "algorithm.state_dependent_noise.every=7",
    ),
    "ppo-league": (
        *COMMON, *PPO, *LEAGUE, world("helpers.games:ThreeMoves"),
        "network={hidden_sizes: [16], recurrent: gru, recurrent_size: 12}",
    ),
    "dqn-league": (*COMMON, *DQN, *LEAGUE, world("helpers.games:RockPaperScissors"), "league.matchmaking=uniform"),
    "ppo-dict": (*COMMON, *PPO, world("helpers.spaces:Shown-v0", ", kwargs: {kind: dict}"), IMAGES),
}  # fmt: skip
