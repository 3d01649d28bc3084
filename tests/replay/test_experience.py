"""What agents remember: only what happened, counted the same on all ranks that hold them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.support import agent, fields_of, kept, output_of, replay_experience, replay_of, seen, vector

from evorl.envs.spaces import ObservationSpec
from evorl.replay.batches import BatchBuilder, SequenceBuilder
from evorl.types.batches import Transition

P, E = 2, 3


def experience_of(gather, lockstep, part=0, starts=1, clip=None):
    return replay_experience(
        replay_of(16, P * E, vector(2)), learning_starts=starts, gather=gather, lockstep=lockstep, part=part,
        reward_clip=clip, rank=part,
    )  # fmt: skip


def members(**hyperparameters):
    agents = [agent(id=index, batch_size=4.0, **hyperparameters) for index in range(P)]
    counted = []
    return SimpleNamespace(agents=agents, acted=counted.append, counted=counted)


def transition(valid, reward=1.0):
    flags = torch.zeros(P, E, dtype=torch.bool)
    shown = torch.arange(P * E * 2.0).view(P, E, 2)
    rewards = torch.where(valid, reward, -99.0)
    return Transition(seen(shown), flags, rewards, {"observation": shown + 1}, flags, flags, valid, bool(valid.all()))


def alone(numbers):
    return numbers[None]


def test_reset_steps_are_neither_stored_nor_counted():
    experience, group = experience_of(alone, lockstep=False), members(learn_step=1.0)
    experience.begin(group, 1)
    valid = torch.tensor([[True, False, True], [True, True, True]])
    experience.add(transition(valid), output_of(torch.zeros(P, E, dtype=torch.int64)))
    assert kept(experience.storage)["reward"].tolist() == [1.0] * 5
    batches = list(experience.take_batches())
    assert [due.due.tolist() for due in batches] == [[1, 1], [1, 1], [0, 1]]
    assert [steps.tolist() for steps in group.counted] == [[2.0, 3.0]]


def test_ranks_learn_when_their_steps_are_earned_on_average():
    """This rank made 3 steps of each agent, the other rank 2 and 3."""
    other = np.array([10.0, 0.0, 2.0, 3.0])
    experience = experience_of(lambda numbers: np.stack([numbers, other[: len(numbers)]]), lockstep=False)
    group = members(learn_step=1.0)
    experience.begin(group, 1)
    everywhere = torch.ones(P, E, dtype=torch.bool)
    experience.add(transition(everywhere), output_of(torch.zeros(P, E, dtype=torch.int64)))
    batches = list(experience.take_batches())
    assert [due.due.tolist() for due in batches] == [[1, 1], [1, 1], [0, 1]]
    assert experience._schedule.debt() == pytest.approx([0.5, 0.0])
    assert [steps.tolist() for steps in group.counted] == [[5.0, 6.0]], "exploration falls alike on both ranks"


def test_learning_may_cut_rewards():
    experience = experience_of(alone, lockstep=True, clip=0.5)
    experience.begin(members(learn_step=1.0), 1)
    experience.add(transition(torch.ones(P, E, dtype=torch.bool), reward=-7.0), output_of(torch.zeros(P, E).long()))
    assert kept(experience.storage)["reward"].tolist() == [-0.5] * 6


@pytest.mark.parametrize("builder", [BatchBuilder, lambda storage: SequenceBuilder(storage, 2, 1)])
def test_batches_are_the_same_however_many_are_gathered_at_once(builder, monkeypatch):
    found = []
    for limit in (2**28, 1, 700):
        monkeypatch.setattr("evorl.replay.replay.GATHERED_BYTES", limit)
        storage = replay_of(16, P * E, vector(2))
        experience = replay_experience(storage, builder(storage), learning_starts=1, gather=alone, lockstep=False)
        experience.begin(members(learn_step=0.5, gamma=0.9), 1)
        for _ in range(3):
            experience.add(transition(torch.ones(P, E, dtype=torch.bool)), output_of(torch.zeros(P, E).long()))
        found.append(list(experience.take_batches()))
    whole, *others = found
    assert len(whole) > 6
    for other in others:
        assert [batch.number for batch in other] == list(range(len(whole)))
        for mine, theirs in zip(whole, other, strict=True):
            torch.testing.assert_close(fields_of(mine), fields_of(theirs), rtol=0, atol=0)
            assert (mine.due.tolist(), mine.all_due) == (theirs.due.tolist(), theirs.all_due)


def test_nothing_is_learned_before_the_union_holds_enough():
    experience = experience_of(alone, lockstep=True, starts=10)
    experience.begin(members(learn_step=3.0), 1)
    everywhere = torch.ones(P, E, dtype=torch.bool)
    due = []
    for _ in range(4):
        experience.add(transition(everywhere), output_of(torch.zeros(P, E, dtype=torch.int64)))
        due.append(len(list(experience.take_batches())))
    assert due == [0, 1, 1, 1]


@pytest.mark.parametrize(("others", "learns"), [((10.0, 1.0), True), ((10.0, 0.0), False)])
def test_learning_starts_once_all_rings_are_full_though_resets_take_some_of_their_room(others, learns):
    ring = replay_of(4, P * E, ObservationSpec("vector", (2, 1), torch.uint8, frames=2))
    experience = replay_experience(
        ring, learning_starts=34, gather=lambda numbers: np.stack([numbers, [*others, 6.0, 6.0][: len(numbers)]]),
        lockstep=False, part=0, rank=0,
    )  # fmt: skip
    experience.begin(members(learn_step=3.0), 1)
    updates = []
    for step in range(12):
        valid = torch.full((P, E), step % 4 != 3)
        shows = {"observation": torch.zeros(P, E, 2, 1, dtype=torch.uint8)}
        never = torch.zeros(P, E, dtype=torch.bool)
        step_made = Transition(shows, ~valid, torch.zeros(P, E), shows, never, never, valid, bool(valid.all()))
        experience.add(step_made, output_of(torch.zeros(P, E, dtype=torch.int64)))
        updates.append(len(list(experience.take_batches())))
    assert ring.drawable < 24
    assert not any(updates[:2]), "four rows, one of which holds the first stack's older frame"
    assert (updates[-1] > 0) == learns


def test_agents_keep_the_share_of_an_update_that_they_have_earned():
    experience, group = experience_of(alone, lockstep=True), members(learn_step=2.0)
    updates = 0
    for generation in range(4):
        experience.begin(group, generation)
        experience.add(transition(torch.ones(P, E, dtype=torch.bool)), output_of(torch.zeros(P, E, dtype=torch.int64)))
        updates += len(list(experience.take_batches()))
        experience.end(group.agents)
    assert updates == 6, "12 steps at a learn step of 2"
    assert group.agents[0].state.update_debt == 0.0
