"""The tree of priorities against plain arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.replay.prioritised import PriorityTree


def check(tree, dense):
    """Every node is the sum of its leaves, and every fraction finds the leaf that it falls on."""
    agents, leaves = dense.shape
    padded = np.pad(dense, ((0, 0), (0, tree.leaves.shape[1] - leaves)))
    for level, values in enumerate(tree.levels):
        np.testing.assert_allclose(values, padded.reshape(agents, -1, 1 << level).sum(-1), rtol=1e-12)
    np.testing.assert_array_equal(tree.minimum, np.where(dense > 0, dense, np.inf).min(1))
    fraction = np.broadcast_to(np.linspace(0, 1, 97, endpoint=False), (agents, 97))
    found, priority = tree.find(fraction)
    for agent in np.flatnonzero(dense.sum(1) > 0):
        edges = np.concatenate([[0], dense[agent].cumsum()]) / dense[agent].sum()
        assert (priority[agent] == dense[agent, found[agent]]).all()
        assert (priority[agent] > 0).all()
        assert (edges[found[agent]] <= fraction[agent] + 1e-12).all()
        assert (edges[found[agent] + 1] >= fraction[agent] - 1e-12).all()


@given(seed=st.integers(0, 2**20), agents=st.integers(1, 4), leaves=st.integers(1, 70), changes=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_it_is_what_arrays_are(seed, agents, leaves, changes):
    random = np.random.default_rng(seed)
    tree, dense = PriorityTree(agents, leaves), np.zeros((agents, leaves))
    for _ in range(changes):
        kind = random.integers(4)
        if kind == 0:
            start, stop = np.sort(random.integers(0, leaves + 1, 2))
            # Of few values, so that the smallest is often there twice, or lost.
            values = random.integers(0, 4, (agents, stop - start)).astype(float)
            tree.fill(start, stop, values)
            dense[:, start:stop] = values
        elif kind == 1 and random.random() < 0.3:
            sources = random.integers(-1, agents, agents)
            tree.take_over(sources)
            dense = np.where(sources[:, None] < 0, 0.0, dense[sources])
        else:
            count = random.integers(1, 40)
            slots, where = random.integers(0, leaves, (agents, count)), random.random((agents, count)) < 0.8
            values = random.integers(1, 4, (agents, count)) * 10.0 ** random.integers(-6, 6)
            tree.set(slots, values, where)
            for agent, at in zip(*np.nonzero(where), strict=True):
                dense[agent, slots[agent, at]] = values[agent, at]
        check(tree, dense)


def test_rounding_never_leads_to_what_cannot_be_drawn():
    """Largest fractions and sums that round: without care half of these end on a leaf of 0."""
    random = np.random.default_rng(1)
    for _ in range(300):
        tree, last = PriorityTree(1, 64), random.integers(1, 40)
        tree.fill(0, last, random.random((1, last)) * 10.0 ** random.integers(-8, 8, (1, last)))
        found, priority = tree.find(np.full((1, 1), np.nextafter(1.0, 0.0)))
        assert priority[0, 0] > 0
        assert found[0, 0] < last


@pytest.mark.parametrize(("leaves", "size"), [(1, 2), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_memory_is_known_before_it_is_taken(leaves, size):
    tree = PriorityTree(3, leaves)
    assert tree.leaves.shape == (3, size)
    taken = sum(level.nbytes for level in tree.levels)
    assert PriorityTree.memory(3, leaves) - 3 * 8 == taken
