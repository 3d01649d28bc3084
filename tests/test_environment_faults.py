"""Environments that raise or give nonsense: what is lost is known, and nothing false is learned."""

import json
import re
import warnings

import evorl_faults  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from support import lines, train

from evorl.config import Environment
from evorl.envs import Environments
from evorl.evaluation import evaluate
from evorl.returns import gae
from evorl.types import EvorlWarning, UserError

P, E = 2, 2
ACT = torch.zeros(P, E, dtype=torch.int64)


def environments(vectorization="sync", max_restarts=3, **kwargs):
    settings = Environment(
        id="evorl_faults:Failing-v0", vectorization=vectorization, kwargs=kwargs, max_restarts=max_restarts
    )
    made = Environments(settings, P, E)
    made.reset(4)  # Copies 1 and 3, environment 1 of both agents, have odd seeds.
    return made


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_only_the_episode_of_the_environment_that_raised_is_dropped(vectorization):
    made = environments(vectorization)
    try:
        for step in range(1, 9):
            if step == 6:
                with pytest.warns(
                    EvorlWarning, match=r"2 environments .*RuntimeError: the wheel came off, 6 steps after"
                ):
                    now = made.step(ACT)
            else:
                now = made.step(ACT)
            assert now.valid.tolist() == [[True, step != 6]] * P
            assert now.all_valid == (step != 6)
            if step == 6:
                assert not (now.terminated | now.truncated).any()
                assert made.observation["started"].tolist() == [[False, True]] * P
                assert made.observation["observation"][:, 1, 1:].tolist() == [[0, 0]] * P, "a new episode has begun"
        returns, count = made.pop_returns()
        assert returns.tolist() == [12.0, 12.0], "three whole episodes of each agent, none of them the dropped one"
        assert count.tolist() == [3.0, 3.0]
        assert made.pop_steps().tolist() == [15.0, 15.0]
    finally:
        made.close()


def test_a_reset_that_raises_costs_no_transition():
    made = environments(how="reset")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        valid = [made.step(ACT).valid.all() for _ in range(8)]
    assert all(valid)
    assert sum("no reset today" in str(one.message) for one in said) == 1


@pytest.mark.parametrize(("vectorization", "restarts"), [("sync", 0), ("sync", 2), ("async", 1)])
def test_failing_too_often_ends_the_run_by_name(vectorization, restarts):
    made = environments(vectorization, restarts, always=True)
    message = rf"environment.max_restarts: environment 0 of agent 0 .*more than {restarts} times.*the wheel came off"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1 + 2 * restarts):
            made.step(ACT)
    with pytest.raises(UserError, match=message):
        made.step(ACT)
    made.close()


def test_where_all_copies_fail_at_once_they_are_all_made_again(monkeypatch):
    made = Environments(Environment(id="CartPole-v1", max_restarts=1), P, E)
    made.reset(0)
    step = type(made._vector).step

    def broken(self, action):
        raise RuntimeError("out of order")

    monkeypatch.setattr(type(made._vector), "step", broken)
    with pytest.warns(EvorlWarning, match="4 environments .* out of order"):
        now = made.step(ACT)
    assert not now.valid.any()
    assert made.observation["started"].all()
    monkeypatch.setattr(type(made._vector), "step", step)
    assert made.step(ACT).all_valid
    monkeypatch.setattr(type(made._vector), "step", broken)
    with pytest.raises(UserError, match=r"all copies of CartPole-v1 failed more than 1 times; .*out of order"):
        made.step(ACT)


@pytest.mark.parametrize(
    ("how", "what", "step"), [("reward", "a reward", 6), ("observation", r"an observation \(observation\)", 6),
                              ("last", r"an observation \(observation\)", 4)]
)  # fmt: skip
def test_what_is_not_finite_is_named(how, what, step):
    made = environments(how=how)
    message = rf"gave {what} that is not finite in environment 1 of agent 0, {step} steps after its start"
    for _ in range(step - 1):
        made.step(ACT)
    with pytest.raises(UserError, match=message):
        made.step(ACT)


def test_an_evaluation_counts_the_episode_after_the_dropped_one():
    made = environments(always=True, max_restarts=100, how="nothing")

    class Still:
        def memory(self, num_envs):
            return None

        def best(self, observation, memory):
            return {"action": ACT}

    step, calls = made.step, []

    def drops_once(action):
        calls.append(1)
        now = step(action)
        if len(calls) == 3:
            now.valid[1, 1], now.all_valid = False, False
        return now

    made.step = drops_once
    returns = evaluate(Still(), made, 2, 4, None)
    assert returns.tolist() == [[4.0, 4.0], [4.0, 1.0]], "what came before the dropped step does not count"


def test_a_dropped_step_leaks_into_no_advantage():
    """As `RolloutExperience` puts it to `gae`: the step before bootstraps, and the dropped one weighs nothing."""
    reward, value = torch.tensor([1.0, 50.0, 2.0]), torch.tensor([3.0, 5.0, 7.0])
    nothing = torch.tensor([False, True, False])
    shape = (3, 1, 1)
    advantage = gae(
        torch.where(nothing, value, reward).view(shape), value.view(shape), value.roll(-1).view(shape),
        nothing.view(shape), nothing.view(shape), torch.tensor([0.9]), torch.tensor([0.8]),
    )  # fmt: skip
    assert advantage[0].item() == pytest.approx(1.0 + 0.9 * 5.0 - 3.0)
    assert advantage[1].item() == 0.0


@pytest.mark.parametrize("algorithm", ["{name: dqn, batch_size: 8}", "{name: ppo, rollout_steps: 8, batch_size: 8}"])
def test_training_goes_on_with_as_many_updates(algorithm, in_directory):
    common = [f"algorithm={algorithm}", "training.max_steps=80", "replay.learning_starts=8"]
    for name, how in (("faulty", "step"), ("sound", "nothing")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kwargs = f"{{how: {how}}}"
            given = f"environment={{id: 'evorl_faults:Failing-v0', num_envs: 2, kwargs: {kwargs}, max_restarts: 99}}"
            assert train(f"run.name={name}", given, *common) == 0
    faulty, sound = (lines(in_directory / "runs" / name / "metrics.jsonl") for name in ("faulty", "sound"))
    assert [row["updates"] for row in faulty[:2]] == [row["updates"] for row in sound[:2]]
    assert faulty[1]["global_steps"] < sound[1]["global_steps"], "some steps are meant to have been dropped"
    assert all(value == 4.0 for row in faulty for value in row["train_return"] if value is not None)
    assert np.isfinite([row["statistics"]["loss"] for row in faulty]).all()


def test_a_run_ends_with_one_line_where_rewards_are_no_numbers(in_directory, capsys):
    given = "environment={id: 'evorl_faults:Failing-v0', num_envs: 2, kwargs: {how: reward}}"
    assert train("run.name=a", given) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1
    assert re.search("gave a reward that is not finite in environment . of agent", error[0])
    assert json.loads((in_directory / "runs" / "a" / "summary.json").read_text())["ended"] == "UserError"
    assert gym.spec("Failing-v0") is not None
