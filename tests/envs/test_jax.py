"""Environments in JAX: equal to Gymnasium's, with states that are saved, so that episodes go on bit for bit."""

import numpy as np
import pytest
import torch
from helpers.support import config, train_below
from helpers.torch_cartpole import CartPole

from evorl.envs import make_environments
from evorl.runs.storage.checkpoint_files import AGENTS, part_file
from evorl.types.outcomes import UserError

pytest.importorskip("jax")
pytest.importorskip("gymnax")


def environments(id="gymnax:CartPole-v1", agents=2, num_envs=3, **kwargs):
    words = [f"environment.kwargs.{name}={value}" for name, value in kwargs.items()]
    return make_environments(config(f"environment.id={id}", *words).environment, agents, num_envs)


def actions(tensors, rng):
    return torch.from_numpy(rng.integers(2, size=(tensors.agents, tensors.num_envs)))


def test_gymnaxs_cartpole_is_the_reference():
    """Each step from the state that gymnax is in; `test_tensor.py` compares the reference with Gymnasium's."""
    rng, tensors, pole = np.random.default_rng(0), environments(max_steps_in_episode=40), CartPole(6, limit=40)
    tensors.reset(1)
    pole.reset(seed=1)
    ended = cut = 0
    for _ in range(300):
        state, steps = tensors.observation["observation"].flatten(0, 1), pole.steps
        pole.state = state.double()
        action = actions(tensors, rng)
        transition = tensors.step(action)
        _, reward, terminated, truncated, info = pole.step(action.flatten())
        last = transition.next_observation["observation"].flatten(0, 1)
        torch.testing.assert_close(last, info["final_obs"], rtol=0, atol=1e-5)
        assert torch.equal(transition.reward.flatten(), reward)
        assert torch.equal(transition.terminated.flatten(), terminated)
        assert torch.equal(transition.truncated.flatten(), truncated & ~terminated)
        going = ~tensors.started
        assert torch.equal(tensors.observation["observation"][going], transition.next_observation["observation"][going])
        assert (tensors.observation["observation"][tensors.started].abs() <= 0.05).all()
        assert torch.equal(pole.steps, (steps + 1).masked_fill(tensors.started.flatten(), 0))
        ended, cut = ended + int(tensors.started.sum()), cut + int(transition.truncated.sum())
    assert ended > 20
    assert cut


def test_copies_of_one_seed_are_alike_and_others_are_not():
    rng, tensors = np.random.default_rng(0), environments(agents=2, num_envs=2)
    tensors.reset([4, 5])
    for _ in range(100):
        seen = tensors.observation["observation"]
        assert torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[:, 0], seen[:, 1])
        tensors.step(actions(tensors, rng)[:1].expand(2, 2).contiguous())


@pytest.mark.parametrize("id", ["gymnax:CartPole-v1", "gymnax:Breakout-MinAtar"])
def test_saved_episodes_go_on_bit_for_bit(id):
    rng, before = np.random.default_rng(0), environments(id)
    before.reset(3)
    for _ in range(40):
        before.step(actions(before, rng))
    saved = {name: value.clone() for name, value in before.state_dict().items()}
    chosen = [actions(before, rng) for _ in range(40)]
    truth = [before.step(action) for action in chosen]
    after = environments(id)
    assert after.load_state_dict(saved, 9) == ""
    for action, one in zip(chosen, truth, strict=True):
        two = after.step(action)
        assert torch.equal(one.observation["observation"], two.observation["observation"])
        assert torch.equal(one.next_observation["observation"], two.next_observation["observation"])
        assert torch.equal(one.reward, two.reward)
        assert torch.equal(one.started, two.started)
    for one, two in zip(before.pop_collected(), after.pop_collected(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_evaluation_does_not_end_the_episodes_of_training():
    rng, training, evaluation = np.random.default_rng(0), environments(), environments(agents=1, num_envs=2)
    training.reset(3)
    training.step(actions(training, rng))
    last = training.observation["observation"].clone()
    evaluation.reset(7)
    evaluation.step(actions(evaluation, rng))
    assert torch.equal(training.step(actions(training, rng)).observation["observation"], last)


def test_a_state_of_other_environments_is_refused():
    tensors = environments()
    tensors.reset(0)
    saved = tensors.state_dict()
    with pytest.raises(UserError, match="the running episodes: tensor"):
        environments("gymnax:Breakout-MinAtar").load_state_dict(saved, 0)


@pytest.mark.parametrize(
    ("id", "kwargs", "words"),
    [
        ("gymnax:CartPole-v7", {}, "gymnax has no environment 'CartPole-v7'.*CartPole-v1"),
        ("gymnax:CartPole-v1", {"weight": 3}, "environment.kwargs: gymnax:CartPole-v1 takes .*gravity"),
    ],
)
def test_refusals(id, kwargs, words):
    with pytest.raises(UserError, match=words):
        environments(id, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "dqn_next"])
def test_a_resumed_run_is_bit_identical_within_episodes(tmp_path, algorithm):
    """Episodes of gymnax go on across generations, and a run that is resumed after each one is the same."""
    settings = {
        "ppo": ["algorithm={name: ppo, rollout_steps: 10, batch_size: 20}", "replay={}"],
        "dqn": ["algorithm.name=dqn"],
        "dqn_next": ["algorithm.name=dqn", "replay.n_step=3", "environment.num_envs=4"],
    }[algorithm]
    settings += ["environment.id=gymnax:CartPole-v1", "environment.carry_over=true"]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = train_below(tmp_path / "whole", *settings)
    for steps in (40, 80, 120):
        parts = train_below(tmp_path / "parts", *settings, f"training.max_steps={steps}", "run.resume=auto")
    newest = sorted((whole / "checkpoints").iterdir())[-1].name
    for file in (AGENTS, part_file("environments", 0)):
        one, two = ((run / "checkpoints" / newest / file).read_bytes() for run in (whole, parts))
        assert one == two, file
