"""The opponents in Connect Four, against the rules of PettingZoo and OpenSpiel and a slow search."""

import sys

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import connect_four
from connect_four import (
    COLUMNS,
    OPPONENTS,
    Position,
    best_moves,
    has_four,
    lines,
    match,
    minimax,
    negamax,
    play,
    worth,
)


def position(*columns):
    found = Position(0, 0)
    for column in columns:
        found = found.after(column)
    return found


def some_games(count):
    """Moves of random games, each until its end."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        here, moves = Position(0, 0), []
        while not has_four(here.others) and not here.is_full:
            moves.append(int(rng.choice(here.moves)))
            here = here.after(moves[-1])
        yield moves


def test_positions_follow_the_rules_of_pettingzoo():
    module = pytest.importorskip("pettingzoo.classic.connect_four_v3")
    env = module.raw_env()
    for moves in some_games(30):
        env.reset()
        here = Position(0, 0)
        for move in moves:
            seen, _, over, _, _ = env.last()
            assert not over
            assert Position.of(seen["observation"]) == here
            np.testing.assert_array_equal(here.observation, seen["observation"])
            assert sorted(here.moves) == np.flatnonzero(seen["action_mask"]).tolist()
            env.step(move)
            here = here.after(move)
        _, reward, over, _, _ = env.last()
        assert over
        assert reward == (-1 if has_four(here.others) else 0)


def test_the_fast_game_is_that_of_pettingzoo():
    module = pytest.importorskip("pettingzoo.classic.connect_four_v3")
    theirs, ours = module.raw_env(), connect_four.ConnectFour()
    for moves in some_games(30):
        for env in (theirs, ours):
            env.reset()
        for move in [*moves, None, None]:
            assert ours.agents == theirs.agents
            assert ours.agent_selection == theirs.agent_selection
            (seen, *rest), (expected, *told) = ours.last(), theirs.last()
            np.testing.assert_array_equal(seen["observation"], expected["observation"])
            np.testing.assert_array_equal(seen["action_mask"], expected["action_mask"])
            assert rest == told
            for env in (theirs, ours):
                env.step(move)
        assert ours.agents == theirs.agents == []


def test_all_lines_are_worth_something_where_nobody_blocks_them():
    assert len(set(lines())) == 69
    assert all(has_four(line) and line.bit_count() == 4 for line in lines())
    assert worth(Position(0, 0)) == 0
    # The lowest field of the middle column is on seven lines: four level ones, two rising or falling, one upright.
    assert worth(position(3)) == -7
    assert worth(position(3, 0)) == 7 - 3


def plain(here, depth):
    """The same value without bounds."""
    if has_four(here.others):
        return -connect_four.WON - depth
    if here.is_full or depth == 0:
        return 0 if here.is_full else worth(here)
    return max(-plain(here.after(move), depth - 1) for move in here.moves)


def test_bounds_change_no_value():
    for moves in some_games(20):
        here = position(*moves[:-4])
        assert negamax(here, 3, -30_000, 30_000) == plain(here, 3)


def test_minimax_wins_at_once_and_stops_who_would():
    assert best_moves(position(3, 0, 3, 0, 3, 6)) == [3], "the fourth in a column"
    assert best_moves(position(3, 0, 3, 0, 3)) == [3], "or the other one has it"
    assert set(best_moves(position(2, 2, 3, 3))) == {1, 4}, "three in a row with both ends open win on either side"
    mask = np.ones(COLUMNS, bool)
    seen = position(2, 2, 3, 3).observation
    assert {minimax(seen, mask) for _ in range(5)} < {1, 4}, "the same one each time"


def test_sides_take_seats_in_turns_and_results_are_of_the_first_side():
    def lowest(here, rng):
        return min(here.moves)

    def highest(here, rng):
        return max(here.moves)

    # Both build a column, and whoever began has four first.
    assert play((lowest, highest), (), np.random.default_rng(0)) == 1.0
    assert play((highest, lowest), (0, 6, 0, 6, 1), np.random.default_rng(0)) == 0.0
    with pytest.raises(ValueError, match="column 0, which is full"):
        play((lambda here, rng: 0,) * 2, (), np.random.default_rng(0))
    found = match(OPPONENTS["minimax"], OPPONENTS["random"], 6, 0)
    assert found["won"] + found["drawn"] + found["lost"] == found["games"] == 6
    assert found["mean"] > 0.8
    again = match(OPPONENTS["minimax"], OPPONENTS["random"], 6, 0)
    assert {**found, "seconds": 0} == {**again, "seconds": 0}
