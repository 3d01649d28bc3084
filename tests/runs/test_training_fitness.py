"""Fitness from training's own episodes: the shift, who is evaluated all the same, the duel, and whole runs."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.support import agent, config, lines, train
from robustness.comparison import differences

from evorl.population.evaluation import EpisodeResults
from evorl.runs.agents.elite import Elite
from evorl.runs.agents.fitness import SHIFT_EPISODES, Fitness, generation_fitness
from evorl.runs.output.metrics import record_of
from evorl.system.formats import encode_agents

TRAINING = "evaluation.fitness=training"
REPORTING = ("environment.id=helpers.reporting:Reporting-v0", "run.name=a", TRAINING)
PPO = ("algorithm={name: ppo, rollout_steps: 20, batch_size: 8}",)
RESUMED = {
    "dqn": (),
    "ppo": ("algorithm={name: ppo, rollout_steps: 11, batch_size: 11}",),
}


def test_the_shift_is_the_mean_difference_of_the_population():
    """(15 - 10 + 24 - 20) / 2 = 4.5; an agent without a training return neither shifts nor is shifted."""
    returns, episodes = np.array([10.0, 20.0, np.nan]), np.array([3.0, 7.0, 0.0])
    deterministic = np.array([[14.0, 16.0], [22.0, 26.0], [900.0, 900.0]])
    fitness = Fitness.of_training(returns, episodes, deterministic)
    np.testing.assert_array_equal(fitness.mean, [14.5, 24.5, np.nan])
    assert fitness.episodes is episodes
    assert np.isnan(fitness.std).all()
    assert fitness.evaluated is None
    assert np.nanmin(fitness.seen) == 10


class Evaluating:
    """An evaluator in which agent i has the return 100 + i in each episode."""

    def __init__(self, explores_by_noise=False):
        self.algorithm = SimpleNamespace(explores_by_noise=explores_by_noise)
        self.asked = []

    def evaluate(self, policy, generation, episodes=None):
        self.asked.append(episodes)
        returns = np.repeat(100.0 + np.arange(3.0)[:, None], episodes or 10, axis=1)
        return EpisodeResults(returns, returns, returns, {})


def fitness_of(evaluator, *episodes, faults=(None,) * 3, settings=(TRAINING,)):
    trained = [SimpleNamespace(fault=fault) for fault in faults]
    returns = np.array([30.0, 10.0, 20.0])
    fitness = generation_fitness(config(*settings), None, trained, evaluator, 1, returns, np.array(episodes, float))
    return fitness.mean.tolist()


def test_training_episodes_save_evaluation_where_every_agent_has_enough():
    """small.yaml plays two evaluation episodes."""
    evaluator = Evaluating()
    assert fitness_of(evaluator, 2, 5, 9) == [30, 10, 20]
    assert evaluator.asked == []
    assert fitness_of(evaluator, 1, 5, 9) == [100, 101, 102]
    assert fitness_of(evaluator, 0, 0, 0) == [100, 101, 102]
    assert fitness_of(evaluator, 9, 9, 9, settings=()) == [100, 101, 102]
    assert evaluator.asked == [None] * 3


def test_a_few_episodes_without_noise_shift_the_means_of_those_who_explore_by_noise():
    """The population's mean is 20 with noise, and 101 without."""
    evaluator = Evaluating(explores_by_noise=True)
    assert fitness_of(evaluator, 9, 9, 9) == [111, 91, 101]
    assert evaluator.asked == [SHIFT_EPISODES]


class Duels:
    """An evaluator in which each agent always has the return of its id, in `means`."""

    repeats = False

    def __init__(self, **means):
        self.means, self.asked = {int(name[1:]): value for name, value in means.items()}, []

    def remeasure(self, agents, generation, purpose, first, episodes):
        self.asked.append((purpose, [each.id for each in agents]))
        return np.array([[self.means[each.id]] * episodes for each in agents])


def duel(evaluator, *returns, target=None, elite=9):
    """Agents 0, 1, ... with these training returns challenge agent 9."""
    settings = config(TRAINING, f"training.target_fitness={'null' if target is None else target}")
    agents = [agent(id=id) for id in range(len(returns))]
    champion = Elite((5.0,), generation=1, worst=0.0) if elite else Elite()
    champion.payload = encode_agents([agent(id=elite)]) if elite else b""
    fitness = Fitness.of_training(np.array(returns), np.full(len(returns), 20.0))
    solved = champion.compete(settings, agents, fitness, evaluator, 2)
    return champion, agents, solved


