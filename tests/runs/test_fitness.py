"""Fitness by what the environment reports: what selection sees, what files have, and what people are shown."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.support import config, error_line, lines, output_of, train

from evorl.commands.command import run_command
from evorl.config import Environment
from evorl.envs import Environments
from evorl.population.evaluation import evaluate
from evorl.runs.output.metrics import record_of
from evorl.runs.program import run_program
from evorl.types.outcomes import UserError

REPORTING = ("environment.id=helpers.reporting:Reporting-v0", "run.name=a")


class Alternating:
    """A policy of two agents: the first does always 1, the second 1 in its first step only."""

    def initial_state(self, num_envs):
        self.step = 0
        return torch.zeros(2, num_envs, 0, 0)

    def act(self, observation, started, state, deterministic):
        self.step += 1
        assert self.step <= 100, "all episodes have ended long ago, and evaluation goes on"
        action = torch.tensor([[1], [1 if self.step == 1 else 0]]).expand(2, observation["observation"].shape[1])
        return output_of(action.contiguous()), state


def environments(vectorization="sync"):
    return Environments(Environment(id="helpers.reporting:Reporting-v0", vectorization=vectorization), 2, 2)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_results_have_what_the_last_step_reports_and_not_the_reset_after_it(vectorization):
    made = environments(vectorization)
    results = evaluate(Alternating(), made, (1, 2, 3), None, ["others", "done"])
    made.close()
    assert results.returns.tolist() == [[0, 0, 0], [3, 3, 3]]
    assert results.reports["others"].tolist() == [[4, 4, 4], [1, 1, 1]]
    assert results.reports["done"].tolist() == [[1] * 3] * 2
    assert results.steps.tolist() == [[4] * 3] * 2
    assert results.fitness({"return": 2.0, "info.others": -1.0}).tolist() == [[-4] * 3, [5] * 3]


def test_an_episode_that_evaluation_cuts_off_has_what_its_last_step_reports():
    results = evaluate(Alternating(), environments(), (1, 2), 3, ["others"])
    assert results.reports["others"].tolist() == [[3, 3], [1, 1]]
    with pytest.raises(UserError, match="reports no number under 'done'"):
        evaluate(Alternating(), environments(), (1, 2), 3, ["done"])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("other", r"^evolution.fitness: .*Reporting-v0 reports no number under 'other' in .* mean 'others'\?$"),
        ("text", r"^evolution.fitness: helpers.reporting:Reporting-v0 reports no number under 'text' in"),
    ],
)
def test_what_is_not_reported_is_told_with_the_environment_and_the_key(key, said):
    with pytest.raises(UserError, match=said):
        evaluate(Alternating(), environments(), (1,), None, [key])


def test_a_run_selects_by_what_is_reported(in_directory, capsys):
    assert train(*REPORTING, "evolution.fitness=info.others") == 0
    shown = capsys.readouterr()
    assert "a mean info.others of" in shown.out + shown.err
    for row in lines(in_directory / "runs" / "a" / "metrics.jsonl"):
        drawn = record_of(row, config()).agents[0].points
        assert drawn["fitness/info.others"] == drawn["fitness/agents"] == row["fitness"][0]
        assert row["fitness"] == row["terms"]["info.others"]
        assert np.add(row["fitness"], row["terms"]["return"]).tolist() == [4] * 4
        assert row["best_fitness"] == max(row["terms"]["info.others"])
    assert run_program(run_command, ["evaluate", "runs/a", "--episodes", "3", "--allow-code"]) == 0
    assert "; mean info.others " in capsys.readouterr().out


def test_terms_are_weighted_and_resumed(in_directory):
    weighted = (*REPORTING, "evolution.fitness={return: 1, info.others: 3}")
    assert train(*weighted) == 0
    for row in lines(in_directory / "runs" / "a" / "metrics.jsonl"):
        expected = np.array(row["terms"]["return"]) + 3 * np.array(row["terms"]["info.others"])
        assert row["fitness"] == pytest.approx(expected)
    assert train(*weighted, "run.resume=auto", "training.max_steps=160") == 0
    assert lines(in_directory / "runs" / "a" / "metrics.jsonl")[-1]["terms"].keys() == {"return", "info.others"}


@pytest.mark.two_process
def test_two_ranks_put_their_reports_together(tmp_path, forked_launch):
    """Three episodes over two ranks, of which one has an episode fewer."""
    forked_launch.well(tmp_path, *REPORTING, "evaluation.episodes=3", "evolution.fitness=info.others")
    for row in lines(tmp_path / "runs" / "a" / "metrics.jsonl"):
        assert row["fitness"] == row["terms"]["info.others"]
        assert np.add(row["fitness"], row["terms"]["return"]) == pytest.approx([4] * 4)
        assert row["fitness_episodes"] == [3] * 4
        # The elite plays too; each episode has four steps.
        assert row["evaluation_steps"] % 4 == 0
        assert row["evaluation_steps"] >= 4 * 4 * 3


def test_evaluation_has_an_environment_of_its_own_whose_rewards_are_not_those_of_training(in_directory, capsys):
    """CartPole with Sutton and Barto's reward: -1 in the last step, where training has 1 in each step."""
    assert train("run.name=a", "evaluation.environment.kwargs={sutton_barto_reward: true}") == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert all(-1 <= fitness <= 0 for row in rows for fitness in row["fitness"])
    returns = [value for row in rows for value in row["train_return"] if value is not None]
    assert max(returns) > 1
    metrics = (in_directory / "runs" / "a" / "metrics.jsonl").read_text()
    assert "sutton_barto_reward" not in metrics, "its settings may be secret, and metrics are published"
    capsys.readouterr()
    assert run_program(run_command, ["evaluate", "runs/a", "--episodes", "2", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["returns"]) <= {0.0, -1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["evaluation.environment=Acrobot-v1"],
            "evaluation.environment: Acrobot-v1 has other observations than CartPole",
        ),
        (["evaluation.environment.kwargs.nonsense=1"], "evaluation.environment.kwargs: .*nonsense"),
        (
            ["evaluation.environment=CartPole-v0", "evaluation.fitness=training"],
            "evaluation.environment: with evaluation.f",
        ),
    ],
)
def test_an_environment_of_evaluation_fits_that_of_training(settings, message, capsys):
    assert train(*settings) == 2
    assert re.search(message, error_line(capsys))
