"""Copies of an environment are independent, and evaluation does not count one episode many times."""

import json
import random

import numpy as np
import pytest
import torch
from helpers.probes import GLOBAL_DRAWS
from helpers.support import SMALL, config, train

import evorl
from evorl.algorithms import make_algorithm
from evorl.commands.command import run_command
from evorl.config import Environment
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments, make_environments
from evorl.population import Policy
from evorl.population.evaluation import EpisodeResults, Evaluator
from evorl.population.initial import initial_population
from evorl.seeding import seed_process
from evorl.types.outcomes import EvorlWarning

COIN = "helpers.probes:Coin"


def coin(source, log=None):
    """The setting of a Coin."""
    return f"environment={{id: '{COIN}', kwargs: {{source: {source}, log: {log or 'null'}}}}}"


def draws(vectorization, source, seed=5):
    """The draws of six copies' constructors and of their resets."""
    settings = Environment(id=COIN, vectorization=vectorization, kwargs={"source": source, "shows": True})
    with Environments(settings, 2, 3) as environments:
        environments.reset(seed)
        return environments.observation["observation"].reshape(6, 2).T.tolist()


@pytest.mark.parametrize("source", GLOBAL_DRAWS)
def test_copies_that_draw_from_a_global_generator_differ_wherever_they_run(source):
    built, begun = draws("async", source)
    assert len(set(built)) == len(set(begun)) == 6
    assert begun == draws("sync", source)[1], "the draws of a copy follow from its seed"
    assert not {*begun} & {*draws("async", source, seed=105)[1]}


def test_constructors_draw_other_numbers_on_each_rank():
    built = []
    for rank in range(2):
        seed_process(1, rank)
        make_environments(Environment(id=COIN, kwargs={"source": "numpy"}), 1, 1).close()  # As programs do first.
        built += draws("sync", "numpy")[0]
    assert len(set(built)) == 12


def test_actors_that_draw_from_a_global_generator_differ(in_directory):
    log = in_directory / "draws"
    few = ("evolution.steps=64", "training.max_steps=64", "evaluation.fitness=training")
    assert (
        train(
            "algorithm={name: impala, rollout_steps: 4}",
            "actors.count=2",
            "environment.num_envs=4",
            coin("numpy", log=log),
            *few,
        )
        == 0
    )
    begun = log.read_text().split()
    assert len(begun) >= 16
    # Evaluation gives each agent the same episodes.
    assert len(set(begun)) > 0.7 * len(begun)


def test_training_in_a_script_leaves_its_global_generators_alone(in_directory):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    evorl.train(SMALL, run={"name": "a"}, training={"max_steps": 40})
    assert states() == before


def measured(environment, *overrides):
    """The returns [40] of a first agent's measurement, and whether its evaluator has seen that episodes repeat."""
    settings = config(environment, "evaluation.episodes=8", "evaluation.confirmation_episodes=40", *overrides)
    with make_environments(settings.environment, 1, 1) as environments:
        algorithm = make_algorithm(settings, environments.interface)
    agents = initial_population(settings, algorithm)
    policy = Policy(agents, algorithm, torch.Generator())
    with Evaluator(settings, Placement(Ranks(), "replicated", len(agents)), algorithm) as evaluator:
        evaluator.evaluate(policy, 1)
        returns = evaluator.remeasure(agents[:1], 1, "measurement", 0, 40)
        return returns[0], evaluator.repeats


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_copies_that_repeat_each_other_are_replaced_by_one_copy(vectorization):
    """Each copy draws the same sequence, and so the first episodes of all copies are one episode."""
    with pytest.warns(EvorlWarning, match=r"^environment\.id: .*Coin with different seeds were identical"):
        returns, repeats = measured(coin("constructor"), f"environment.vectorization={vectorization}")
    assert repeats
    # A copy draws in its constructor, when it is made ready, and twice for an episode: it ends with a new one.
    assert returns.tolist() == (np.random.default_rng(0).random(82)[2::2] < 0.5).tolist()


def test_copies_that_differ_are_not_replaced():
    returns, repeats = measured(coin("numpy"))
    assert repeats is False
    assert 5 < returns.sum() < 35


@pytest.mark.parametrize(("episodes", "repeat"), [("aabbccddeeffgg", True), ("aabbccddeeff", None), ("aabc", False)])
def test_repeats_are_counted_over_rounds_of_two_copies(episodes, repeat):
    checksums = np.array([[float(ord(episode)) for episode in episodes]])
    assert EpisodeResults(checksums, checksums, checksums, {}).repeat_each_other(2) is repeat


def test_copies_of_a_simulator_that_begin_alike_are_told_although_there_are_few():
    """Eight copies play forty episodes in five rounds, whose seeds differ."""
    simulator = "environment={id: 'tensor:helpers.torch_cartpole:make', kwargs: {alike: true, limit: 20}}"
    with pytest.warns(EvorlWarning, match="with different seeds were identical"):
        _, repeats = measured(simulator, "population.size=8", "evaluation.episodes=1")
    assert repeats


def test_a_target_is_reached_in_a_deterministic_environment_but_its_score_says_so(in_directory, capsys):
    few = ("evaluation.confirmation_episodes=30", "training.max_steps=40", "run.name=a")
    with pytest.warns(EvorlWarning, match="either it is deterministic"):
        assert train(coin("fixed"), "training.target_fitness=-1", *few) == 0
    told = capsys.readouterr().err
    assert "solved: " in told
    assert "0 ± 0 over 30 fresh episodes (seeds make no difference)" in told
    run_command(["evaluate", "runs/a", "--episodes", "10"])
    assert "0 ± 0 over 10 fresh episodes (seeds make no difference)" in capsys.readouterr().out


def test_a_coin_that_each_copy_tosses_alike_is_not_certified(in_directory):
    """Copies would toss heads in all 30 episodes that begin together in about half of the generations."""
    settings = (
        coin("constructor"),
        "training.target_fitness=0.8", "training.max_steps=400", "evaluation.confirmation_episodes=30",
    )  # fmt: skip
    with pytest.warns(EvorlWarning, match="were identical"):
        assert train(*settings, "run.name=a") == 0
    summary = json.loads((in_directory / "runs" / "a" / "summary.json").read_text())
    assert not summary["solved"]
    assert summary["episodes_repeat"]
    assert summary["elite_std"] > 0.3
