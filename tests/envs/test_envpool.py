"""EnvPool as a vector implementation, by the package where it is installed, and by a stand-in for it."""

import importlib.util
import sys
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import stand_ins
from helpers.support import config, lines, train_below

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.envpool import THREADS
from evorl.envs.generation import generation_length
from evorl.envs.vector import by_gymnasium, for_actor, for_evaluation, make_vector, vectorization_of
from evorl.types import UserError

HAS_ENVPOOL = importlib.util.find_spec("envpool") is not None
STAND_IN = str(Path(stand_ins.__path__[0]))


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    before = sys.modules.pop("envpool", None)
    yield
    sys.modules.pop("envpool", None)
    if before is not None:
        sys.modules["envpool"] = before


@pytest.fixture(params=["stand_in", pytest.param("package", marks=pytest.mark.skipif(not HAS_ENVPOOL, reason="extra"))])
def pool(request):
    if request.param == "stand_in":
        request.getfixturevalue("stand_in")


def settings(id="CartPole-v1", **more):
    return Environment(id=id, vectorization="envpool", **more)


def played(made, steps, seed=0):
    """The transitions of so many steps of random actions."""
    rng = np.random.default_rng(seed)
    return [made.step(torch.from_numpy(rng.integers(2, size=(made.agents, made.num_envs)))) for _ in range(steps)]


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.reward, other.reward)
        assert torch.equal(mine.started, other.started)
        assert torch.equal(mine.observation["observation"], other.observation["observation"])


@pytest.mark.usefixtures("pool")
def test_a_reset_begins_the_episodes_of_its_seeds():
    with closing(make_vector(settings(), 3)) as vector:
        first = vector.reset(seed=5)[0].copy()
        assert len(np.unique(first[:, 0])) == 3
        vector.step(np.zeros(3, dtype=np.int64))
        np.testing.assert_array_equal(vector.reset(seed=[7, 6, 5])[0], first[::-1])
        assert not np.array_equal(vector.reset(seed=2**31 - 2)[0], first)


@pytest.mark.usefixtures("pool")
def test_the_step_of_a_reset_is_no_transition():
    with Environments(settings(kwargs={"max_episode_steps": 5}), 1, 2) as made:
        made.reset(3)
        steps = played(made, 12)
    assert [bool(each.valid.all()) for each in steps] == [True] * 5 + [False] + [True] * 5 + [False]
    assert [bool(each.truncated.all()) for each in steps] == [False] * 4 + [True] + [False] * 5 + [True] + [False]
    assert steps[6].started.all()


@pytest.mark.usefixtures("pool")
def test_agents_see_and_act_in_the_spaces_of_gymnasium():
    with closing(make_vector(settings("Pendulum-v1"), 2)) as vector:
        theirs = gym.make("Pendulum-v1")
        assert vector.single_observation_space == theirs.observation_space
        assert vector.single_action_space == theirs.action_space
        vector.reset(seed=1)
        assert vector.step(np.ones((2, 1), dtype=np.float32))[0].shape == (2, 3)


@pytest.mark.usefixtures("pool")
def test_a_generation_that_was_cut_short_goes_on_as_it_would_have():
    with Environments(settings(), 2, 2) as ours, Environments(settings(), 2, 2) as theirs:
        assert ours.can_continue
        ours.reset(3)
        played(ours, 130)
        state = {name: value.clone() for name, value in ours.state_dict().items()}
        assert theirs.load_state_dict(state, seed=9) == ""
        assert_equal(played(ours, 60, 1), played(theirs, 60, 1))


@pytest.mark.usefixtures("pool")
def test_a_replay_that_differs_begins_all_episodes_anew():
    with Environments(settings(), 1, 2) as ours, Environments(settings(), 1, 2) as theirs:
        ours.reset(3)
        played(ours, 10)
        state = {name: value.clone() for name, value in ours.state_dict().items()}
        state["observation.observation"][0, 1] += 0.1
        names = theirs.load_state_dict(state, seed=9)
        assert theirs.started.all()
        assert "environment 1 of agent 0" in names
        played(theirs, 30)


