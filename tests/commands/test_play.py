"""`evorl play`: a person at the terminal, here a script, against an agent."""

import io
import re

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import train

from evorl.commands.command import run_command
from evorl.commands.play import ask, board

SHORT = ("algorithm={name: a2c}", "training.max_steps=40", "run.name=a")


@pytest.fixture
def types(monkeypatch):
    """Type these lines, and then end the input."""

    def given(*typed):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))

    return given


def test_a_person_plays_from_both_seats_until_the_input_ends(own_league_run, types, capsys):
    # In seat 1 the moves are a and c, which is not a; in seat 2 the reply (a + 1) % 3 wins, so one of three does.
    types("0", "1", "0", "1", "2")
    run_command(["play", "runs/a", "--games", "1", "--seat", "1"])
    told = capsys.readouterr().out
    assert "game 1: you have seat 1 of 2" in told
    assert "your move (0 to 2): the agent plays" in told
    assert re.search(r"you have (won|lost)|a draw", told)
    types(*"012012012")
    run_command(["play", "runs/a"])
    told = capsys.readouterr().out
    assert [told.index(f"game {n}: you have seat {seat} of 2") for n, seat in ((1, 1), (2, 2), (3, 1))]
    assert told.endswith("\nbye\n")


def test_the_agents_move_is_its_own_greedy_one(own_league_run, types, capsys):
    from evorl import load

    agent = load(own_league_run)
    seen = np.array([0, -1, -1, 0], np.float32)
    move, _ = agent.predict(seen, action_mask=np.ones(3, bool))
    # One of these wins at once, or else the agent moves again.
    types(*"012" * 20)
    run_command(["play", "runs/a", "--seat", "2", "--games", "10"])
    begun = re.findall(r"you have seat 2 of 2\nthe agent plays (\d)\n", capsys.readouterr().out)
    assert begun == [str(move)] * 10


def test_a_wrong_move_is_explained_and_asked_again(own_league_run, types, capsys):
    types("7", "x", "1.5", "", "1 2", "nan", "9" * 400, "q")
    run_command(["play", "runs/a", "--seat", "1"])
    told = capsys.readouterr().out
    assert told.count("your move (0 to 2): ") == 8
    assert told.count("that is not a legal move; q ends\n") == 7
    assert told.endswith("\nbye\n")


def test_both_choose_at_once_in_a_simultaneous_game(in_directory, types, capsys):
    assert train(*SHORT, "environment.id=helpers.games:RockPaperScissors") == 0
    capsys.readouterr()
    types("0", "1", "2")
    run_command(["play", "runs/a", "--games", "3", "--sample"])
    told = capsys.readouterr().out
    ended = ("you have won", "a draw", "you have lost")
    played = re.findall(r"your move \(0 to 2\): the agent plays (\d)\n\nyou see.*\n(.*)\n", told)
    assert len(played) == 3
    for own, (agents, end) in enumerate(played):
        assert end == ended[{0: 1, 1: 0, 2: 2}[(own - int(agents)) % 3]]


def test_a_board_is_drawn_from_planes_with_the_numbers_of_its_columns():
    planes = np.zeros((2, 3, 2))
    planes[1, 0, 0] = planes[1, 2, 1] = 1
    assert board(planes, gym.spaces.Discrete(3, start=1)).splitlines()[:3] == [" 1 2 3", " . . .", " X . O"]
    assert board(planes, gym.spaces.Discrete(6)).splitlines()[:2] == [" . . .", " X . O"]


def test_a_move_of_numbers_is_asked_for_until_it_is_within_bounds(types):
    box = gym.spaces.Box(-1.0, 1.0, (2,))
    types("2 0", "nan 0", "0.5, -1")
    assert ask(box, None).tolist() == [0.5, -1.0]
    with pytest.raises(EOFError):
        ask(box, None)


def test_openspiels_own_text_is_shown_without_the_agents_cards(in_directory, types, capsys):
    pytest.importorskip("pyspiel")
    assert train(*SHORT, "environment.id=openspiel:kuhn_poker") == 0
    capsys.readouterr()
    types("q")
    run_command(["play", "runs/a", "--seat", "1"])
    told = capsys.readouterr().out
    assert re.search(r"\n[012]\nyour move", told), told
    assert not re.search(r"\n[012] [012]\n", told), told
