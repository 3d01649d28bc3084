"""The replay is one buffer, wherever its parts are, and updates come exactly when they are earned."""

import math

import numpy as np
import pytest
import torch
from helpers.support import interface, uniform_samplers
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.replay.experience import UpdateSchedule
from evorl.replay.samplers import share_of_draws
from evorl.replay.storage import make_replay


@given(
    st.integers(1, 500),
    st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_shares_sum_to_the_draws_and_stay_within_one_of_their_expectation(draws, sizes, offset):
    parts = np.array(sizes)
    shares = [int(share_of_draws(np.array([draws]), parts, rank, np.array([offset]))[0]) for rank in range(len(sizes))]
    assert sum(shares) == draws
    for share, size in zip(shares, sizes, strict=True):
        assert abs(share - draws * size / sum(sizes)) < 1 + 1e-6
        assert share >= 0


def test_equal_parts_draw_equally():
    rng = np.random.default_rng(0)
    for _ in range(200):
        offset = rng.random(1)
        assert [int(share_of_draws(np.array([96]), np.array([40, 40, 40]), r, offset)[0]) for r in range(3)] == [32] * 3


def test_draws_are_uniform_over_the_union_of_unequal_parts():
    sizes, batch_size = (10, 35, 5), (12, 21)
    hits = np.zeros((2, sum(sizes)))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    updates = 6000
    for rank, sampler in enumerate(uniform_samplers(sizes, *batch_size)):
        index, weight, _ = sampler.draw(updates)
        for agent in range(2):
            drawn = index[:, agent][weight[:, agent] > 0].numpy()
            np.add.at(hits[agent], starts[rank] + drawn, 1)
    for agent in range(2):
        expected = updates * batch_size[agent] / sum(sizes)
        assert hits[agent].sum() == updates * batch_size[agent]
        # Chi-square with 49 degrees of freedom exceeds 95 once in 10,000 times; the seeds are fixed.
        assert ((hits[agent] - expected) ** 2 / expected).sum() < 95


def test_the_mean_over_ranks_is_the_mean_over_the_union():
    values = [torch.arange(10.0), torch.arange(10.0, 40.0)]
    parts = [sampler.draw(3000) for sampler in uniform_samplers((10, 30), 10, 16)]
    total = sum((values[rank][index] * weight).sum(-1) for rank, (index, weight, _) in enumerate(parts)) / 2
    assert torch.allclose(total.mean(0), torch.full((2,), 19.5), atol=0.3)
    weights = sum(weight.sum(-1) for _, weight, _ in parts) / 2
    torch.testing.assert_close(weights, torch.ones_like(weights))


@pytest.mark.parametrize("learn_step", [1, 3, 7, 2.5, 0.5, 120])
@pytest.mark.parametrize("each", [1, 8, 5])
def test_updates_come_exactly_as_they_are_earned(learn_step, each):
    cadence = UpdateSchedule(np.array([float(learn_step)]), np.zeros(1))
    done = 0
    for step in range(1, 400):
        done += int(cadence.due(np.array([float(each)]))[0])
        assert done == np.floor(step * each / learn_step + 1e-9)


def test_credit_carries_into_the_next_generation():
    credit, done = np.zeros(1), 0
    for _ in range(10):
        cadence = UpdateSchedule(np.array([3.0]), credit)
        done += int(cadence.due(np.array([10.0]))[0])
        credit = cadence.debt()
    assert done == 33
    assert credit[0] == pytest.approx(1 / 3)


def test_what_a_part_lacks_is_drawn_from_the_rest_of_it():
    """Ranks share draws by the sizes that all of them count on; this one holds 7 transitions instead of 40."""
    (sampler, *_) = uniform_samplers((40, 40), 192, drawable=7)
    index, weight, _ = sampler.draw(50)
    assert (weight > 0).sum(-1).unique().tolist() == [96]
    assert index.unique().tolist() == list(range(7))


@pytest.mark.parametrize(("capacity", "rows"), [(1, 1), (7, 1), (8, 2), (500, 125)])
def test_a_replay_never_keeps_more_than_it_is_asked_for_but_one_step_of_all(capacity, rows):
    made = make_replay(capacity, 4, interface(), ((), torch.int64), torch.device("cpu"))
    assert (made.rows, made.lanes) == (rows, 4)


def test_forbidden_actions_are_kept_with_what_was_seen():
    made = make_replay(8, 2, interface(masked=True), ((), torch.int64), torch.device("cpu"))
    assert made.seen["action_mask"].shape == (made.ring, 2, 3)
    assert made.seen["action_mask"].dtype == torch.bool


def test_final_observations_of_a_replay_on_a_gpu_must_fit_too(monkeypatch):
    sizes = []
    monkeypatch.setattr("evorl.replay.storage.check_room", lambda size, *_, device, **__: sizes.append(size))
    for kind in ("cpu", "meta"):
        make_replay(1_000, 2, interface(), ((), torch.int64), torch.device(kind))
    seen = sum(4 * math.prod(part.shape) for part in interface().parts.values())
    assert sizes[1] - sizes[0] == pytest.approx(1_000 * seen, rel=0.01)
