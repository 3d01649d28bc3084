"""Atari: frames kept once, true scores, whole games, and the machine's memory as an observation."""

import numpy as np
import pytest
import torch
from support import config, lines, train

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.vector import for_evaluation
from evorl.replay.experience import make_replay
from evorl.replay.frames import FrameReplay
from evorl.types import EvorlWarning

pytest.importorskip("ale_py")
P, E = 2, 2


def environments(game, **settings):
    kwargs = {"max_num_frames_per_episode": 160, **settings.pop("kwargs", {})}
    made = Environments(Environment(id=f"ALE/{game}-v5", kwargs=kwargs, **settings), P, E)
    made.reset(3)
    return made


def replay(made, capacity):
    return make_replay(capacity, made.interface, ((), torch.int64), torch.device("cpu"))


def play(made, memory, steps, generator, first=0):
    """Act at random, remember it under the number of the step, and give what really happened."""
    truth = {}
    for step in range(first, first + steps):
        action = torch.randint(made.interface.action.n, (P, E), generator=generator)
        seen = made.observation
        transition = made.step(action)
        fields = {"action": torch.full((P, E), step), "reward": transition.reward, "terminated": transition.terminated}
        fields |= {f"observation.{name}": value for name, value in seen.items() if name != "started"}
        fields |= {f"next_observation.{name}": value for name, value in transition.next_observation.items()}
        memory.add_step(fields, transition.valid, seen["started"])
        truth[step] = seen["observation"], transition.next_observation["observation"], transition.valid
    return truth


@pytest.mark.parametrize("game", ["Pong", "Breakout"])
def test_frames_are_kept_once_and_stacks_come_back_as_they_were_seen(game):
    made, generator = environments(game), torch.Generator().manual_seed(0)
    memory = replay(made, 400)
    assert isinstance(memory, FrameReplay)
    truth = play(made, memory, 130, generator)
    made.reset(9)
    memory.begin()
    truth |= play(made, memory, 120, generator, first=130)
    resets = sum(int((~valid).sum()) for _, _, valid in truth.values())
    assert resets > 10, "episodes are meant to end"
    drawn = memory.gather(torch.arange(memory.size))
    steps, counts = drawn["action"].unique(return_counts=True)
    assert 380 <= memory.size <= 400
    assert steps.max() == 249
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
        before, after, valid = truth[step]
        rows = drawn["action"] == step
        assert count == valid.sum()
        assert torch.equal(drawn["observation.observation"][rows], before[valid])
        assert torch.equal(drawn["next_observation.observation"][rows], after[valid])
    frames = memory._store["frame.observation"]
    assert frames.shape == (400 // (P * E) + 4, P * E, 84, 84)


def test_a_restored_replay_goes_on_where_it_was():
    made, generator = environments("Pong"), torch.Generator().manual_seed(0)
    memory, again = replay(made, 60), replay(made, 60)
    play(made, memory, 40, generator)
    again.restore(*memory.state())
    for store in (memory, again):
        store.begin()
    state, there = generator.get_state(), environments("Pong")
    play(environments("Pong"), memory, 10, generator)
    play(there, again, 10, generator.set_state(state))
    index = torch.arange(memory.size)
    assert memory.size == again.size
    torch.testing.assert_close(memory.gather(index), again.gather(index))
    with pytest.warns(EvorlWarning, match="another shape"):
        replay(made, 80).restore(*memory.state())


def test_scores_are_true_and_lives_do_not_end_a_game():
    made = environments("Breakout", life_loss_ends=True, kwargs={"max_num_frames_per_episode": 4000})
    lost, games, resets = 0, 0, 0
    for _ in range(500):
        transition = made.step(torch.randint(4, (P, E)))
        ends = int((transition.terminated & transition.valid).sum())
        lost += ends
        resets += int((~transition.valid).sum())
        games = made._return_count.sum()
    assert lost > games > 0, "a game has five lives"
    assert resets <= games
    assert not for_evaluation(Environment(id="ALE/Breakout-v5", life_loss_ends=True)).life_loss_ends


def test_rewards_are_not_clipped():
    made = environments("SpaceInvaders", kwargs={"max_num_frames_per_episode": 4000})
    rewards = torch.cat([made.step(torch.randint(6, (P, E))).reward.flatten() for _ in range(150)])
    assert rewards.max() >= 5


def test_the_memory_of_the_machine_is_a_vector_of_bytes():
    made = environments("Pong", kwargs={"obs_type": "ram"})
    part = made.interface.parts["observation"]
    assert (part.kind, part.shape, part.dtype, part.frames) == ("vector", (128,), torch.uint8, 0)
    assert made.observation["observation"].dtype == torch.uint8


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_population_trains_on_frames(name, in_directory):
    algorithms = {
        "ppo": "{name: ppo, rollout_steps: 8, batch_size: 16, epochs: 1}",
        "dqn": "{name: dqn, batch_size: 8}",
    }
    short = ["evolution.steps=16", "training.max_steps=32", "evaluation.max_steps=8", "population.size=2"]
    layers = "network.convolutions=[{channels: 8, kernel: 8, stride: 8}]"
    chosen = f"algorithm={algorithms[name]}"
    assert train("run.name=a", "environment.id=ALE/Pong-v5", chosen, layers, *short) == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert np.isfinite(rows[-1]["statistics"]["loss"]).all()
    assert config(chosen).environment.life_loss_ends is False
