"""Every setting acts: agents train or evolve otherwise with another value, or a test elsewhere shows what it does."""

from dataclasses import dataclass
from functools import cache

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import config, interface, learning, play

from evorl.algorithms import make_algorithm
from evorl.config import model_of
from evorl.config.algorithms import SETTINGS
from evorl.config.docs import settings_of
from evorl.evolution.mutation import Context
from evorl.evolution.selection import evolve
from evorl.population import initial_population
from evorl.system.formats import encode_agents

REPLAYED = "batch_size: 8, learn_step: 2"
BOX = ("environment.id=Pendulum-v1", "replay.learning_starts=16")
BASES = {
    "dqn": ("replay.learning_starts=16",),
    "prioritised": ("replay.learning_starts=16", "replay.prioritised={}"),
    "categorical": ("replay.learning_starts=16", "algorithm.distribution=categorical"),
    "quantile": ("replay.learning_starts=16", "algorithm.distribution=quantile"),
    "noisy": ("replay.learning_starts=16", "algorithm.noisy={}"),
    "linear": ("replay.learning_starts=16", "algorithm.exploration={schedule: linear, steps: 40}"),
    "ddpg": (*BOX, f"algorithm={{name: ddpg, {REPLAYED}, exploration: {{random_steps: 4}}}}"),
    "td3": (*BOX, f"algorithm={{name: td3, {REPLAYED}, exploration: {{random_steps: 4}}}}"),
    "sac": (*BOX, f"algorithm={{name: sac, {REPLAYED}, exploration: {{random_steps: 4}}}}"),
    "state_dependent": (
        *BOX,
        f"algorithm={{name: sac, {REPLAYED}, exploration: {{random_steps: 4}}, state_dependent_noise: {{}}}}",
    ),
    "a2c": ("algorithm={name: a2c, rollout_steps: 8}",),
    "a2c_box": ("algorithm={name: a2c, rollout_steps: 8}", "environment.id=Pendulum-v1"),
    "gru": (f"algorithm={{name: dqn, {REPLAYED}, sequence_length: 4, burn_in: 4}}", "network.recurrent=gru"),
    "lstm": ("algorithm={name: a2c, rollout_steps: 8, sequence_length: 8}", "network.recurrent=lstm"),
    "ppo": ("algorithm={name: ppo, rollout_steps: 8, batch_size: 8}",),
    "impala": ("algorithm={name: impala, rollout_steps: 4}",),
    "appo": ("algorithm={name: appo, rollout_steps: 4}",),
    "a3c": ("algorithm={name: a3c, rollout_steps: 4}",),
}
"""Small configurations to train with, by what they are about."""
IMAGES = gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)
EVOLVED = (
    "algorithm={name: a2c}", "population.size=4", "network={hidden_sizes: [16, 24], recurrent: gru, recurrent_size: 16,"
    " convolutions: [{channels: 16, kernel: 3}]}",
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 1}",
    "evolution.hyperparameters={learning_rate: {min: 1e-5, max: 1e-1, scale: log, resample: 0.5}}",
)  # fmt: skip
"""A population whose networks have everything that mutations change."""


@dataclass(frozen=True)
class Trains:
    """Agents of a configuration train to other numbers with this value of the setting."""

    base: str
    value: str
    more: str = ""
    """What this value needs beside it."""


@dataclass(frozen=True)
class Evolves:
    """A population evolves to other agents with this value of the setting."""

    value: str
    before: str = ""
    """An override of both populations."""


