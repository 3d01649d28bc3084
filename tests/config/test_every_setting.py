"""Every setting acts: agents train or evolve otherwise with another value, or the test named shows what it does."""

import re
from dataclasses import dataclass
from functools import cache

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import ROOT, config, interface, learning, play

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
    "run.name": "runs/test_run.py::test_a_run_leaves_what_the_readme_promises",
    "run.directory": "runs/test_faults.py::test_a_resumed_run_may_have_a_name_that_yaml_reads_otherwise",
    "run.resume": "runs/test_run.py::test_resumed_run_ends_as_undisturbed",
    "run.branch_of": "commands/test_branch.py::test_list_lineage_and_reports_say_where_a_branch_began",
    "run.timeout": "distributed/test_ranks.py::test_ranks_that_do_not_find_each_other_are_an_error",
    "run.verbose": "runs/test_header.py::test_on_request_it_says_how_agents_learn_and_in_which_generations",
    "run.threads": "runs/test_threads.py::test_a_run_and_its_evaluation_compute_with_the_threads_of_the_configuration",
    "environment.id": Trains("dqn", "Acrobot-v1"),
    "environment.num_envs": Trains("dqn", "3"),
    "environment.kwargs": Trains("a2c_box", "{g: 3.0}"),
    "environment.vectorization": (
        "envs/test_envs.py::test_all_vectorizations_of_cartpole_agree_on_the_length_of_episodes"
    ),
    "environment.observation_indices": Trains("dqn", "[0, 2]"),
    "environment.life_loss_ends": "envs/test_atari.py::test_scores_are_true_and_lives_do_not_end_a_game",
    "environment.max_restarts": "envs/test_environment_faults.py::test_failing_too_often_ends_the_run_by_name",
    "environment.carry_over": (
        "envs/test_generation.py::test_episodes_begin_anew_only_where_a_generation_is_twice_as_long"
    ),
    "algorithm.name": Trains("dqn", "{name: sac, batch_size: 8, learn_step: 2}"),
    "algorithm.reward_clip": Trains("a2c", "0.5"),
    "algorithm.split_batches": "replay/test_split_batches.py::test_minibatches_of_two_ranks_weigh_and_normalise_as_one",
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
    "algorithm.passes": Trains("impala", "3"),
    "algorithm.minibatches": Trains("appo", "2"),
    "algorithm.entropy_scales": "algorithms/test_asynchronous.py::test_an_actor_has_its_own_share_of_the_entropy",
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
    "algorithm.ladder.base": "replay/test_transitions.py::test_ladders_go_from_end_to_end",
    "algorithm.ladder.exponent": "replay/test_transitions.py::test_ladders_go_from_end_to_end",
    "algorithm.ladder.low": "replay/test_transitions.py::test_ladders_go_from_end_to_end",
    "algorithm.ladder.high": "replay/test_transitions.py::test_ladders_go_from_end_to_end",
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
    "network.name": "networks/test_stacks.py::test_a_users_module_reads_every_vector_flat",
    "network.factory": "networks/test_stacks.py::test_a_users_module_reads_every_vector_flat",
    "network.policy_parts": "algorithms/test_parts.py::test_one_network_reads_different_parts_for_its_heads",
    "network.critic_parts": "algorithms/test_parts.py::test_one_network_reads_different_parts_for_its_heads",
    "network.hidden_sizes": Trains("dqn", "[8]"),
    "network.activation": Trains("dqn", "tanh"),
    "network.layer_norm": Trains("dqn", "true"),
    "network.initialisation": Trains("dqn", "orthogonal"),
    "network.convolutions.channels": Evolves("5", "network.convolutions=[{channels: %s, kernel: 3}]"),
    "network.convolutions.kernel": Evolves("5", "network.convolutions=[{channels: 16, kernel: %s}]"),
    "network.convolutions.stride": Evolves("2", "network.convolutions=[{channels: 16, kernel: 3, stride: %s}]"),
    "network.bf16": Trains("dqn", "true"),
    "network.recurrent": Trains("lstm", "gru"),
    "network.recurrent_size": Trains("lstm", "9"),
    "actors.count": "actors/test_actors.py::test_actors_that_die_or_hang_are_replaced_and_all_end_with_the_learner",
    "actors.queue": "actors/test_actors.py::test_actors_wait_for_the_learner_and_follow_it_into_the_next_generation",
    "actors.fetch_steps": "actors/test_learning_and_actors.py::test_actors_fetch_parameters_after_the_configured_steps",
    "actors.lockstep": "distributed/test_every_algorithm.py::test_replicas_are_bit_identical_and_so_is_a_resumed_run",
    "replay.capacity": Trains("dqn", "20"),
    "replay.learning_starts": Trains("dqn", "30"),
    "replay.n_step": Trains("dqn", "3"),
    "replay.prioritised.exponent": Trains("prioritised", "1"),
    "replay.prioritised.importance_exponent.start": Trains("prioritised", "1"),
    "replay.prioritised.importance_exponent.end": Trains("prioritised", "0"),
    "replay.shared": Trains("dqn", "false"),
    "population.size": Trains("dqn", "3"),
    "population.islands": "runs/test_islands.py::test_agents_draw_no_transition_of_another_island",
    "population.control": "runs/test_islands.py::test_twins_stay_what_they_were_and_islands_keep_to_themselves",
    "population.placement": "distributed/test_ranks.py::test_sharded_ranks_train_their_own_agents_and_evolve_together",
    "population.from": "runs/test_transfer.py::test_population_from_begins_with_the_elite",
    "evaluation.environment.id": "runs/test_fitness.py::test_an_environment_of_evaluation_fits_that_of_training",
    "evaluation.environment.kwargs": (
        "runs/test_fitness.py::test_evaluation_has_an_environment_of_its_own_whose_rewards_are_not_those_of_training"
    ),
    "population.hyperparameters": (
        "runs/test_transfer.py::test_agents_of_another_run_take_the_hyperparameters_that_are_named"
    ),
    "population.from_agents": ("runs/test_transfer.py::test_population_from_repeats_agents_where_there_are_too_few"),
    "evolution.steps": "envs/test_generation.py::test_episodes_begin_anew_only_where_a_generation_is_twice_as_long",
    "evolution.burn_in": "evolution/test_evolution.py::test_selection_begins_when_it_is_due_or_ranks_can_be_trusted",
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
    "evolution.fitness": "runs/test_fitness.py::test_a_run_selects_by_what_is_reported",
    "evaluation.fitness": "runs/test_training_fitness.py::test_a_run_plays_few_evaluation_episodes",
    "evaluation.episodes": "runs/test_run.py::test_only_fresh_episodes_make_an_elite_and_stop_a_run",
    "evaluation.max_steps": "runs/test_run.py::test_lines_count_the_steps_of_evaluations",
    "evaluation.confirmation_episodes": (
        "runs/test_elite.py::test_without_confirmation_the_means_that_chose_the_elite_are_its_score"
    ),
    "training.max_steps": "runs/test_run.py::test_resumed_run_ends_as_undisturbed",
    "training.target_fitness": "runs/test_run.py::test_run_stops_at_the_target_once_fresh_episodes_confirm_it",
    "run.kernel": "networks/test_kernel.py::test_a_run_by_torch_and_one_by_the_kernel_are_told_apart",
    "tracking.backends": "tracking/test_trackers.py::test_a_stopped_run_goes_on_in_the_same_curves",
    "tracking.project": "tracking/test_trackers.py::test_wandb_takes_from_its_own_variables_what_organises_runs",
    "tracking.video": "tracking/test_wandb_charts.py::test_each_new_elite_is_filmed_on_request",
    "tracking.exclude": "export/test_hub.py::test_a_page_is_a_run_that_can_be_loaded",
    "league.matchmaking": "league/test_rating.py::test_opponents_are_drawn_by_these_probabilities",
    "league.learn_from": "envs/test_games.py::test_algorithms_learn_minimax_play_from_both_seats",
    "league.archive": "league/test_league.py::test_the_archive_takes_who_beats_it_by_the_margin_and_keeps_its_first",
    "league.margin": "league/test_league.py::test_the_archive_takes_who_beats_it_by_the_margin_and_keeps_its_first",
    "league.benchmark": "league/test_league.py::test_the_score_of_the_elite_is_against_the_benchmark",
    "league.games": "league/test_league.py::test_all_pairs_play_the_same_seeds_from_both_seats",
    "checkpoint.minutes": "runs/test_interim.py::test_interim_checkpoints_change_no_result",
    "checkpoint.max_replay_mb": "runs/test_faults.py::test_a_replay_above_the_limit_is_not_kept_and_both_ends_say_so",
    "checkpoint.keep": "runs/test_run.py::test_checkpoints_appear_whole_and_old_ones_are_pruned",
}
"""How each setting is shown to act; `FILE::TEST` below `tests/` names a test that shows it."""
NAMED = {how for how in ACTS.values() if isinstance(how, str)}
HYPERPARAMETERS = "algorithms/test_hyperparameters_act.py::test_a_hyperparameter_acts"


def every_setting():
    """The settings of all algorithms' configurations, without the sections that hold them."""
    every = {each.path for name in SETTINGS for each in settings_of(model_of(SETTINGS[name]))}
    return sorted(path for path in every if not any(other.startswith(f"{path}.") for other in every))


def shown(path):
    """How a setting is shown to act; null if nothing shows it."""
    if any(path == f"algorithm.{name}" for settings in SETTINGS.values() for name in settings.hyperparameters):
        return HYPERPARAMETERS
    return ACTS.get(path)


def test_each_setting_is_shown_to_act_and_no_other_one_is():
    settings = every_setting()
    assert [path for path in settings if shown(path) is None] == []
    assert ACTS.keys() <= set(settings)
    assert [path for path in ACTS if shown(path) != ACTS[path]] == [], "their hyperparameters' test shows it already"


@pytest.mark.parametrize("test", sorted({HYPERPARAMETERS, *NAMED}))
def test_what_shows_it_is_there(test):
    file, name = test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


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
