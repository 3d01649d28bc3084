"""Every hyperparameter that evolution may perturb acts in the loss or the loop, also in agents from a file."""

import math
from functools import cache

import pytest
import torch
from helpers.support import config, learning, play
from helpers.worlds import P, members

from evorl.algorithms import ALGORITHMS
from evorl.config.algorithms import SETTINGS
from evorl.replay.rollouts import Minibatches
from evorl.replay.samplers import draws_per_update
from evorl.system.formats import decode_agents, encode_agents
from evorl.types.agents import Mutation

BOX = ("environment.id=Pendulum-v1",)
ROLLOUT = ("algorithm.rollout_steps=8",)
REPLAYED = ("algorithm.batch_size=8", "algorithm.learn_step=2", "replay.learning_starts=16")
EAGER = (*REPLAYED, "algorithm.exploration.random_steps=4")
SMALL = {
    "a2c": ROLLOUT,
    "a3c": ROLLOUT,
    "apex_ddpg": (*BOX, *EAGER, *ROLLOUT, "replay.prioritised={}"),
    "apex_dqn": (*REPLAYED, *ROLLOUT, "replay.prioritised={}"),
    "appo": ROLLOUT,
    "ddpg": (*BOX, *EAGER),
    "dqn": REPLAYED,
    "impala": ROLLOUT,
    "ppo": (*ROLLOUT, "algorithm.batch_size=8", "algorithm.epochs=3"),
    "sac": (*BOX, *EAGER),
    "td3": (*BOX, *EAGER),
}
SAME_AS_A3C = {"a3c_data_parallel": (*ROLLOUT, "algorithm.rollouts=1"), "a3c_shared": ROLLOUT}
"""Algorithms that differ from A3C only in what several processes share."""
CHOICES = tuple(setting for setting in EAGER if setting not in BOX)
SWITCHED_ON = {
    "actor_learning_rate": {"actor_learning_rate": 1e-3}, "max_grad_norm": {"max_grad_norm": 10.0},
    "target_entropy": {"target_entropy": -1.0},
    "target_period": {"target": "periodic", "target_period": 4},
}  # fmt: skip
"""What is null unless it is configured."""
OTHERS = {
    "clip": 1e-3, "epochs": 1.0, "gae_lambda": 0.5, "gamma": 0.5, "max_grad_norm": 1e-3, "target_entropy": -2.0,
}  # fmt: skip
"""Values that differ enough to be noticed within some updates; for all else it is half of what is configured."""
CASES = [(algorithm, name) for algorithm in sorted(SMALL) for name in SETTINGS[algorithm].hyperparameters]


def overrides_for(algorithm, name):
    """The settings with which a hyperparameter can act."""
    small = CHOICES if name == "target_entropy_share" else SMALL[algorithm]
    known, given = SETTINGS[algorithm].model_fields, SWITCHED_ON.get(name, {})
    return (*small, *(f"algorithm.{key}={value}" for key, value in given.items() if key in known))


@cache
def course(algorithm, overrides, other=None):
    """The tensors of an agent after some steps, with another value of the hyperparameter `other` than is configured."""
    settings = config(f"algorithm={{name: {algorithm}}}", "population.size=2", *overrides)

    def changed(agents):
        if other is not None:
            hparams = agents[0].hyperparameters
            hparams[other] = OTHERS.get(other, hparams[other] / 2)
            assert settings.algorithm.validation_error(other, hparams[other]) is None
        # As a resume has them: settings of a file, and not of the configuration.
        return decode_agents(encode_agents(agents), "test")

    learner, experience, environments = learning(settings, changed)
    play(learner, experience, environments, 24)
    environments.close()
    named = [role for roles in learner.to_agents()[0].tensors.values() for role in roles.values()]
    return torch.cat([value.flatten() for role in named for value in role.values()])


def test_every_algorithm_is_tried():
    assert SMALL.keys() | SAME_AS_A3C.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("algorithm", SAME_AS_A3C)