def test_a_lucky_training_return_does_not_make_an_elite():
    evaluator = Duels(a0=200.0, a1=40.0, a9=60.0)
    champion, agents, _ = duel(evaluator, 70.0, 90.0)
    assert [each.fitness for each in agents] == [70, 90]
    assert evaluator.asked[0] == ("generation", [1, 9])
    assert champion.generation == 1
    assert {purpose for purpose, _ in evaluator.asked} == {"generation", "measurement"}


def test_a_challenger_that_wins_on_fresh_episodes_is_scored_on_others():
    evaluator = Duels(a0=0.0, a1=80.0, a9=60.0)
    champion, _, _ = duel(evaluator, 1.0, 2.0)
    assert champion.generation == 2
    assert evaluator.asked[:2] == [("generation", [1, 9]), ("confirmation", [1, 9])]
    assert {purpose for purpose, _ in evaluator.asked[2:]} == {"measurement"}
    assert champion.score.mean == 80


@pytest.mark.parametrize(("mean", "tests"), [(79.0, 0), (81.0, 1)])
@pytest.mark.parametrize("elite", [9, None])
def test_the_target_is_tested_by_what_was_played_without_exploration(mean, tests, elite):
    champion, _, _ = duel(Duels(a0=mean, a9=60.0), 500.0, target=80, elite=elite)
    assert champion.tests == tests


@pytest.mark.parametrize("algorithm", [(), PPO], ids=["dqn", "ppo"])
def test_a_run_plays_few_evaluation_episodes(algorithm, in_directory):
    """Each episode has four steps; `evaluation` would play six episodes with each of four agents."""
    few = ("evaluation.episodes=6", "evaluation.confirmation_episodes=6")
    assert train(*REPORTING, *algorithm, *few) == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert len(rows) >= 3
    for row in rows:
        shifts = np.subtract(row["fitness"], row["train_return"])
        np.testing.assert_allclose(shifts, shifts[0], atol=1e-12)
        assert row["fitness_std"] == [None] * 4
        assert row["fitness_episodes"] == row["train_episodes"]
        assert "terms" not in row
        drawn = record_of(row, config()).agents[0].points
        assert drawn["fitness/agents"] == row["fitness"][0]
        if algorithm:
            assert row["fitness"] == row["train_return"]
    shift = 0 if algorithm else 4 * SHIFT_EPISODES
    assert rows[0]["evaluation_steps"] == 4 * (shift + 6 + 6)


@pytest.mark.parametrize(
    ("name", "carries_over"),
    [("dqn", "true"), ("ppo", "false")],
)
def test_a_resumed_run_has_the_same_fitness(name, carries_over, in_directory):
    """A generation has 22 steps of each environment, so an episode of four steps runs on where it may."""
    world = (*REPORTING[::2], f"environment.carry_over={carries_over}", "evolution.steps=44")
    settings = (*world, *RESUMED[name], "training.max_steps=220")
    assert train("run.name=whole", *settings) == 0
    assert train("run.name=stopped", *settings, "training.max_steps=88") == 0
    assert train("run.name=stopped", *settings, "run.resume=auto") == 0
    runs = in_directory / "runs"
    assert [row["fitness_std"] for row in lines(runs / "whole" / "metrics.jsonl")] == [[None] * 4] * 5
    assert differences(runs / "stopped", runs / "whole") == []


@pytest.mark.two_process
def test_two_ranks_count_their_episodes_together(tmp_path, forked_launch):
    """Every rank selects the same agents, or the run ends with an error."""
    settings = ("population.placement=sharded", "evaluation.episodes=6", "evaluation.confirmation_episodes=6")
    forked_launch.well(tmp_path, *REPORTING, *settings)
    for row in lines(tmp_path / "runs" / "a" / "metrics.jsonl"):
        shifts = np.subtract(row["fitness"], row["train_return"])
        np.testing.assert_allclose(shifts, shifts[0], atol=1e-12)
        assert row["fitness_episodes"] == row["train_episodes"]
        assert row["evaluation_steps"] % 4 == 0
