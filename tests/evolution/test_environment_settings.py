"""Settings of environments that evolution perturbs: each agent trains with its own, and all are evaluated alike."""

import numpy as np
import pytest
import torch
from helpers.support import config, lines, train

from evorl.commands.command import run_command
from evorl.config import Environment
from evorl.envs import Environments
from evorl.population import check_environment_hyperparameters
from evorl.runs.launch import check
from evorl.runs.program import run_program
from evorl.types.agents import Agent
from evorl.types.outcomes import UserError

BONUS = "environment.kwargs.bonus"
REPORTING = ("environment.id=helpers.reporting:Reporting-v0", "environment.kwargs={bonus: 1}")
RANGE = "evolution.hyperparameters={environment.kwargs.bonus: {min: 1, max: 100, grow: 2}}"
ONLY_THOSE = "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 1}"
SAMPLED = (*REPORTING, RANGE, ONLY_THOSE, "evolution.initial=sampled", "run.name=a")
MEASURED = ("seconds", "wall_clock_seconds", "env_steps_per_second", "updates_per_second")


def agents_with(*bonuses):
    return [Agent(id, {}, {"gamma": 0.9, BONUS: bonus}, {}) for id, bonus in enumerate(bonuses)]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_each_agent_trains_in_environments_of_its_own(vectorization):
    settings = Environment(id=REPORTING[0].split("=")[1], kwargs={"bonus": 1.0}, vectorization=vectorization)
    made = Environments(settings, 2, 2)
    rewards = []
    for bonuses in ((1.0, 3.0), (1.0, 3.0), (5.0, 2.0)):
        made.begin(7, agents_with(*bonuses), carry_over=True)
        rewards.append(made.step(torch.zeros(2, 2, dtype=torch.int64)).reward.tolist())
        started = made.started
    assert rewards == [[[1, 1], [3, 3]], [[1, 1], [3, 3]], [[5, 5], [2, 2]]]
    assert not started.any(), "an episode goes on after its first step"
    made.close()


def test_episodes_carry_over_where_nothing_changed_and_begin_anew_where_something_did():
    made = Environments(Environment(id=REPORTING[0].split("=")[1], kwargs={"bonus": 1.0}), 1, 1)
    ends = []
    for bonus in (1.0, 1.0, 2.0):
        made.begin(7, agents_with(bonus), carry_over=True)
        for _ in range(2):
            transition = made.step(torch.zeros(1, 1, dtype=torch.int64))
        ends.append(bool(transition.terminated))
    assert ends == [False, True, False]


def test_episodes_go_on_in_another_process_in_environments_of_their_own():
    settings = Environment(id=REPORTING[0].split("=")[1], kwargs={"bonus": 1.0})
    ours, theirs = Environments(settings, 2, 1), Environments(settings, 2, 1)
    ours.begin(7, agents_with(1.0, 3.0), carry_over=True)
    ours.step(torch.zeros(2, 1, dtype=torch.int64))
    assert theirs.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()}, seed=9) == ""
    for made in (ours, theirs):
        made.begin(8, agents_with(1.0, 3.0), carry_over=True)
        assert not made.started.any(), "nothing changed, so that the episodes go on"
        assert made.step(torch.zeros(2, 1, dtype=torch.int64)).reward.tolist() == [[1.0], [3.0]]


def test_training_varies_and_evaluation_does_not(in_directory, capsys):
    assert train(*SAMPLED) == 0
    run = in_directory / "runs" / "a"
    for row in lines(run / "metrics.jsonl"):
        assert max(row["fitness"]) <= 4
    lineage = lines(run / "lineage.jsonl")
    assert len({line["hyperparameters"][BONUS] for line in lineage if line["generation"] == 1}) == 4
    moves = [line["mutation"] for line in lineage if line["mutation"]["kind"] == "hyperparameters"]
    assert moves
    assert {move["target"] for move in moves} == {BONUS}
    returns = np.array([row["train_return"] for row in lines(run / "metrics.jsonl")], dtype=float)
    assert np.nanmax(returns) > 4
    capsys.readouterr()
    assert run_program(run_command, ["lineage", "runs/a", "--settings"]) == 0
    assert capsys.readouterr().out


def test_resuming_is_exact(in_directory):
    def told():
        rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]

    assert train(*SAMPLED) == 0
    whole = told()
    assert train(*SAMPLED[:-1], "run.name=b", "training.max_steps=80") == 0
    assert train(*SAMPLED[:-1], "run.name=b", "run.resume=auto") == 0
    (in_directory / "runs" / "a").rename(in_directory / "runs" / "c")
    (in_directory / "runs" / "b").rename(in_directory / "runs" / "a")
    assert told() == whole


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((RANGE,), f"evolution.hyperparameters.{BONUS}: {BONUS} is None; give it as a number"),
        ((RANGE, "environment.kwargs={bonus: true}"), "is True; give it as a number"),
        (
            (RANGE, "environment.kwargs={bonus: 1}", "environment.vectorization=native"),
            "environment.vectorization: native",
        ),
        (
            ("environment.kwargs={bonus: 1}", f"evolution.hyperparameters={{{BONUS}: {{min: 2, max: 1}}}}"),
            f"evolution.hyperparameters.{BONUS}: min 2 must be below max 1",
        ),
        (
            (
                "environment.kwargs={bonus: 1}",
                f"evolution.hyperparameters={{{BONUS}: {{min: -1, max: 1, scale: linear}}}}",
            ),
            f"evolution.hyperparameters.{BONUS}.min: environment.kwargs: 'helpers.reporting:Reporting-v0' "
            "does not accept these arguments: bonus must not be negative",
        ),
    ],
)
def test_what_cannot_be_perturbed_is_refused(overrides, said):
    with pytest.raises(UserError) as caught:
        check(config(REPORTING[0], *overrides))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_agents_from_files_keep_to_their_ranges():
    settings = config(*REPORTING, RANGE)
    check_environment_hyperparameters(agents_with(1.0, 100.0), settings, "here")
    with pytest.raises(UserError, match=r"agent 0 has environment\.kwargs\.bonus 101, which is outside its range"):
        check_environment_hyperparameters(agents_with(101.0), settings, "here")
    with pytest.raises(UserError, match="agent 0 has no settings of environments"):
        check_environment_hyperparameters([Agent(0, {}, {"gamma": 0.9}, {})], settings, "here")
