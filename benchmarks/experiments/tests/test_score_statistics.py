"""The statistics of the evidence against values worked by hand and slow, obvious implementations."""

import sys
from itertools import combinations, product

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
from score_statistics import (
    bootstrap,
    probability_of_improvement,
    shares_of_trials,
    worth_in_trials,
)


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


def test_the_shares_of_trials_are_the_weights_of_the_best_of_k():
    fitness, scores = np.array([3.0, 1.0, 4.0, 0.0, 2.0]), np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    expected = [
        np.mean([scores[max(chosen, key=lambda place: fitness[place])] for chosen in combinations(range(5), k)])
        for k in range(1, 6)
    ]
    assert shares_of_trials(5) @ scores[np.argsort(fitness)] == pytest.approx(expected)
    assert shares_of_trials(640).sum(1) == pytest.approx(np.ones(640))


def test_the_worth_in_trials_is_the_number_whose_expected_best_is_the_mean():
    pool = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    # The expected best of 1, 2, 3, 4 of the scores 0 to 3 is 1.5, 5 (4 + 2 + ...) / 6 and so on, by subsets.
    curve = [np.mean([max(chosen) for chosen in combinations(range(4), k)]) for k in (1, 2, 3, 4)]
    for mean, expected in ((curve[0], 1), (curve[1], 2), ((curve[1] + curve[2]) / 2, 2.5), (-9.0, 1), (9.0, 4)):
        found = worth_in_trials(np.array([mean - 1, mean + 1]), [pool[:2], pool[2:]], 10, rng=np.random.default_rng(0))
        assert found.value == pytest.approx(expected)
    # Runs that are alike and pools that are alike leave no uncertainty.
    found = worth_in_trials(np.full(3, 2.0), [np.array([[0.0, 1.0], [5.0, 3.0]])] * 2, rng=np.random.default_rng(0))
    assert found.low == found.high == found.value


def test_the_interval_of_the_worth_covers_both_runs_and_pools():
    pools = [np.stack([scores, scores], axis=1) for scores in np.random.default_rng(1).normal(size=(6, 8))]
    runs = np.array([0.5, 1.0, 1.5])
    alike = np.full(3, 1.0)
    both = worth_in_trials(runs, pools, rng=np.random.default_rng(0))
    only_pools = worth_in_trials(alike, pools, rng=np.random.default_rng(0))
    only_runs = worth_in_trials(runs, [np.concatenate(pools)], rng=np.random.default_rng(0))
    assert both.value == pytest.approx(only_pools.value)
    for part in (only_pools, only_runs):
        assert part.low < part.value < part.high
        assert both.high - both.low > part.high - part.low
