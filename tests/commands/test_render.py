"""Commands that show what an agent does."""

import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import error_line

from evorl.commands.command import run_command
from evorl.commands.evaluate import evaluate_elite
from evorl.runs.program import run_program
from evorl.system import console


def test_watch_writes_a_film_of_the_episodes_that_evaluate_plays(run, capsys):
    av = pytest.importorskip("av")
    run_command(["watch", "runs/a", "--video", "best.mp4", "--episodes", "2"])
    told = capsys.readouterr().out
    mean = evaluate_elite(run, 2, 0)["mean"]
    assert f"mean return {mean:.1f} over 2 episodes" in told
    with av.open("best.mp4") as film:
        assert film.streams.video[0].average_rate == 50
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) == int(told.split(": ")[1].split()[0]) == round(2 * mean) + 2, "one before each step, one after"
    assert frames[0].std() > 0


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("render", lambda self: np.full((4, 4, 3), 0.5), "gave [4, 4, 3] of float64; a picture is an array"),
        ("render", lambda self: None, "no frame was rendered"),
        ("render", gym.Env.render, "raised NotImplementedError.*watched takes the argument render_mode"),
        ("step", lambda self, action: 1 / 0, "(CartPole-v1, step 1 of the episode) raised ZeroDivisionError"),
        ("__init__", lambda self: None, "argument 'render_mode'.*watched takes the argument render_mode"),
    ],
)
def test_watch_names_what_cannot_be_filmed(attribute, value, message, run, monkeypatch, capsys):
    pytest.importorskip("av")
    monkeypatch.setattr(f"gymnasium.envs.classic_control.cartpole.CartPoleEnv.{attribute}", value)
    assert run_program(run_command, ["watch", "runs/a", "--video", "best.mp4"]) == 2
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), error_line(capsys))
    assert not Path("best.mp4").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--video", "best.avi"], "best.avi must end in .mp4"),
        ([], "there is no display for a window; use --video FILE.mp4"),
    ],
)
def test_what_watch_lacks_is_said_before_anything_is_loaded(words, message, monkeypatch, in_directory, capsys):
    pytest.importorskip("av")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, "")  # As where it is not set.
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(console.sys, "platform", "linux")
    assert run_program(run_command, ["watch", "runs/none", *words]) == 2
    assert message in error_line(capsys)


def test_an_export_has_the_ending_of_its_format(in_directory, capsys):
    pytest.importorskip("onnx")
    assert run_program(run_command, ["export", "runs/none", "-o", "agent.pt"]) == 2
    assert "agent.pt will be an ONNX file; give it the ending .onnx" in error_line(capsys)
