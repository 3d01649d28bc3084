"""Exact tests and their power against values worked by hand and slow, obvious implementations."""

import sys
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
from score_tests import (
    EXACT,
    RankSum,
    fisher_exact,
    holm,
    rank_sum_distribution,
    sign_flip_power,
    sign_flip_test,
)


def rng():
    return np.random.default_rng(0)


def test_fishers_exact_test_against_all_draws_of_the_marked():
    """The lady tasting tea (Fisher 1935) and an uneven table."""
    assert fisher_exact((3, 1), (1, 3)) == pytest.approx(34 / 70)
    assert fisher_exact((4, 0), (0, 4)) == pytest.approx(2 / 70)
    # Five of 25 runs failed; each five are as likely. Four or more, or one or none, among the first 16 are as rare.
    shares = {
        count: sum(1 for drawn in combinations(range(25), 5) if sum(run < 16 for run in drawn) == count)
        for count in range(6)
    }
    rare = sum(times for times in shares.values() if times <= shares[4])
    assert fisher_exact((4, 12), (1, 8)) == pytest.approx(rare / comb(25, 5))
    assert fisher_exact((0, 3), (0, 5)) == 1


def test_the_sign_flip_test_enumerates_all_flips_of_few_pairs():
    # All of one sign: only it and its opposite are as extreme.
    assert sign_flip_test(np.array([1.0, 2.0, 3.0]), rng()) == 2 / 8
    # 3 + 2 - 1 = 4: reached by sums of 6, 4, -4 and -6, each by one assignment.
    assert sign_flip_test(np.array([3.0, 2.0, -1.0]), rng()) == 4 / 8
    assert sign_flip_test(np.array([0.0, 0.0]), rng()) == 1
    # 0.1 + 0.2 + 0.3 - 0.6 is not 0 in floating point, but no sum is less extreme.
    assert sign_flip_test(np.array([0.1, 0.2, 0.3, -0.6]), rng()) == 1
    assert sign_flip_test(np.full(EXACT, 0.1), rng()) == 2 / 2**EXACT


def test_the_sign_flip_test_of_many_pairs_draws_flips_that_agree_with_all():
    differences = rng().normal(0.4, 1, size=EXACT + 1)
    every = np.abs([np.dot(signs, differences) for signs in product((-1, 1), repeat=EXACT + 1)])
    exact = np.mean(every >= abs(differences.sum()) - 1e-9)
    assert sign_flip_test(differences, rng()) == pytest.approx(exact, abs=0.004)
    # A seed gives the same p, and no p is 0.
    assert sign_flip_test(differences, rng()) == sign_flip_test(differences, rng())
    assert sign_flip_test(np.ones(60), rng()) == 1 / 100_001


@pytest.mark.parametrize("pairs", [8, 40])
def test_the_power_without_an_effect_is_the_level(pairs):
    assert sign_flip_power(pairs, 0.5, 0.048, rng()) == pytest.approx(0.048, abs=0.015)


def test_the_power_is_that_of_the_test_itself():
    generator, hits = rng(), 0
    for _ in range(400):
        hits += sign_flip_test(generator.normal(0.5244, 1, size=12), generator) <= 0.048
    assert sign_flip_power(12, 0.7, 0.048, rng()) == pytest.approx(hits / 400, abs=0.07)
    # Two pairs have no p below one half.
    assert sign_flip_power(2, 0.99, 0.048, rng()) == 0


def test_holm_multiplies_the_smallest_by_the_planned_number_of_tests():
    assert holm({"a": 0.04, "b": 0.01}, 2) == {"b": 0.02, "a": 0.04}
    # An adjusted p is no smaller than that of a test with a smaller p.
    assert holm({"a": 0.02, "b": 0.015}, 2) == {"b": 0.03, "a": 0.03}
    assert holm({"a": 0.02}, 2) == {"a": 0.04}
    assert holm({"a": 0.7, "b": 0.9}, 2) == {"a": 1, "b": 1}
    assert holm({}, 2) == {}


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 2), (3, 5), (5, 3)])
def test_the_rank_sum_distribution_lists_all_orders(ours, theirs):
    counts = np.zeros(ours * theirs + 1)
    for mine in combinations(range(ours + theirs), ours):
        others = set(range(ours + theirs)) - set(mine)
        counts[sum(a > b for a in mine for b in others)] += 1
    assert rank_sum_distribution(ours, theirs) == pytest.approx(counts / counts.sum())


def test_the_rank_sum_test_rejects_as_often_as_its_level_allows():
    # With 4 against 4, only the two most extreme of 70 orders are below 5 %.
    test = RankSum(4, 4, rng=rng())
    assert test.power(0.5) == pytest.approx(2 / 70, abs=0.004)
    assert test.power(1 - 1e-12) == 1
    # 3 against 3 cannot reach 5 % on one task, two tasks can.
    assert RankSum(3, 3, rng=rng()).power(0.99) == 0
    assert RankSum(3, 3, tasks=2, rng=rng()).power(0.99) > 0.9


def test_the_smallest_distinguishable_probability_has_that_power():
    test = RankSum(8, 6, rng=rng())
    found = test.distinguishable(0.8)
    assert test.power(found) == pytest.approx(0.8, abs=0.005)
    assert test.power(found - 0.01) < 0.8


def test_two_looks_with_these_levels_err_in_five_percent():
    """The levels of benchmarks/experiments/paired_evidence.py, for means of normal differences after half and all pairs."""
    from statistics import NormalDist

    from paired_evidence import LOOKS

    half, rest = rng().normal(size=(2, 1_000_000))
    bounds = [NormalDist().inv_cdf(1 - level / 2) for level in LOOKS.values()]
    erred = (np.abs(half) > bounds[0]) | (np.abs(half + rest) / np.sqrt(2) > bounds[1])
    assert np.mean(erred) == pytest.approx(0.05, abs=0.001)
