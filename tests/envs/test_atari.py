"""Atari: frames kept once, true scores, whole games, and the machine's memory as an observation."""

from contextlib import closing

import pytest
import torch
from helpers.support import agent, config, kept

from evorl.algorithms import make_algorithm
from evorl.config import Environment
from evorl.envs import Environments, continuation
from evorl.envs.reading import ObservationReader
from evorl.envs.vector import for_evaluation, stacked_frames
from evorl.population import initial_population
from evorl.population.evaluation import evaluate
from evorl.replay.storage import make_replay
from evorl.runs.output.video import play as film_of
from evorl.runs.reading.loaded import LoadedAgent
from evorl.types.outcomes import UserError

pytest.importorskip("ale_py")
P, E = 2, 2


def environments(game, **settings):
    kwargs = {"max_num_frames_per_episode": 160, **settings.pop("kwargs", {})}
    made = Environments(Environment(id=f"ALE/{game}-v5", kwargs=kwargs, **settings), P, E)
    made.reset(3)
    return made


def replay(made, capacity):
    return make_replay(capacity, P * E, made.interface, ((), torch.int64), torch.device("cpu"))


def flat(values):
    return {name: value.flatten(0, 1) for name, value in values.items()}


def play(made, memory, steps, generator, first=0):
    """Act at random, remember it under the number of the step, and give what really happened."""
    truth = {}
    for step in range(first, first + steps):
        action = torch.randint(made.interface.action.n, (P, E), generator=generator)
        seen = made.observation
        transition = made.step(action)
        columns = {"action": torch.full((P, E), step), "reward": transition.reward, "terminated": transition.terminated}
        memory.write(
            flat(seen), flat(columns), next_observation=flat(transition.next_observation),
            valid=transition.valid.flatten(), started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )  # fmt: skip
        truth[step] = seen["observation"], transition.next_observation["observation"], transition.valid
    return truth


