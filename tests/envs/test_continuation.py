"""Episodes that another process goes on with: played again, they go on as they would have."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import needs_extra_of

from evorl.config import Environment
from evorl.envs import Environments, continuation
from evorl.envs.continuation import Journal
from evorl.envs.environments import ORIGINS
from evorl.types.outcomes import UserError

P, E = 2, 2
WORLDS = [
    {"id": "CartPole-v1"},
    {"id": "CartPole-v1", "vectorization": "sync"},
    {"id": "CartPole-v1", "vectorization": "async"},
    {"id": "FrozenLake-v1"},
    {"id": "Pendulum-v1"},
    {"id": "LunarLander-v3"},
    {"id": "BipedalWalker-v3"},
    {"id": "Hopper-v5"},
    {"id": "MinAtar/SpaceInvaders-v1"},
    {"id": "helpers.spaces:SometimesMasked-v0"},
]
FIELDS = ("reward", "terminated", "truncated", "valid", "started")


def actions(made, rng):
    space = made.interface.action
    if hasattr(space, "n"):
        return torch.from_numpy(rng.integers(space.n, size=(P, E)))
    return torch.from_numpy(rng.uniform(space.low, space.high, size=(P, E, *space.shape)).astype(np.float32))


def played(made, steps, seed=0):
    """The transitions of so many steps of random actions."""
    rng = np.random.default_rng(seed)
    return [made.step(actions(made, rng)) for _ in range(steps)]


def state_of(made):
    """What a checkpoint would keep, which later steps leave alone."""
    return {name: value.clone() for name, value in made.state_dict().items()}


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for name in FIELDS:
            assert torch.equal(getattr(mine, name), getattr(other, name)), name
        for name, value in mine.observation.items():
            assert torch.equal(value, other.observation[name])
            assert torch.equal(mine.next_observation[name], other.next_observation[name])


@pytest.fixture
def made():
    """Environments by their settings, closed at the end of the test."""
    everything = []

    def make(settings):
        everything.append(Environments(Environment(**settings), P, E))
        return everything[-1]

    yield make
    for each in everything:
        each.close()


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "-".join(world.values()))
def test_episodes_go_on_as_they_would_have(world, made):
    needs_extra_of(world["id"])
    ours, theirs = made(world), made(world)
    ours.reset(3)
    played(ours, 130)
    ours.pop_collected()
    assert theirs.load_state_dict(state_of(ours), seed=9) == ""
    assert torch.equal(ours.started, theirs.started)
    assert_equal(played(ours, 150, 1), played(theirs, 150, 1))
    for mine, other in zip(ours.pop_collected(), theirs.pop_collected(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_where_an_environment_forgets_its_seed_it_is_named_and_new_episodes_begin(made):
    """Its randomness is another in each process."""
    world = {"id": "helpers.probes:Unseeded-v0", "kwargs": {"only": 4}}
    ours, theirs = made(world), made(world)
    ours.reset(3)
    played(ours, 3)
    names = theirs.load_state_dict(state_of(ours), seed=9)
    assert names.startswith("environment 1 of agent 0 ")
    assert theirs.started.all()
    played(theirs, 5)


def test_the_journal_keeps_no_more_than_the_oldest_episode_needs():
    rng = np.random.default_rng(0)
    journal, kept = Journal(gym.spaces.Discrete(3), 4), [[], [], [], []]
    for step in range(5_000):
        chosen = rng.integers(3, size=4)
        journal.add(chosen)
        for copy, own in enumerate(kept):
            own.append(int(chosen[copy]))
        ended = rng.random(4) < 0.02
        journal.begin(ended)
        kept = [[] if end else own for own, end in zip(kept, ended, strict=True)]
        if step % 500 == 0:
            assert journal.ages.tolist() == [len(own) for own in kept]
            found = [journal.actions[len(journal.actions) - len(own) :, copy].tolist() for copy, own in enumerate(kept)]
            assert found == kept
    assert journal.actions.dtype == np.int8
    assert len(journal.actions) == journal.ages.max()


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (lambda kept: kept.pop("actions"), "'actions' is missing"),
        (lambda kept: kept.update(ages=kept["ages"].double()), "it should be torch.int64"),
        (lambda kept: kept.update(started=kept["started"][:1]), "it should be torch.bool"),
        (lambda kept: kept.update(more=kept["started"]), "not expected here"),
        (lambda kept: kept.pop(ORIGINS), "their start states are missing"),
    ],
)
def test_a_file_that_lies_about_episodes_is_refused(lie, says, made):
    ours, theirs = made(WORLDS[1]), made(WORLDS[1])
    ours.reset(3)
    played(ours, 30)
    kept = state_of(ours)
    lie(kept)
    with pytest.raises(UserError, match=says):
        theirs.load_state_dict(kept, seed=9)


def test_a_native_environment_with_hidden_state_cannot_be_continued():
    class Hidden:
        single_action_space = None
        unwrapped = property(lambda self: self)

        def __init__(self):
            self.engine = object()

    assert continuation.continuation(Hidden(), 1, atari=False) is None


def test_a_native_environment_in_a_wrapper_which_may_have_state_cannot_be_continued():
    native = gym.make_vec("CartPole-v1", 2, "vector_entry_point")
    assert continuation.continuation(native, 2, atari=False) is not None
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(native)
    assert continuation.continuation(wrapped, 2, atari=False) is None
