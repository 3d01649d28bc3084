"""Prioritised draws over ranks against one central list of everything, and what becomes of their errors."""

import numpy as np
import pytest
import torch
from helpers.prioritised import ONES, OWN, PRIORITISED, UNIFORM, E, P, Part, error, members, sync

from evorl.replay.prioritised import EPSILON
from evorl.types.batches import UpdateResult
from evorl.types.outcomes import RunFailed, UserError


class Central:
    """One buffer of all ranks in plain Python: agents' priorities by (rank, slot)."""

    def __init__(self, parts):
        self.parts = parts
        self.priority = [{} for _ in range(P)]
        self.largest = [1.0] * P

    def sync(self):
        """Forget what was overwritten, and give what is new the largest priority."""
        there = {(part.rank, slot) for part in self.parts for slot in part.drawable()}
        for agent in range(P):
            kept = {place: value for place, value in self.priority[agent].items() if place in there}
            self.priority[agent] = {place: kept.get(place, self.largest[agent]) for place in there}

    def overwrite(self, rank, slots):
        for agent in range(P):
            for slot in slots:
                self.priority[agent].pop((rank, slot), None)

    def set(self, agent, rank, slot, value):
        priority = (abs(value) + EPSILON) ** PRIORITISED.exponent
        self.priority[agent][rank, slot] = priority
        self.largest[agent] = max(self.largest[agent], priority)

    def weight(self, agent, rank, slot, beta):
        """(N P(i))^-beta over the largest of the buffer, as the paper has it."""
        every = np.array(list(self.priority[agent].values()))
        weights = (len(every) * every / every.sum()) ** -beta
        return (len(every) * self.priority[agent][rank, slot] / every.sum()) ** -beta / weights.max()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_and_shares_are_those_of_one_central_buffer(ranks):
    """One rank holds less than the others, and nothing at first; rings come round, and some steps are not valid."""
    parts = [Part(rank, rows=8 - 3 * (rank == 1), ranks=ranks) for rank in range(ranks)]
    central = Central(parts)
    for time in range(40):
        for part in parts:
            if part.rank != 1 or time > 3:
                row = part.storage.written % part.storage.ring * P * E
                central.overwrite(part.rank, range(row, row + P * E))
                part.write(valid=0.8 if time else 1.0)
        central.sync()
        sync(parts, steps=10.0 * time)
        beta = 0.4 + 0.6 * 10.0 * time / 1000
        for part in parts:
            every = [sum(v for (rank, _), v in own.items() if rank == part.rank) for own in central.priority]
            np.testing.assert_allclose(part.sampler.tree.total, every, rtol=1e-9)
        if time % 3 == 2:
            continue
        with np.errstate(all="raise"):
            drawn = [part.sampler.draw(2) for part in parts]
        counts = np.stack([(weight > 0).sum(-1).numpy() for _, weight, _ in drawn])
        assert counts.sum(0).tolist() == [[40 * ranks, 24 * ranks]] * 2
        for part, (slots, weight, share) in zip(parts, drawn, strict=True):
            # What metrics are means by: the mean over ranks counts each draw of an agent alike.
            assert torch.equal(share, (weight > 0) / torch.tensor([40.0, 24.0]).unsqueeze(-1))
            for update, agent, at in np.argwhere(weight.numpy() > 0).tolist():
                expected = central.weight(agent, part.rank, int(slots[update, agent, at]), beta) / (40, 24)[agent]
                assert float(weight[update, agent, at]) == pytest.approx(expected, rel=1e-6)
        for update in range(2):
            active = torch.tensor([1.0, float(time % 2)])
            for part, (slots, weight, _) in zip(parts, drawn, strict=True):
                errors = torch.tensor(error(np.arange(P)[:, None], part.rank, slots[update].numpy(), time + update))
                part.sampler.observe(update, UpdateResult(active, errors.float()))
                for agent, at in np.argwhere((weight[update].numpy() > 0) & (active[:, None].numpy() > 0)).tolist():
                    central.set(agent, part.rank, int(slots[update, agent, at]), float(errors[agent, at].float()))