LIMITS = "evolution.initial=sampled"
ACTS = {
    "seed": Trains("dqn", "2"),
    "environment.id": Trains("dqn", "Acrobot-v1"),
    "environment.num_envs": Trains("dqn", "3"),
    "environment.kwargs": Trains("a2c_box", "{g: 3.0}"),
    "environment.observation_indices": Trains("dqn", "[0, 2]"),
    "algorithm.name": Trains("dqn", "{name: sac, batch_size: 8, learn_step: 2}"),
    "algorithm.reward_clip": Trains("a2c", "0.5"),
    "algorithm.adam_epsilon": Trains("dqn", "0.1"),
    "algorithm.rollout_steps": Trains("a2c", "4"),
    "algorithm.sequence_length": Trains("lstm", "2"),
    "algorithm.burn_in": Trains("gru", "0"),
    "algorithm.annealing": Trains("a2c", "true"),
    "algorithm.normalize_advantage": Trains("ppo", "false"),
    "algorithm.distribution": Trains("dqn", "quantile"),
    "algorithm.initial_log_std": Trains("a2c_box", "-1.0"),
    "algorithm.critic": Trains("a2c", "shared"),
    "algorithm.normalize_observations": Trains("a2c", "true"),
    "algorithm.normalize_rewards": Trains("a2c", "true"),
    "algorithm.rollouts": Trains("impala", "2"),
    "algorithm.passes": Trains("appo", "3"),
    "algorithm.minibatches": Trains("appo", "2"),
    "algorithm.grad_sync_steps": Trains("a3c", "2"),
    "algorithm.exploration.random_steps": Trains("ddpg", "9"),
    "algorithm.exploration.noise": Trains("ddpg", "gaussian"),
    "algorithm.exploration.scale": Trains("ddpg", "0.5"),
    "algorithm.exploration.reversion": Trains("ddpg", "0.9"),
    "algorithm.state_dependent_noise.every": Trains("state_dependent", "3"),
    "algorithm.state_dependent_noise.initial_log_scale": Trains("state_dependent", "-1.0"),
    "algorithm.exploration.schedule": Trains("dqn", "linear", "algorithm.exploration.steps=40"),
    "algorithm.exploration.start": Trains("dqn", "0.5"),
    "algorithm.exploration.end": Trains("linear", "0.9"),
    "algorithm.exploration.decay": Trains("dqn", "0.1"),
    "algorithm.exploration.steps": Trains("linear", "4"),
    "algorithm.loss": Trains("dqn", "huber"),
    "algorithm.categorical.atoms": Trains("categorical", "11"),
    "algorithm.categorical.v_min": Trains("categorical", "-3"),
    "algorithm.categorical.v_max": Trains("categorical", "3"),
    "algorithm.quantile.quantiles": Trains("quantile", "5"),
    "algorithm.quantile.kappa": Trains("quantile", "0.1"),
    "algorithm.double": Trains("dqn", "false"),
    "algorithm.dueling": Trains("dqn", "true"),
    "algorithm.target": Trains("dqn", "periodic", "algorithm.target_period=4"),
    "algorithm.noisy.sigma": Trains("noisy", "2.0"),
    "algorithm.initial_temperature": Trains("sac", "0.1"),
    "algorithm.policy_delay": Trains("td3", "1"),
    "network.hidden_sizes": Trains("dqn", "[8]"),
    "network.activation": Trains("dqn", "tanh"),
    "network.layer_norm": Trains("dqn", "true"),
    "network.initialisation": Trains("dqn", "orthogonal"),
    "network.convolutions.NUMBER.channels": Evolves("5", "network.convolutions=[{channels: %s, kernel: 3}]"),
    "network.convolutions.NUMBER.kernel": Evolves("5", "network.convolutions=[{channels: 16, kernel: %s}]"),
    "network.convolutions.NUMBER.stride": Evolves("2", "network.convolutions=[{channels: 16, kernel: 3, stride: %s}]"),
    "network.bf16": Trains("dqn", "true"),
    "network.recurrent": Trains("lstm", "gru"),
    "network.recurrent_size": Trains("lstm", "9"),
    "replay.capacity": Trains("dqn", "20"),
    "replay.learning_starts": Trains("dqn", "30"),
    "replay.n_step": Trains("dqn", "3"),
    "replay.prioritised.exponent": Trains("prioritised", "1"),
    "replay.prioritised.importance_exponent.start": Trains("prioritised", "1"),
    "replay.prioritised.importance_exponent.end": Trains("prioritised", "0"),
    "replay.shared": Trains("dqn", "false"),
    "population.size": Trains("dqn", "3"),
    "evolution.initial": Evolves("sampled"),
    "evolution.selection.name": Evolves("none"),
    "evolution.selection.size": Evolves("4"),
    "evolution.selection.replace": Evolves("0.25"),
    "evolution.mutation.none": Evolves("9"),
    "evolution.mutation.architecture": Evolves("0"),
    "evolution.mutation.parameters": Evolves("9"),
    "evolution.mutation.activation": Evolves("9"),
    "evolution.mutation.hyperparameters": Evolves("9"),
    "evolution.mutation.new_layer": Evolves("1"),
    "evolution.mutation.strength": Evolves("1"),
    "evolution.hyperparameters.NAME.min": Evolves("5e-5", LIMITS),
    "evolution.hyperparameters.NAME.max": Evolves("2e-2", LIMITS),
    "evolution.hyperparameters.NAME.scale": Evolves("linear"),
    "evolution.hyperparameters.NAME.grow": Evolves("3"),
    "evolution.hyperparameters.NAME.shrink": Evolves("0.75", "evolution.mutation.hyperparameters=9"),
    "evolution.hyperparameters.NAME.resample": Evolves("0"),
    "evolution.architecture.max_layers": Evolves("2", "evolution.mutation.new_layer=1"),
    "evolution.architecture.min_units": Evolves("20", LIMITS),
    "evolution.architecture.max_units": Evolves("40", LIMITS),
}
"""How each setting is shown to act here."""
ELSEWHERE = {
    "run.name", "run.directory", "run.resume", "run.branch_of", "run.timeout", "run.threads",
    "environment.vectorization", "environment.life_loss_ends", "environment.carry_over",
    "algorithm.split_batches", "algorithm.entropy_scales", "algorithm.ladder.base", "algorithm.ladder.exponent",
    "network.name", "network.factory", "network.policy_parts",
    "network.critic_parts", "actors.count", "actors.queue", "actors.fetch_steps", "actors.lockstep",
    "population.islands", "population.control", "population.placement", "population.from", "evaluation.environment.id",
    "evaluation.environment.kwargs", "population.hyperparameters", "evolution.steps",
    "evolution.burn_in", "evolution.fitness", "evaluation.fitness", "evaluation.episodes", "evaluation.max_steps",
    "evaluation.confirmation_episodes", "training.max_steps", "training.target_fitness", "run.kernel",
    "tracking.backends", "tracking.project", "tracking.video", "tracking.exclude", "league.matchmaking",
    "league.learn_from", "league.archive", "league.margin", "league.benchmark", "league.games", "checkpoint.minutes",
    "checkpoint.max_replay_mb", "checkpoint.keep",
}  # fmt: skip
"""Settings that tests of their own show to act, beside the hyperparameters of `test_hyperparameters_act.py`."""


