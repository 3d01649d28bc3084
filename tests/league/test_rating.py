"""Ratings and matchmaking, by the numbers."""

import math

import numpy as np
import pytest

from evorl.league.rating import ELO, expected, opponent_probabilities, ratings


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_two_entrants_are_rated_as_by_bisection():
    """By symmetry their log strengths are x and -x; each has also drawn with a player of strength 1."""
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        too_low = 4 * sigmoid(2 * middle) + sigmoid(middle) < 3 + 0.5
        low, high = (middle, high) if too_low else (low, middle)
    points, games = np.array([[0.0, 3.0], [1.0, 0.0]]), np.array([[0.0, 4.0], [4.0, 0.0]])
    elo, errors = ratings(points, games, anchor=1)
    np.testing.assert_allclose(elo, [2 * low * 400 / math.log(10), 0.0], atol=1e-4)
    assert errors[1] == 0
    assert errors[0] > 0


def test_ten_to_one_is_four_hundred_points_and_the_error_is_binomial():
    games = np.array([[0.0, 1.1e7], [1.1e7, 0.0]])
    elo, errors = ratings(np.array([[0.0, 1e7], [1e6, 0.0]]), games, anchor=1)
    assert elo[0] == pytest.approx(400, abs=0.01)
    share = 10 / 11
    assert errors[0] == pytest.approx(ELO / math.sqrt(1.1e7 * share * (1 - share)), rel=1e-3)


def test_who_never_loses_and_who_never_played_have_finite_ratings():
    points, games = np.zeros((3, 3)), np.zeros((3, 3))
    points[0, 1], games[0, 1], games[1, 0] = 50, 50, 50
    elo, errors = ratings(points, games, anchor=2)
    assert np.isfinite(elo).all()
    assert np.isfinite(errors).all()
    assert elo[0] > 200 > elo[2] == 0 > elo[1]


def test_ratings_are_transitive_where_not_all_have_met():
    points = np.array([[0, 75, 0], [25, 0, 75], [0, 25, 0]], dtype=float)
    games = np.array([[0, 100, 0], [100, 0, 100], [0, 100, 0]], dtype=float)
    elo, _ = ratings(points, games, anchor=1)
    assert elo[0] == pytest.approx(400 * math.log10(3), rel=0.02)
    assert elo[2] == pytest.approx(-elo[0], rel=1e-6)


def test_who_is_as_strong_as_the_anchor_has_no_negative_zero():
    """It was told as a rating of -0."""
    points = np.array([[0.0, 3.0], [2.0, 0.0]])
    both = np.block([[points, points], [points, points]])
    elo, _ = ratings(both, both + both.T, anchor=2)
    assert elo[0] == elo[2] == 0
    assert not np.signbit(elo[[0, 2]]).any()


RESULT = np.array([0.5, 0.9, 0.1, 0.5])


@pytest.mark.parametrize(
    ("matchmaking", "chances"),
    [
        ("pfsp", [0.25 / 1.32, 0.01 / 1.32, 0.81 / 1.32, 0.25 / 1.32]),
        ("uniform", [0.25] * 4),
        ("latest", [0, 1, 0, 0]),
        ("population", [0.5, 0.5, 0, 0]),
    ],
)
def test_opponents_are_drawn_by_these_probabilities(matchmaking, chances):
    np.testing.assert_allclose(opponent_probabilities(matchmaking, RESULT, 1, population=2), chances, atol=1e-12)


def test_expected_results_shrink_to_a_draw():
    assert expected(np.array([[0.0, 3.0]]), np.array([[0.0, 3.0]])).tolist() == [[0.5, 3.5 / 4]]


def test_ratings_of_a_strict_order_are_those_of_the_maximum():
    """Each entrant wins all games against those below: at the maximum the expected points are the points."""
    count = 32
    games = np.full((count, count), 8.0)
    np.fill_diagonal(games, 0.0)
    elo, _ = ratings(games * np.tri(count, k=-1), games, anchor=0)
    strength = elo / ELO
    # The imagined draw of each against strength 1 fixes the level, which an anchor of 0 takes away.
    chance = 1 / (1 + np.exp(strength - strength[:, None]))
    missing = (games * (np.tri(count, k=-1) - chance)).sum(1)
    assert np.abs(missing).max() < 0.5
    assert abs(missing.sum()) < 1e-6
    assert (np.diff(elo) > 0).all()


def test_equal_points_are_equal_ratings():
    rng = np.random.default_rng(0)
    games = np.full((8, 8), 8.0)
    np.fill_diagonal(games, 0.0)
    for _ in range(20):
        upper = np.triu(rng.integers(0, 17, (8, 8)) / 2, 1)
        points = upper + np.tril(8.0 - upper.T, -1)
        elo, _ = ratings(points, games, anchor=0)
        totals = points.sum(1)
        assert all((elo[i] == elo[j]) == (totals[i] == totals[j]) for i in range(8) for j in range(8))