def test_draws_fall_on_ranks_and_slots_as_priorities_do():
    """Three ranks of unequal masses, the last of which is empty."""
    parts, updates = [Part(rank, rows=4, ranks=3) for rank in range(3)], 4000
    for part, rows in zip(parts, (4, 2, 0), strict=True):
        for _ in range(rows):
            part.write()
    sync(parts)
    for part in parts[:2]:
        held = sorted(part.drawable())
        values = np.abs(error(np.arange(P)[:, None], part.rank, np.array(held), 0)) + 0.05
        part.sampler.set(np.tile(held, (P, 1)), values, np.ones((P, len(held)), dtype=bool))
    sync(parts)
    drawn = [part.sampler.draw(updates) for part in parts]
    assert (drawn[2][1] == 0).all()
    for agent, size in enumerate((40, 24)):
        masses = [part.sampler.tree.leaves[agent, :24] for part in parts]
        expected = 3 * size * updates * np.concatenate(masses) / np.concatenate(masses).sum()
        hits = [np.bincount(slots[:, agent][weight[:, agent] > 0].numpy(), minlength=24) for slots, weight, _ in drawn]
        shares = [part.sum() / updates for part in hits]
        assert shares == pytest.approx([part.sum() / updates for part in np.split(expected, 3)], abs=0.05)
        found, likely = np.concatenate(hits), expected > 0
        assert not found[~likely].any()
        # Chi-square with 35 degrees of freedom exceeds 77 once in 20,000 times, and strata only narrow it.
        assert ((found - expected)[likely] ** 2 / expected[likely]).sum() < 77


def test_as_many_draws_as_there_are_equal_priorities_draw_each_once():
    """Each comes from its own stratum: one of 48 slots for agent 0, and one of a pair of them for agent 1."""
    part = Part(rows=8, agents=members(batch_size=(48.0, 24.0)))
    for _ in range(8):
        part.write()
    sync([part])
    slots, weight, _ = part.sampler.draw(5)
    for update in range(5):
        first, second = (sorted(slots[update, agent][weight[update, agent] > 0].tolist()) for agent in range(P))
        assert len(set(first)) == len(first) == 48
        assert len(set(second)) == len(second) == 24