@pytest.mark.usefixtures("stand_in")
def test_observations_in_parts_are_replayed_too():
    """EnvPool gives them as a dictionary of arrays."""
    world = settings("helpers.spaces:Shown-v0", kwargs={"kind": "dict"})
    with Environments(world, 1, 2) as ours, Environments(world, 1, 2) as theirs:
        ours.reset(3)
        played(ours, 3)
        assert theirs.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()}, seed=9) == ""


@pytest.mark.usefixtures("pool")
def test_a_pool_has_no_more_threads_than_copies(monkeypatch):
    monkeypatch.setattr("evorl.envs.vector.usable_cores", lambda: 64)
    asked = []
    monkeypatch.setattr("evorl.envs.vector.EnvPool", lambda name, copies, options: asked.append(options[THREADS]))
    make_vector(settings(), 3)
    make_vector(settings(kwargs={THREADS: 2}), 3)
    make_vector(for_actor(settings(), 32), 8)
    assert asked == [3, 2, 2]


@pytest.mark.usefixtures("pool")
def test_what_shows_an_environment_takes_gymnasiums():
    single = by_gymnasium(settings(kwargs={THREADS: 2, "max_episode_steps": 9}))
    assert (single.vectorization, single.kwargs) == ("sync", {"max_episode_steps": 9})


@pytest.mark.usefixtures("pool")
def test_actors_do_not_record_what_is_never_resumed():
    with Environments(settings(), 1, 2, continued=False) as made:
        made.reset(3)
        played(made, 3)
        assert made.state_dict() == {}


@pytest.mark.usefixtures("pool")
def test_evaluation_takes_a_seed_for_each_copy():
    mode = for_evaluation(settings())
    assert vectorization_of(mode) == "envpool"
    with Environments(mode, 2, 2) as made:
        made.reset([4, 5])
        seen = made.observation["observation"]
        assert torch.equal(seen[0], seen[1])


@pytest.mark.usefixtures("pool")
def test_each_generation_begins_new_episodes():
    length = generation_length(
        config("environment={vectorization: envpool, carry_over: auto}", "evolution.steps=64"), 1, 1
    )
    assert not length.carries_over
    with pytest.raises(UserError, match=r"environment\.carry_over: .* use auto"):
        make_vector(settings(carry_over=True), 2)


@pytest.mark.usefixtures("pool")
def test_what_cannot_be_pooled_is_refused():
    with pytest.raises(UserError, match=r"environment\.vectorization: EnvPool has no Unseeded-v0"):
        make_vector(settings("helpers.probes:Unseeded-v0"), 2)
    with pytest.raises(UserError, match=r"EnvPool's CartPole-v1 does not accept these .*'length'"):
        make_vector(settings(kwargs={"length": 2}), 2)


@pytest.mark.usefixtures("stand_in")
def test_other_spaces_than_those_of_gymnasium_are_refused():
    with pytest.raises(UserError, match=r"EnvPool's Blackjack-v1 has the observation space Box.*Gymnasium's Tuple"):
        make_vector(settings("Blackjack-v1"), 2)


def test_an_environment_setting_cannot_differ_between_copies():
    with pytest.raises(UserError, match="envpool copies are all alike"):
        config(
            "environment={id: Pendulum-v1, vectorization: envpool, kwargs: {g: 9.8}}",
            "evolution.hyperparameters={environment.kwargs.g: {min: 5, max: 15}}",
        )


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("evorl.system.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"environment\.vectorization: envpool needs envpool; install it with .*envpool"
    ):
        make_vector(settings(), 2)


@pytest.mark.usefixtures("pool")
def test_a_population_trains_in_it(in_directory):
    train_below(
        in_directory,
        "environment={id: CartPole-v1, vectorization: envpool}",
        "evolution.steps=160",
        "training.max_steps=320",
    )
    last = lines(in_directory / "runs" / "a" / "metrics.jsonl")[-1]
    assert last["vectorization"] == "envpool"