def test_variants_of_a3c_are_the_same_in_one_process(algorithm):
    assert SETTINGS[algorithm].hyperparameters == SETTINGS["a3c"].hyperparameters
    assert course(algorithm, SAME_AS_A3C[algorithm]).equal(course("a3c", SMALL["a3c"]))


@pytest.mark.parametrize("algorithm", SMALL)
def test_nothing_else_differs_between_two_courses(algorithm):
    assert course.__wrapped__(algorithm, SMALL[algorithm]).equal(course(algorithm, SMALL[algorithm]))


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_a_hyperparameter_acts(algorithm, name):
    overrides = overrides_for(algorithm, name)
    assert not course(algorithm, overrides).equal(course(algorithm, overrides, name))


@pytest.mark.parametrize(("recurrent", "sequence"), [("null", 1), ("lstm", 16)])
@pytest.mark.parametrize("size", [1.0, 30.4, 31.5, 51.2, 64.0, 100.0, 381.067, 5000.0])
def test_minibatches_are_shown_in_the_size_that_they_are_cut_to(size, recurrent, sequence):
    settings = config(
        "algorithm={name: ppo, rollout_steps: 64, sequence_length: 16}", f"network.recurrent={recurrent}",
        "environment.num_envs=4",
    )  # fmt: skip
    agent = members(batch_size=(size,) * P, epochs=(1.0,) * P)[0]
    cut = Minibatches.of([agent], 64 * 4, sequence, torch.device("cpu")).in_batch.sum(2) * sequence
    assert cut.sum() == 64 * 4
    assert settings.effective_value("batch_size", size) == round(float(cut.float().mean()))


@pytest.mark.parametrize("size", [8.0, 100.0, 127.4, 128.0])
def test_batches_of_sequences_are_shown_in_the_size_that_is_drawn(size):
    settings = config("algorithm={name: dqn, sequence_length: 16}", "network.recurrent=gru")
    agent = members(batch_size=(size,) * P)[0]
    draws = draws_per_update([agent], transitions=16)[0]
    assert settings.effective_value("batch_size", size) == 16 * draws
    assert config("algorithm={name: dqn}").effective_value("batch_size", 100.4) == 100


def test_whole_numbers_are_shown_as_they_are_used_and_others_as_they_are():
    settings = config(
        "algorithm={target: periodic, target_period: 100, batch_size: 64, learn_step: 4}",
    )
    agent = members(batch_size=(381.067,) * P)[0]
    shown = {
        name: settings.effective_value(name, value)
        for name, value in {
            "batch_size": 381.067, "target_period": 120.4, "learn_step": 4.5, "gamma": 0.987654,
            "nobody_knows_it": 1.5,
        }.items()
    }  # fmt: skip
    assert shown == {
        "batch_size": draws_per_update([agent])[0], "target_period": 120, "learn_step": 4.5,
        "gamma": 0.987654, "nobody_knows_it": 1.5,
    }  # fmt: skip
    assert settings.algorithm.validation_error("target_period", 120.4) is None
    assert math.isnan(settings.effective_value("batch_size", math.nan))


def test_a_mutation_is_shown_with_the_numbers_that_are_used():
    use = config().effective_value
    assert str(Mutation("hyperparameters", "batch_size", 256.0, 381.067).with_effective_values(use)) == (
        "hyperparameters (batch_size: 256 -> 381)"
    )
    assert str(Mutation("hyperparameters", "batch_size", 256.0, 256.4).with_effective_values(use)) == (
        "hyperparameters (batch_size: 256 -> 256.4 (used as 256))"
    )
    for other in (
        Mutation("hyperparameters", "learning_rate", 1e-3, 2.5e-3),
        Mutation("parameters", "batch_size", None, 0.02),
        Mutation("hyperparameters", "batch_size", None, "odd"),
    ):
        assert other.with_effective_values(use) == other