def test_late_errors_never_reach_what_has_taken_their_place():
    part = Part(rows=4)
    for _ in range(4):
        part.write()
    sync([part])
    (slots, *_), before = part.sampler.draw(1), part.storage.oldest
    for _ in range(3):
        part.write()
    sync([part])
    assert part.storage.oldest == before + 3
    part.sampler.observe(0, UpdateResult(ONES, torch.full(slots.shape[1:], 5.0)))
    sync([part])
    alive = {slot for slot in slots.unique().tolist() if slot // (P * E) == 3}
    leaves, largest = part.sampler.tree.leaves, (5 + EPSILON) ** 0.7
    assert alive, "the newest row of then is still there"
    assert set(np.flatnonzero(np.isclose(leaves[0], largest)).tolist()) <= alive
    assert np.flatnonzero(leaves[0]).tolist() == sorted(part.drawable())
    part.write()
    sync([part])
    assert np.isclose(leaves[0], largest).sum() >= P * E, "what is new has the largest priority"


def test_an_update_sees_the_last_error_of_what_it_drew_twice():
    part = Part(rows=1)
    part.write()
    sync([part])
    part.sampler.draw(3)
    for update in (0, 2):
        part.sampler.observe(update, UpdateResult(ONES, torch.full((P, 40), 1.0 + update)))
    sync([part])
    leaves = part.sampler.tree.leaves[0, : P * E]
    assert set(np.round(leaves, 9)) <= {round(x**0.7, 9) for x in (1 + EPSILON, 3 + EPSILON)} | {1.0}
    assert (np.isclose(leaves, (3 + EPSILON) ** 0.7)).sum() >= 4


def test_what_no_agent_learned_from_changes_nothing():
    """Places that only fill up a smaller batch, and agents that sat an update out."""
    part = Part(rows=2)
    part.write()
    sync([part])
    _, weight, _ = part.sampler.draw(1)
    assert (weight[0, 1] > 0).tolist() == [True] * 24 + [False] * 16
    errors = torch.where(weight[0] > 0, 0.5, torch.nan)
    part.sampler.observe(0, UpdateResult(torch.tensor([0.0, 1.0]), errors))
    sync([part])
    leaves = part.sampler.tree.leaves
    assert set(leaves[0, : P * E]) == {1.0}
    assert np.isclose(leaves[1, : P * E], (0.5 + EPSILON) ** 0.7).any()


def test_an_error_that_is_no_number_ends_the_run_with_the_agents_name():
    part = Part(agents=members(11, 12))
    part.write()
    sync([part])
    part.sampler.draw(1)
    errors = torch.ones(P, 40)
    errors[1, 3] = torch.inf
    part.sampler.observe(0, UpdateResult(ONES, errors))
    with pytest.raises(RunFailed, match="errors of agent 12 are not finite"):
        part.sampler.local_totals()
    part.sampler.draw(1)
    with pytest.raises(UserError, match=r"replay\.prioritised: this algorithm's loss gives no errors"):
        part.sampler.observe(0, UpdateResult(ONES, None))


def test_what_an_overflowing_actor_did_gets_the_largest_priority_and_ends_no_run():
    part = Part()
    for _ in range(2):
        part.write()
    errors = np.full((2, P * E), 3.0)
    errors[0, 1], errors[1, 4] = np.nan, np.inf
    errors[1, 5] = 9.0
    part.sampler.insert(errors)
    known, largest = (3 + EPSILON) ** 0.7, (9 + EPSILON) ** 0.7
    expected = np.full(2 * P * E, known)
    expected[[1, P * E + 4, P * E + 5]] = largest
    for own in part.sampler.tree.leaves:
        assert own[: 2 * P * E] == pytest.approx(expected)
    assert part.sampler.maximum == pytest.approx([largest] * P)


def test_what_cannot_be_drawn_does_not_raise_the_largest_priority():
    part = Part()
    part.write()
    part.write(valid=0.0)
    errors = np.full((2, P * E), 3.0)
    errors[1] = 99.0
    part.sampler.insert(errors)
    assert part.sampler.maximum == pytest.approx([(3 + EPSILON) ** 0.7] * P)


def test_importance_goes_to_its_end_with_the_steps_of_a_run():
    steps, importance = np.array([0.0, 50.0]), Part().sampler.importance
    assert importance(1, steps) == pytest.approx([0.4, 0.43])
    assert importance(6, steps) == pytest.approx([0.7, 0.73])
    assert importance(40, steps).tolist() == [1.0, 1.0]


def lanes_of(slots):
    """Whose lanes [0, P) slots are of."""
    return set((slots % (P * E) // E).unique().tolist())


@pytest.mark.parametrize("settings", [OWN, UNIFORM])
def test_agents_draw_only_what_they_or_their_ancestors_did(settings):
    part = Part(settings=settings, rows=8)
    for _ in range(3):
        part.write()
    sync([part])
    slots, weight, _ = part.sampler.draw(20)
    assert [lanes_of(slots[:, agent]) for agent in range(P)] == [{0}, {1}]
    if settings is UNIFORM:
        assert (weight * torch.tensor([40, 24])[:, None]).unique().tolist() == [0.0, 1.0]
    # Agent 1 moves to the first place, and its child takes the second one.
    part.storage.break_lanes()
    part.sampler.begin(members(1, (2, 1)), 2, 1)
    sync([part])
    slots, *_ = part.sampler.draw(20)
    assert [lanes_of(slots[:, agent]) for agent in range(P)] == [{1}, {1}]
    part.write()
    sync([part])
    slots, *_ = part.sampler.draw(200)
    for agent in range(P):
        old = slots[:, agent] < 3 * P * E
        assert lanes_of(slots[:, agent][old]) == {1}
        assert lanes_of(slots[:, agent][~old]) == {agent}
    # To an agent whose parent was not here all is new that its place has seen.
    part.sampler.begin(members((7, 5), 2), 3, 1)
    sync([part])
    slots, *_ = part.sampler.draw(200)
    assert lanes_of(slots[:, 0]) == {0}
    assert set(slots[:, 0].unique().tolist()) == {slot for slot in part.drawable() if slot % 6 < 3}


def test_uniform_draws_from_a_replay_of_ones_own_are_uniform():
    part = Part(settings=UNIFORM, rows=6)
    for _ in range(9):
        part.write(valid=0.7)
    sync([part])
    slots, weight, _ = part.sampler.draw(3000)
    own = sorted(slot for slot in part.drawable() if slot % 6 < 3)
    hits = np.bincount(slots[:, 0][weight[:, 0] > 0].numpy(), minlength=part.storage.size)
    assert hits.sum() == hits[own].sum() == 3000 * 40
    expected = hits.sum() / len(own)
    assert ((hits[own] - expected) ** 2 / expected).sum() < 50


def test_children_go_on_with_the_priorities_of_their_parents():
    part = Part(rows=8)
    for _ in range(2):
        part.write()
    sync([part])
    part.sampler.draw(1)
    part.sampler.observe(0, UpdateResult(ONES, torch.arange(P)[:, None] + torch.rand(P, 40)))
    part.storage.break_lanes()
    part.sampler.begin(members((5, 1), 1), 2, 1)
    before = part.sampler
    assert np.array_equal(before.tree.leaves[0], before.tree.leaves[1])
    assert before.maximum[0] == before.maximum[1] > 1
    part.sampler.begin(members(1, (9, 3)), 3, 1)
    assert (before.tree.leaves[1, : 2 * P * E] == 1.0).all()
    assert before.maximum[1] == 1.0
    assert before.maximum[0] > 1
