"""Steps in which an environment raised: replays, rollouts, evaluations and whole runs learn nothing false from them."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.support import agent, fields_of, kept, lines, output_of, replay_experience, replay_of, train, vector
from helpers.worlds import E, P, T, World, check_rollouts, flat, next_state, played, value_of

from evorl.config import Environment
from evorl.envs import Environments
from evorl.population.evaluation import evaluate
from evorl.types.batches import Transition


class Still:
    """A policy that does always the same."""

    def initial_state(self, num_envs):
        return torch.zeros(2, num_envs, 0, 0)

    def act(self, observation, started, state, deterministic):
        assert deterministic
        return output_of(torch.zeros(2, 2, dtype=torch.int64)), state


@pytest.mark.parametrize(("max_steps", "expected"), [(None, 4.0), (3, 3.0)])
def test_an_evaluation_counts_the_episode_after_the_dropped_one(max_steps, expected):
    """One environment of each agent fails at step 3, and would return 6, or 2 had it been given up."""
    kwargs = {"episode": 0, "step": 3, "seeds": [5, 7]}
    made = Environments(Environment(id="helpers.faults:Failing-v0", kwargs=kwargs), 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returns = evaluate(Still(), made, (4, 5), max_steps).returns
    assert returns.tolist() == [[expected] * 2] * 2


def replay(lockstep=True, rows=2, gather=lambda numbers: numbers[None]):
    storage = replay_of(rows, 4, vector(1))
    experience = replay_experience(storage, learning_starts=1, gather=gather, lockstep=lockstep, part=0, rank=0)
    experience.counted = []
    agents = [agent(id=index, learn_step=1e9, batch_size=1.0) for index in range(2)]
    experience.begin(SimpleNamespace(agents=agents, acted=experience.counted.append), 1)
    return experience


def add(experience, step, valid, before=((True, True), (True, True))):
    """A step of 2 agents in 2 environments; its fields tell its number, which is -1 where it is no transition."""
    valid, number = torch.tensor(valid), torch.arange(4).view(2, 2) + 4 * step
    row, never = torch.where(valid, number, -1), torch.zeros(2, 2, dtype=torch.bool)
    seen, after = ({"observation": values.unsqueeze(-1).float()} for values in (number, number + 4))
    experience.add(
        Transition(seen, ~torch.tensor(before), row.float(), after, never, never, valid, bool(valid.all())),
        output_of(row),
    )


def rows(experience):
    """The numbers of the steps that can be drawn, oldest first."""
    fields = kept(experience.storage)
    number = fields["action"].float()
    assert torch.equal(fields["reward"], number)
    assert torch.equal(fields["observation.observation"][:, 0], number)
    assert torch.equal(fields["next_observation.observation"][:, 0], number + 4)
    return fields["action"].tolist()


DROPS = [[True, False], [True, True]]
NOTHING = [[False, False], [False, False]]


def test_in_lockstep_nothing_stands_in_for_a_step_that_was_dropped_also_after_a_checkpoint():
    experience, resumed = replay(), replay()
    add(experience, 0, [[True, True], [True, True]])
    add(experience, 1, DROPS)
    assert rows(experience) == [0, 1, 2, 3, 4, 6, 7]
    resumed.load_state_dict(experience.state_dict())
    for each in (experience, resumed):
        add(each, 2, NOTHING, before=DROPS)
        assert rows(each) == [4, 6, 7]
    assert not list(experience.take_batches())
    assert experience.counted[0].tolist() == [6.0, 6.0], "other ranks count on as many steps as they make"


def test_in_lockstep_ranks_share_draws_as_if_nothing_had_been_dropped_and_draw_only_what_happened():
    """Two ranks hold as much: of 2 x 32 draws 32 fall on this one, which drops 5 of its 16 steps."""
    experience, told = replay(rows=4, gather=lambda numbers: np.stack([numbers, numbers])), []
    members = [agent(id=index, learn_step=2.0, batch_size=32.0) for index in range(2)]
    experience.begin(SimpleNamespace(agents=members, acted=told.append), 1)
    batches, before = [], [[True, True], [True, True]]
    for step, valid in enumerate((DROPS, NOTHING, [[True, True], [True, True]], [[True, True], [True, True]])):
        add(experience, step, valid, before)
        batches += experience.take_batches()
        before = valid
    assert [steps.tolist() for steps in told] == [[4.0, 4.0]] * 4
    assert [batch.due.tolist() for batch in batches] == [[1.0, 1.0]] * 4
    for batch in batches:
        assert ((batch.weight > 0).sum(1) == 32).all()
        assert (batch.columns["action"] >= 0).all()
    assert batches[-1].columns["action"].unique().tolist() == rows(experience) == [0, 2, 3, *range(8, 16)]


def test_without_lockstep_dropped_steps_are_left_out():
    experience = replay(lockstep=False)
    add(experience, 0, NOTHING)
    add(experience, 1, [[True, False], [False, True]], before=NOTHING)
    assert rows(experience) == [4, 7]
    assert not list(experience.take_batches())
    assert experience.counted[0].tolist() == [1.0, 1.0]


class Faulty(World):
    """A world in which some steps were dropped in the middle of an episode, with a reward that nothing may know of."""

    def __init__(self, seed=0, next_step=False, recurrent=False, gained=-99.0):
        super().__init__(seed, next_step, recurrent)
        generator = torch.Generator().manual_seed(100 + seed)
        fails = torch.rand(2 * T, P, E, generator=generator) < 0.3
        kept, began = torch.zeros(P, E, 1, 1), torch.zeros(P, E, dtype=torch.bool)
        for t, (step, output) in enumerate(self.steps):
            drops = fails[t] & step.valid & ~(step.terminated | step.truncated)
            seen, started = step.observation, step.started | began
            valid = step.valid & ~drops
            reward = torch.where(drops, gained, step.reward)
            if recurrent:
                before = torch.where(started[..., None, None], 0.0, kept)
                extras = output.extras | {"value": value_of(seen, before)}
                output = output_of(output.action, kept, next_state(seen, before), **extras)
                kept = output.next_state
            self.steps[t] = (replace(step, started=started, reward=reward, valid=valid, all_valid=False), output)
            began = drops
        self.dropped = int((fails & torch.stack([~step.valid for step, _ in self.steps])).sum())

    def at(self, t, p, e):
        step = super().at(t, p, e)
        # To the step before one that was dropped this is as if its episode had been cut there.
        step.truncated |= t + 1 < 2 * T and not self.steps[t + 1][0].valid[p, e]
        return step


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_dropped_step_is_not_learned_from_and_cuts_returns(seed, next_step, recurrent):
    world = Faulty(seed, next_step, recurrent)
    assert world.dropped > 10
    check_rollouts(world)


def test_reward_of_a_dropped_step_changes_nothing_learned():
    settings = {"normalize_rewards": True, "normalize_advantage": True, "sequence": 2}
    one, other = (flat(played(Faulty(gained=gained), **settings)) for gained in (-99.0, 5.0))
    assert one
    for mine, its in zip(one, other, strict=True):
        assert torch.equal(mine.weight, its.weight)
        other_fields = fields_of(its)
        for name, values in fields_of(mine).items():
            assert torch.equal(values[mine.weight > 0], other_fields[name][its.weight > 0]), name


@pytest.mark.parametrize("algorithm", ["{name: dqn, batch_size: 8}", "{name: ppo, rollout_steps: 8, batch_size: 8}"])
def test_dropped_steps_keep_the_number_of_updates(algorithm, in_directory):
    common = [f"algorithm={algorithm}", "training.max_steps=160", "evolution.hyperparameters={}"]
    if "dqn" in algorithm:
        common.append("replay.learning_starts=8")
    for name, how in (("faulty", "step"), ("sound", "nothing")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kwargs = f"{{how: {how}, seeds: odd}}"
            given = f"environment={{id: 'helpers.faults:Failing-v0', num_envs: 2, kwargs: {kwargs}, max_restarts: 99}}"
            assert train(f"run.name={name}", given, *common) == 0
    faulty, sound = (lines(in_directory / "runs" / name / "metrics.jsonl") for name in ("faulty", "sound"))
    assert [row["updates"] for row in faulty[:2]] == [row["updates"] for row in sound[:2]]
    assert faulty[1]["global_steps"] < sound[1]["global_steps"], "some steps are meant to have been dropped"
    assert all(value == 4.0 for row in faulty for value in row["train_return"] if value is not None)
    assert np.isfinite([row["metrics"]["loss"] for row in faulty]).all()
