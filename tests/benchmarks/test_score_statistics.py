"""The statistics of the evidence against values worked by hand and slow, obvious implementations."""

import sys
from itertools import combinations, product

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from score_statistics import (
    best_of,
    bootstrap,
    interquartile_mean,
    probability_of_improvement,
    successive_halving,
)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([range(1, 9)], 4.5),
        ([range(1, 11)], 5.5),
        ([[1, 2], [3, 4], [5, 1000]], 3.5),
        ([[7]], 7.0),
        ([[0, 0, 3]], 1.0),
    ],
)
def test_the_interquartile_mean_cuts_whole_runs_off_either_end(scores, expected):
    assert interquartile_mean([np.array(task, dtype=float) for task in scores]) == expected


def test_the_probability_of_improvement_counts_pairs_and_halves_ties():
    rng = np.random.default_rng(0)
    ours, theirs = ([rng.integers(5, size=size).astype(float) for size in sizes] for sizes in ((8, 3), (6, 4)))
    shares = []
    for x, y in zip(ours, theirs, strict=True):
        wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y)
        shares.append(wins / (len(x) * len(y)))
    assert probability_of_improvement(ours, theirs) == pytest.approx(sum(shares) / 2)
    # A task weighs as much as another one, however many runs it has.
    one, many = np.array([1.0]), np.zeros(7)
    assert probability_of_improvement([one, many], [many, many]) == 0.75


def test_the_bootstrap_resamples_runs_within_each_task():
    """With three runs of one task and two of another all resamples can be listed."""
    tasks = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 20.0])]

    def mean(scores):
        return float(np.mean([task.mean() for task in scores]))

    each = [[np.array(chosen) for chosen in product(task, repeat=len(task))] for task in tasks]
    exact = [mean(pair) for pair in product(*each)]
    found = bootstrap(mean, tasks, repetitions=20_000, confidence=0.5, rng=np.random.default_rng(0))
    assert found.value == mean(tasks)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(exact, [25, 75])), abs=0.2)


def test_the_bootstrap_of_two_groups_resamples_both():
    ours, theirs = [np.array([0.0, 2.0])], [np.array([1.0, 1.0])]
    found = bootstrap(probability_of_improvement, ours, theirs, rng=np.random.default_rng(0))
    assert found == (0.5, 0.0, 1.0)
    found = bootstrap(probability_of_improvement, theirs, ours, rng=np.random.default_rng(0))
    assert found == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_subsets(k):
    fitness, scores = np.array([3.0, 1.0, 3.0, 0.0, 2.0]), np.array([10.0, 20.0, 30.0, 40.0, 50.0])

    def handed_out(chosen):
        best = max(fitness[place] for place in chosen)
        return np.mean([scores[place] for place in range(5) if fitness[place] == best])

    expected = np.mean([handed_out(chosen) for chosen in combinations(range(5), k)])
    assert best_of(k, fitness, scores) == pytest.approx(expected)


def test_successive_halving_drops_the_worse_half_for_good():
    fitness = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 9.0, 8.0], [99.0, 99.0, 1.0, 5.0]])
    scores = np.array([-1.0, -2.0, -3.0, -4.0])
    assert successive_halving(fitness, scores, rungs=(1, 2)) == (-3.0, 4 + 2 + 1)
    assert successive_halving(fitness, scores, rungs=(1,)) == (-4.0, 4 + 2 + 2)
    assert successive_halving(fitness, scores, rungs=()) == (-1.0, 12)