def every_setting():
    """The settings of all algorithms' configurations, without the sections that hold them."""
    every = {each.path for name in SETTINGS for each in settings_of(model_of(SETTINGS[name]))}
    return sorted(path for path in every if not any(other.startswith(f"{path}.") for other in every))


def test_each_setting_is_shown_to_act_once_and_no_other_one_is():
    hyperparameters = {f"algorithm.{name}" for settings in SETTINGS.values() for name in settings.hyperparameters}
    assert sorted([*ACTS, *ELSEWHERE, *hyperparameters]) == every_setting()


def test_nothing_else_differs():
    assert trained.__wrapped__(*BASES["dqn"]) == trained(*BASES["dqn"])
    assert evolved.__wrapped__() == evolved()


@cache
def trained(*overrides):
    """The agents after some steps of training."""
    learner, experience, environments = learning(config("population.size=2", *overrides))
    play(learner, experience, environments, 24)
    environments.close()
    return encode_agents(learner.to_agents())


@cache
def evolved(*overrides):
    """A population that was not trained, after some generations in which the later agents are the better ones."""
    settings = config(*EVOLVED, "evolution.selection.replace=1", *overrides)
    algorithm = make_algorithm(settings, interface(observations=IMAGES))
    agents, rng = initial_population(settings, algorithm), np.random.default_rng(0)
    for generation in range(1, 6):
        for place, agent in enumerate(agents):
            agent.fitness = float(place)
        context = Context(settings.evolution, algorithm.networks)
        agents = evolve(agents, context, 4 * generation, rng, generation=generation)
    return encode_agents(agents)


@pytest.mark.parametrize("path", [path for path, how in ACTS.items() if isinstance(how, Trains)])
def test_a_setting_acts_in_training(path):
    how = ACTS[path]
    key = "algorithm" if path == "algorithm.name" else path
    other = trained(*BASES[how.base], *([how.more] if how.more else []), f"{key}={how.value}")
    assert trained(*BASES[how.base]) != other


@pytest.mark.parametrize("path", [path for path, how in ACTS.items() if isinstance(how, Evolves)])
def test_a_setting_acts_in_evolution(path):
    how = ACTS[path]
    if "%" in how.before:
        assert evolved() != evolved(how.before % how.value)
        return
    before = [how.before] if how.before else []
    assert evolved(*before) != evolved(*before, f"{path.replace('NAME', 'learning_rate')}={how.value}")
