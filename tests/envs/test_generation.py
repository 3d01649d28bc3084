"""Generations long enough to begin new episodes, what is reported of them, and runs that need none."""

import re
from dataclasses import replace

import pytest
from helpers.support import config, lines, train

from evorl.config import Environment
from evorl.envs.generation import GenerationPlan, generation_plan, longest_episode
from evorl.envs.vector import make_vector
from evorl.types.outcomes import EvorlWarning


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"id": "LunarLander-v3", "kwargs": {"max_episode_steps": 300}}, 300),
        ({"id": "LunarLander-v3", "kwargs": {"max_episode_steps": -1}}, None),
        ({"id": "CartPole-v1"}, 500),
        ({"id": "CartPole-v1", "kwargs": {"max_episode_steps": None}}, 500),
        ({"id": "helpers.probes:Counter-v0"}, None),
        ({"id": "ALE/Pong-v5"}, 27_000),
        ({"id": "ALE/Pong-v5", "kwargs": {"max_num_frames_per_episode": 1000, "frameskip": 3}}, 334),
        ({"id": "ALE/Pong-v5", "kwargs": {"obs_type": "ram", "max_num_frames_per_episode": None}}, None),
        ({"id": "ale_py:Pong-v4"}, 54_000),
    ],
)
def test_the_longest_episode_is_what_the_registration_allows(settings, longest):
    if "Pong" in settings["id"]:
        pytest.importorskip("ale_py")
    make_vector(Environment(**settings), 1).close()
    assert longest_episode(Environment(**settings)) == longest


@pytest.mark.parametrize(
    ("steps", "copies", "period", "asked", "expected"),
    [
        (32_000, 2, 1, "auto", GenerationPlan(2000, 1000, False)),
        (16_000, 2, 1, "auto", GenerationPlan(1000, 1000, True)),
        (16_000, 8, 1, "false", GenerationPlan(250, 1000, False)),
        (32_000, 1, 1, "true", GenerationPlan(4000, 1000, True)),
        (20_000, 2, 256, "auto", GenerationPlan(1280, 1000, True)),
    ],
)
def test_episodes_begin_anew_only_where_a_generation_is_twice_as_long(steps, copies, period, asked, expected):
    settings = "environment.id=LunarLander-v3", "environment.num_envs=8", f"environment.carry_over={asked}"
    assert generation_plan(config(*settings, f"evolution.steps={steps}"), copies, period) == replace(
        expected, agent_steps_per_vector_step=8 * copies, period=period
    )


@pytest.mark.parametrize(
    ("left", "steps"), [(99_999, 1280), (40_960, 1280), (40_959, 1280), (16_385, 768), (16_384, 512), (1, 256)]
)
def test_the_last_generation_has_whole_rollouts_of_what_is_left(left, steps):
    whole = GenerationPlan(1280, 1000, True, agent_steps_per_vector_step=32, period=256)
    assert whole.within(left) == replace(whole, steps=steps)


@pytest.mark.parametrize(("lockstep", "carries_over"), [("true", False), ("false", True)])
def test_actors_share_the_steps_of_a_generation(lockstep, carries_over):
    """6,000 steps of an environment would begin new episodes of 1,000; the 1,500 of each of 4 actors do not."""
    settings = (
        "environment={id: LunarLander-v3, num_envs: 8, carry_over: auto}", "algorithm={name: impala}",
        f"actors={{count: 4, lockstep: {lockstep}}}", "evolution.steps=48_000",
    )  # fmt: skip
    plan = generation_plan(config(*settings), copies=1, period=20)
    assert plan == GenerationPlan(6000, 1000, carries_over, actors=4, agent_steps_per_vector_step=8, period=20)
    assert plan.steps_of_each_environment == 1500
    assert "after 750 steps" in GenerationPlan(3000, 1000, False, actors=4).shortfall(None)


def test_less_than_a_tenth_of_a_generation_is_left():
    whole = GenerationPlan(1280, 1000, True, agent_steps_per_vector_step=32, period=256)
    assert whole.is_spent(4096)
    assert whole.is_spent(-5)
    assert not whole.is_spent(4097)


def test_without_a_known_limit_episodes_run_on():
    settings = "environment.id=helpers.probes:Counter-v0", "environment.carry_over=auto", "evolution.steps=1000000"
    assert generation_plan(config(*settings), 1, 1) == GenerationPlan(
        500_000, None, True, agent_steps_per_vector_step=2
    )


@pytest.mark.parametrize(
    ("given", "evaluated", "warns"),
    [
        (GenerationPlan(250, 1000, False), None, "after 250 steps .* plays up to 1,000"),
        (GenerationPlan(250, 1000, False, can_carry_over=False), None, "raise evolution.steps$"),
        (GenerationPlan(250, 1000, False), 250, None),
        (GenerationPlan(250, 1000, True), None, None),
    ],
)
def test_states_that_are_only_evaluated_are_warned_about(given, evaluated, warns):
    warning = given.shortfall(evaluated)
    assert re.search(warns, warning) if warns else warning is None


MOUNTAIN_CAR = ["environment={id: MountainCar-v0, num_envs: 2}", "evolution.steps=300", "training.max_steps=600"]


def test_a_generation_shorter_than_an_episode_still_trains_on_whole_episodes(in_directory):
    """MountainCar's episodes take 200 steps and a generation 150: restarted, no episode would ever end."""
    with pytest.warns(EvorlWarning, match="no episode ended in generation 1, which had 150 steps") as caught:
        assert train("run.name=a", *MOUNTAIN_CAR) == 0
    assert len(caught) == 1
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert rows[0]["train_return"] == [None] * 4
    assert rows[0]["train_episodes"] == [0] * 4
