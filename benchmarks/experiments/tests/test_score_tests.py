"""Exact tests and their power against values worked by hand and slow, obvious implementations."""

import sys
from itertools import product

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
from score_tests import (
    EXACT,
    holm,
    sign_flip_power,
    sign_flip_test,
)


def rng():
    return np.random.default_rng(0)


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


def test_two_looks_with_these_levels_err_in_five_percent():
    """The levels of benchmarks/experiments/paired_evidence.py, for means of normal differences after half and all pairs."""
    from statistics import NormalDist

    from paired_evidence import LOOKS

    half, rest = rng().normal(size=(2, 1_000_000))
    bounds = [NormalDist().inv_cdf(1 - level / 2) for level in LOOKS.values()]
    erred = (np.abs(half) > bounds[0]) | (np.abs(half + rest) / np.sqrt(2) > bounds[1])
    assert np.mean(erred) == pytest.approx(0.05, abs=0.001)
