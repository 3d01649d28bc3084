"""`evorl play`: a person at the terminal, here a script, against an agent."""

import io
import re

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import error_line, own_copy, train, train_below

from evorl.commands.command import run_command
from evorl.commands.play import ask, board
from evorl.runs.program import run_program

GAME = ("algorithm={name: a2c}", "environment.id=helpers.games:ThreeMoves", "training.max_steps=40", "run.name=a")


@pytest.fixture
def types(monkeypatch):
    """Type these lines, and then end the input."""

    def given(*typed):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))

    return given


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has ended, to be copied and not to be changed."""
    return train_below(tmp_path_factory.mktemp("ended"), *GAME)


@pytest.fixture
def run(ended, in_directory):
    own_copy(ended, in_directory / "runs" / "a")
    return "runs/a"


def test_a_person_plays_from_both_seats_until_the_input_ends(run, types, capsys):
    # In seat 1 the moves are a and c, which is not a; in seat 2 the reply (a + 1) % 3 wins, so one of three does.
    types("0", "1", "0", "1", "2")
    run_command(["play", run, "--games", "1", "--seat", "1"])
    told = capsys.readouterr().out
    assert "game 1: you have seat 1 of 2" in told
    assert "your move (0 to 2): the agent plays" in told
    assert re.search(r"you have (won|lost)|a draw", told)
    types(*"012012012")
    run_command(["play", run])
    told = capsys.readouterr().out
    assert [told.index(f"game {n}: you have seat {seat} of 2") for n, seat in ((1, 1), (2, 2), (3, 1))]
    assert told.endswith("\nbye\n")


def test_the_agents_move_is_its_own_greedy_one(run, types, capsys):
    from evorl import load

    agent = load(run)
    seen = np.array([0, -1, -1, 0], np.float32)
    move, _ = agent.predict(seen, action_mask=np.ones(3, bool))
    # One of these wins at once, or else the agent moves again.
    types(*"012" * 20)
    run_command(["play", run, "--seat", "2", "--games", "10"])
    begun = re.findall(r"you have seat 2 of 2\nthe agent plays (\d)\n", capsys.readouterr().out)
    assert begun == [str(move)] * 10
    types(*"012" * 20)
    run_command(["play", run, "--seat", "2", "--games", "10", "--sample"])
    begun = re.findall(r"you have seat 2 of 2\nthe agent plays (\d)\n", capsys.readouterr().out)
    assert len(begun) == 10
    assert len(set(begun)) > 1


def test_a_wrong_move_is_explained_and_asked_again(run, types, capsys):
    types("7", "x", "1.5", "", "1 2", "nan", "9" * 400, "q")
    run_command(["play", run, "--seat", "1"])
    told = capsys.readouterr().out
    assert told.count("your move (0 to 2): ") == 8
    assert told.count("that is not a legal move; q ends\n") == 7
    assert told.endswith("\nbye\n")


def test_both_choose_at_once_in_a_simultaneous_game(in_directory, types, capsys):
    assert train(*GAME, "environment.id=helpers.games:RockPaperScissors") == 0
    capsys.readouterr()
    types("0", "1", "2")
    run_command(["play", "runs/a", "--games", "3", "--sample"])
    told = capsys.readouterr().out
    ended = ("you have won", "a draw", "you have lost")
    played = re.findall(r"your move \(0 to 2\): the agent plays (\d)\n\nyou see.*\n(.*)\n", told)
    assert len(played) == 3
    for own, (agents, end) in enumerate(played):
        assert end == ended[{0: 1, 1: 0, 2: 2}[(own - int(agents)) % 3]]


def test_a_game_that_raises_is_an_error_on_one_line(run, types, monkeypatch, capsys):
    monkeypatch.setattr("helpers.games.ThreeMoves.step", lambda self, action: 1 / 0)
    types("0")
    assert run_program(run_command, ["play", run, "--seat", "1"]) == 2
    assert "environment.id: helpers.games:ThreeMoves raised: ZeroDivisionError" in error_line(capsys)


def test_a_board_is_drawn_from_planes_with_the_numbers_of_its_columns():
    planes = np.zeros((2, 3, 2))
    planes[1, 0, 0] = planes[1, 2, 1] = 1
    assert board(planes, gym.spaces.Discrete(3, start=1)).splitlines()[:3] == [" 1 2 3", " . . .", " X . O"]
    assert board(planes, gym.spaces.Discrete(6)).splitlines()[:2] == [" . . .", " X . O"]


def test_moves_of_several_choices_and_of_numbers_within_bounds(types, capsys):
    several = gym.spaces.MultiDiscrete([3, 4], start=[0, 5])
    mask = np.array([1, 0, 1, 1, 1, 1, 0], bool)
    types("1 5", "2 8", "2 7")
    assert ask(several, mask).tolist() == [2, 7]
    types("3")
    assert ask(gym.spaces.Discrete(4, start=1), np.array([1, 0, 1, 1], bool)) == 3
    assert "your move (1, 3, 4): " in capsys.readouterr().out
    box = gym.spaces.Box(-1.0, 1.0, (2,))
    types("2 0", "nan 0", "0.5, -1")
    assert ask(box, None).tolist() == [0.5, -1.0]
    with pytest.raises(EOFError):
        ask(box, None)


def test_connect_four_is_drawn(in_directory, types, capsys):
    pytest.importorskip("pettingzoo")
    small = "network.convolutions=[{channels: 2, kernel: 4, stride: 1}]"
    assert train(*GAME, "environment.id=pettingzoo:connect_four_v3", small) == 0
    capsys.readouterr()
    types("3", "q")
    run_command(["play", "runs/a", "--seat", "1"])
    told = capsys.readouterr().out
    assert "\n 0 1 2 3 4 5 6\n . . . . . . .\n" in told
    assert len(re.findall("[XO]", told.rpartition("0 1 2 3 4 5 6")[2].partition("(")[0])) == 2


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [("tic_tac_toe", r"\.\.\.\n\.\.\.\n\.\.\.", "nothing"), ("kuhn_poker", r"\n[012]\nyour move", r"\n[012] [012]\n")],
)
def test_openspiels_own_text_is_shown_without_the_agents_cards(in_directory, types, capsys, name, shown, hidden):
    pytest.importorskip("pyspiel")
    convolutions = "network.convolutions=[{channels: 4, kernel: 2, stride: 1}]"
    assert train(GAME[0], f"environment.id=openspiel:{name}", convolutions, *GAME[2:]) == 0
    capsys.readouterr()
    types("q")
    run_command(["play", "runs/a", "--seat", "1"])
    told = capsys.readouterr().out
    assert re.search(shown, told), told
    assert not re.search(hidden, told), told