@pytest.mark.parametrize(("game", "carries"), [("Pong", True), ("Breakout", False)])
def test_frames_are_kept_once_and_stacks_come_back_as_they_were_seen(game, carries):
    """Also after a generation's end, whether episodes begin anew there or run on."""
    made, generator = environments(game), torch.Generator().manual_seed(0)
    memory = replay(made, 400)
    truth = play(made, memory, 130, generator)
    made.begin(9, [agent(), agent(id=1)], carries)
    memory.break_lanes()
    truth |= play(made, memory, 60, generator, first=130)
    resets = sum(int((~valid).sum()) for _, _, valid in truth.values())
    assert resets > 10, "episodes are meant to end"
    drawn = kept(memory)
    steps, counts = drawn["action"].unique(return_counts=True)
    assert 370 <= memory.drawable <= 400
    assert steps.max() == 189
    assert 130 in steps
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
        before, after, valid = truth[step]
        rows = drawn["action"] == step
        assert count == valid.sum()
        assert torch.equal(drawn["observation.observation"][rows], before[valid])
        assert torch.equal(drawn["next_observation.observation"][rows], after[valid])
    assert memory.seen["observation"].shape == (400 // (P * E) + 4, P * E, 84, 84)
    assert memory.memory(second_ring=False) < memory.size * (84 * 84 + 24) + 84 * 84


def test_scores_are_true_and_lives_do_not_end_a_game():
    made = environments("Breakout", life_loss_ends=True, kwargs={"max_num_frames_per_episode": 4000})
    lost, resets = 0, 0
    for _ in range(500):
        transition = made.step(torch.randint(4, (P, E)))
        ends = int((transition.terminated & transition.valid).sum())
        lost += ends
        resets += int((~transition.valid).sum())
    games = made.pop_collected().ended.sum()
    assert lost > games > 0, "a game has five lives"
    assert resets <= games + lost


@pytest.mark.parametrize("option", ["life_loss_info", "episodic_life"])
def test_options_that_score_lives_are_refused(option):
    with pytest.raises(UserError, match=f"environment.kwargs.{option}: use environment.life_loss_ends"):
        environments("Breakout", kwargs={option: True})


def test_lives_need_an_environment_that_reports_them_also_in_evaluation():
    with pytest.raises(UserError, match="only Atari's image environments report lives, not CartPole-v1"):
        Environments(Environment(id="CartPole-v1", life_loss_ends=True), 1, 1, whole_games=True)


def test_a_game_that_is_truncated_as_a_life_is_lost_is_over():
    """ALE reports the lost life alone. A ball that nobody meets is lost in step 25, in which frame 98 comes."""
    kwargs = {
        "repeat_action_probability": 0.0, "noop_max": 0, "use_fire_reset": False, "max_num_frames_per_episode": 98
    }  # fmt: skip
    made = Environments(Environment(id="ALE/Breakout-v5", life_loss_ends=True, kwargs=kwargs), 1, 1)
    made.reset(0)
    steps = [made.step(torch.tensor([[int(number == 1)]])) for number in range(1, 28)]
    assert [number for number, step in enumerate(steps, 1) if step.terminated] == [25]
    assert [number for number, step in enumerate(steps, 1) if not step.valid] == [26]
    assert [number for number, step in enumerate(steps, 1) if step.started] == [1, 27]
    collected = made.pop_collected()
    assert (collected.ended, collected.steps) == (1, 26)


@pytest.mark.parametrize("whole_games", [False, True])
def test_a_ball_is_served_after_each_life_although_the_agent_never_fires(whole_games):
    """Breakout waits for FIRE after each of five lives; an agent that does nothing then loses the next in 25 steps."""
    settings = Environment(id="ALE/Breakout-v5", life_loss_ends=True, kwargs={"repeat_action_probability": 0.0})
    made = Environments(settings, 1, 2, whole_games=whole_games)
    made.reset(3)
    steps = [made.step(torch.zeros(1, 2, dtype=torch.int64)) for _ in range(260)]
    ends = torch.stack([step.terminated for step in steps])[:, 0]
    valid = torch.stack([step.valid for step in steps])[:, 0]
    for copy in range(2):
        at = ends[:, copy].nonzero().squeeze(1)
        assert len(at) >= (2 if whole_games else 10), "games or lives"
        after = at[at < 259] + 1
        assert torch.equal((~valid[:, copy]).nonzero().squeeze(1), after), "a FIRE or a reset follows each end, alone"


def test_a_film_shows_the_whole_games_that_are_evaluated():
    settings = config(
        "environment={id: ALE/Breakout-v5, life_loss_ends: true, kwargs: {repeat_action_probability: 0.0}}",
        "network.convolutions=[{channels: 8, kernel: 8, stride: 8}]",
    )
    where = for_evaluation(settings.environment)
    with closing(Environments(where, 1, 2, whole_games=True)) as made:
        algorithm = make_algorithm(settings, made.interface)
        one, *_ = initial_population(settings, algorithm)
        reader = ObservationReader(where, made.interface.observation, str, stacked_frames(where))
        player = LoadedAgent(one, settings, algorithm, reader)
        evaluated = evaluate(player._policy, made, [5, 6], None)
    for seed, gained, steps in zip([5, 6], evaluated.returns[0], evaluated.steps[0], strict=True):
        film = list(film_of(player, settings.environment, [seed], None, "rgb_array"))
        assert film[-1][1] == gained
        assert len(film) == steps + 1 > 100, "five lives of at least 20 steps"


def test_only_games_that_fire_in_resets_are_served():
    for kwargs in ({}, {"use_fire_reset": False}):
        made = Environments(Environment(id="ALE/Breakout-v5", life_loss_ends=True, kwargs=kwargs), 1, 1)
        assert (made._resets.serving_action is None) == bool(kwargs)
    assert Environments(Environment(id="ALE/Breakout-v5"), 1, 1)._resets.serving_action is None
    assert Environments(Environment(id="ALE/Freeway-v5", life_loss_ends=True), 1, 1)._resets.serving_action is None
    continuous = Environment(id="ALE/Breakout-v5", life_loss_ends=True, kwargs={"continuous": True})
    made = Environments(continuous, 1, 1)
    made.reset(0)
    ends = sum(int(made.step(torch.zeros(1, 1, 3)).terminated) for _ in range(150))
    assert ends >= 5


def test_rewards_are_not_clipped():
    made = environments("SpaceInvaders", kwargs={"max_num_frames_per_episode": 4000})
    rewards = torch.cat([made.step(torch.randint(6, (P, E))).reward.flatten() for _ in range(150)])
    assert rewards.max() >= 5


def test_the_memory_of_the_machine_is_a_vector_of_bytes():
    made = environments("Pong", kwargs={"obs_type": "ram"})
    part = made.interface.parts["observation"]
    assert (part.kind, part.shape, part.dtype, part.frames) == ("vector", (128,), torch.uint8, 0)
    assert made.observation["observation"].dtype == torch.uint8


def test_another_process_goes_on_with_episodes_beyond_the_last_seed(monkeypatch):
    """Copies get other seeds at different steps, and what is played again begins with the oldest of them."""
    monkeypatch.setattr(continuation, "SEED_LASTS", 60)
    settings = Environment(id="ALE/Breakout-v5", life_loss_ends=True, kwargs={"repeat_action_probability": 0.25})
    made = [Environments(settings, 1, 2) for _ in range(2)]
    made[0].reset(3)
    acted = torch.randint(4, (500, 1, 2), generator=torch.Generator().manual_seed(0))
    for action in acted[:400]:
        made[0].step(action)
    ages = made[0].state_dict()["ages"]
    assert ages.max() < 400
    assert ages[0] != ages[1]
    assert made[1].load_state_dict({name: value.clone() for name, value in made[0].state_dict().items()}, seed=9) == ""
    for action in acted[400:]:
        ours, theirs = (each.step(action) for each in made)
        assert torch.equal(ours.next_observation["observation"], theirs.next_observation["observation"])
        assert torch.equal(ours.reward, theirs.reward)
        assert torch.equal(ours.valid, theirs.valid)
        assert torch.equal(ours.terminated, theirs.terminated)
