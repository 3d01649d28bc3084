"""No transition that never happened, and the truth about how episodes end."""

import copy
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import probes  # noqa: F401
from helpers.support import agent

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.faults.raising import GuardedEnv
from evorl.envs.reading import ActionMasks, Copies
from evorl.envs.spaces import MASK
from evorl.types.outcomes import EvorlWarning, UserError

P, E = 2, 3


def transitions(settings, steps, action=0):
    environments = Environments(settings, P, E)
    environments.reset(7)
    made = [environments.step(torch.full((P, E), action)) for _ in range(steps)]
    return environments, made


class Tells(gym.Env):
    """An environment that gives the infos [steps + 1] one after another, the last one again."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))

    def __init__(self, space, infos):
        self.action_space, self.infos = space, infos

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), dict(self.infos[0])

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, dict(self.infos[-1])


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
def test_every_transition_stays_inside_its_episode(vectorization):
    settings = Environment(id="helpers.probes:Counter-v0", vectorization=vectorization)
    environments, made = transitions(settings, 40)
    try:
        assert environments.always_valid
        for now in made:
            assert now.all_valid
            assert torch.equal(now.next_observation["observation"][..., 0], now.observation["observation"][..., 0]), (
                "an episode leaked into the next"
            )
            assert torch.equal(now.next_observation["observation"][..., 1], now.observation["observation"][..., 1] + 1)
            assert torch.equal(now.reward, now.next_observation["observation"][..., 1])
            ended = now.next_observation["observation"][..., 1] == 3 + now.observation["observation"][..., 0] % 3
            odd = now.observation["observation"][..., 0] % 2 == 1
            assert torch.equal(now.terminated, ended & ~odd)
            assert torch.equal(now.truncated, ended & odd)
        for now, then in itertools.pairwise(made):
            ended = now.terminated | now.truncated
            assert torch.equal(then.observation["observation"][~ended], now.next_observation["observation"][~ended])
            assert (then.observation["observation"][ended][:, 1] == 0).all()
        assert sum(int(now.truncated.sum()) for now in made) > 0
        steps, returns, episodes, ended, _ = environments.pop_collected()
        assert (steps == 40 * E).all()
        # Episodes of 3, 4, 5, ... steps return 6, 10, 15, ...; ten of them end within 40 steps. The last one begins in
        # step 37, and one that takes five steps, as some do, would not have ended yet.
        assert (ended == 10 * E).all()
        assert (episodes == 9 * E).all()
        assert (returns == E * 3 * (6 + 10 + 15)).all()
    finally:
        environments.close()


def test_a_native_environment_marks_its_reset_steps():
    environments, made = transitions(Environment(id="CartPole-v1"), 200, action=1)
    assert not environments.always_valid
    assert made[0].all_valid
    resets = 0
    for now, then in itertools.pairwise(made):
        ended = (now.terminated | now.truncated) & now.valid
        assert torch.equal(~then.valid, ended), "the step after an end, and only that, is a reset"
        assert then.all_valid == bool(then.valid.all())
        resets += int(ended.sum())
        moved = then.observation["observation"][then.valid] - now.next_observation["observation"][then.valid]
        assert not moved.any()
        # A real step of CartPole integrates the velocity it starts with: x' = x + 0.02 v.
        real, after = then.observation["observation"][then.valid], then.next_observation["observation"][then.valid]
        torch.testing.assert_close(after[:, 0], real[:, 0] + 0.02 * real[:, 1])
    assert resets > 20
    valid = sum(int(now.valid.sum()) for now in made)
    assert (
        environments.pop_collected().steps.sum() == valid == 200 * P * E - sum(int((~now.valid).sum()) for now in made)
    )


def test_all_vectorizations_of_cartpole_agree_on_the_length_of_episodes():
    returns = {}
    for vectorization in ("auto", "sync"):
        environments, _ = transitions(Environment(id="CartPole-v1", vectorization=vectorization), 300, action=1)
        collected = environments.pop_collected()
        returns[vectorization] = collected.returns.sum() / collected.episodes.sum()
        assert collected.lengths.tolist() == collected.returns.tolist(), "each step gives a reward of 1"
    assert returns["auto"] == pytest.approx(returns["sync"], abs=0.4)


def test_the_same_seed_gives_the_same_start_and_another_another():
    environments = Environments(Environment(id="LunarLander-v3"), P, E)
    starts = []
    for seed in (5, 5, 6):
        environments.reset(seed)
        starts.append(environments.observation["observation"].clone())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert len(starts[0].flatten(0, 1).unique(dim=0)) == P * E


@pytest.mark.parametrize("action", [-1, 2])
def test_an_action_outside_the_space_is_refused_by_name(action):
    environments = Environments(Environment(id="CartPole-v1"), P, E)
    environments.reset(0)
    actions = torch.zeros(P, E, dtype=torch.int64)
    actions[1, 2] = action
    with pytest.raises(ValueError, match=rf"agent 1 chose action {action} in environment 2; .* 0 to 1"):
        environments.step(actions)


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (gym.spaces.Discrete(3), (False, True, False)),
        (gym.spaces.Discrete(3), np.array([0, 1, 0], np.int8)),
        (gym.spaces.MultiDiscrete([2, 3]), (np.array([1, 0]), np.array([0, 1, 0]))),
    ],
)
def test_a_mask_counts_whatever_it_is_given_as(space, mask):
    expected = np.concatenate([np.ravel(part) for part in mask]).astype(bool).tolist()
    vector = gym.vector.SyncVectorEnv([lambda: GuardedEnv(Tells(space, [{MASK: mask}]), "x")] * 2)
    read = ActionMasks(space, Copies("x", 2, 1)).read
    assert read(vector.reset()[1]).tolist() == [expected] * 2
    with pytest.raises(UserError, match=r"gives info\['action_mask'\] as objects"):
        read({MASK: np.array([mask, None], dtype=object)})


def test_a_last_mask_that_allows_no_action_allows_all():
    masks = ActionMasks(gym.spaces.MultiDiscrete([2, 2]), Copies("x", 3, 1))
    given = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    info = {"final_info": {MASK: given, f"_{MASK}": np.array([True, True, False])}}
    assert [masks.last(info, copy).tolist() for copy in range(3)] == [[True, False, False, True], True, True]
    assert masks.last({"final_info": {MASK: given}}, 0).tolist() == [True, False, False, True], "given for all copies"
    in_rows = masks.last({"final_info": {MASK: given.reshape(3, 2, 2)}}, 0)
    assert in_rows.tolist() == [True, False, False, True], "a row for each choice"
    with pytest.raises(UserError, match="masks of 3 actions; its space has 4"):
        masks.last({"final_info": {MASK: given[:, :3], f"_{MASK}": np.ones(3, dtype=bool)}}, 0)


@pytest.mark.parametrize(("limit", "ended"), [(-1, 0), (5, 4), (None, 0)])
@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_a_limit_on_steps_means_the_same_in_native_environments(limit, ended, vectorization):
    settings = Environment(id="CartPole-v1", vectorization=vectorization, kwargs={"max_episode_steps": limit})
    _, made = transitions(settings, 6)
    assert sum(int((now.truncated & now.valid).any()) for now in made[:5]) == (ended > 0)


@pytest.mark.parametrize("length", [1, 5])
def test_a_mask_that_only_steps_give_is_refused(length):
    environments = Environments(Environment(id="helpers.probes:LateMask-v0", kwargs={"length": length}), 1, 2)
    environments.reset(0)
    with pytest.raises(UserError, match=r"gives info\['action_mask'\] in `step` but not in `reset`; .*both"):
        environments.step(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_mask_that_only_resets_give_is_refused(vectorization):
    """Also where another copy has one, because an episode has just begun there."""
    settings = Environment(id="helpers.probes:EarlyMask-v0", vectorization=vectorization, kwargs={"length": 3})
    with Environments(settings, 1, 2) as environments:
        environments.reset(0)
        with pytest.raises(
            UserError, match=r"environment 0 of agent 0 and 1 more .*step 1 .* gave no info\['action_ma"
        ):
            environments.step(torch.zeros(1, 2, dtype=torch.int64))
    masks = ActionMasks(gym.spaces.Discrete(2), Copies("x", 2, 1))
    given = {MASK: np.ones((2, 2)), f"_{MASK}": np.array([True, False])}
    with pytest.raises(UserError, match=r"environment 0 of agent 1 .*; give one in every `reset` and `step`, all 1 wh"):
        masks.read(given)
    for info in (given, {}):
        assert masks.read(info, np.array([True, True])).all(), "the next action only resets these"


def test_carry_over_keeps_episodes_running():
    for carries in (False, True):
        environments = Environments(Environment(id="helpers.probes:Counter-v0"), 1, 1)
        environments.begin(0, [agent()], carries)
        environments.step(torch.zeros(1, 1, dtype=torch.int64))
        environments.begin(0, [agent()], carries)
        assert environments.observation["observation"][0, 0, 1] == (1 if carries else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "LunarLandr-v3"}, "environment.id: cannot make 'LunarLandr-v3'"),
        ({"id": "CartPole"}, "cannot make 'CartPole': an id has its version; did you mean 'CartPole-v1'"),
        ({"id": "PongNoFrameskip-v4"}, "did you mean 'ALE/Pong-v5'"),
        ({"id": "nowhere:Some-v0"}, "environment.id: cannot make"),
        ({"id": "LunarLander-v3", "kwargs": {"moon": 1}}, "environment.kwargs: .*moon"),
    ],
)
def test_what_cannot_be_made_is_named(settings, message, monkeypatch):
    if "Frameskip" in settings["id"]:
        monkeypatch.delitem(
            gym.registry, settings["id"], raising=False
        )  # ale_py, once imported, registers the old names.
    with pytest.raises(UserError, match=message):
        Environments(Environment(**settings), 1, 1)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
def test_a_mask_must_leave_something_of_every_choice(mask):
    settings = Environment(id="helpers.probes:MaskedChoices-v0", kwargs={"mask": mask})
    with pytest.raises(UserError, match=r"environment 0 of agent 0 and 3 more .* forbids every action"):
        Environments(settings, 2, 2).reset(0)


@pytest.mark.parametrize("name", ["helpers.probes:Counter-v0", "CartPole-v1"])
def test_transitions_outlive_the_arrays_of_the_vector_environment(name):
    """Native environments may write each step into the arrays of the last one."""
    environments = Environments(Environment(id=name), P, E)
    vector = environments._vector
    stepped = vector.step

    def spoiled(actions):
        *arrays, info = stepped(actions)
        handed.extend(arrays)
        return *arrays, info

    handed = []
    vector.step = spoiled
    environments.reset(7)
    made = [environments.step(torch.zeros(P, E, dtype=torch.int64)) for _ in range(20)]
    fields = ("observation", "next_observation", "reward", "terminated", "truncated", "valid", "started")
    before = copy.deepcopy([[getattr(now, field) for field in fields] for now in made])
    for array in handed:
        array.fill(1)
    for now, then in zip(made, before, strict=True):
        torch.testing.assert_close([getattr(now, field) for field in fields], then, rtol=0, atol=0)


def test_an_episode_that_may_never_end_is_told_of_once():
    with Environments(Environment(id="CartPole-v1"), 1, 1) as environments:
        environments.warn_of_endless(100)  # It has a time limit.
        environments._may_be_endless = True
        with pytest.warns(EvorlWarning, match="CartPole-v1 has not ended after 100 steps, and may never end"):
            environments.warn_of_endless(100)
        environments.warn_of_endless(200)
