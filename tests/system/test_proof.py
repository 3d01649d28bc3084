"""Runs that this user launched here are recognised; copies, edited ones and those of others are not."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from helpers.support import error_line, train

import evorl
from evorl.commands.command import run_command
from evorl.commands.train import resume_command
from evorl.runs.program import run_program
from evorl.system import proof
from evorl.system.proof import PROOF, is_signed, sign
from evorl.types import UserError

CODE = {"environment.id": "corridor:Corridor", "environment.kwargs": {"length": 5}}


@pytest.fixture
def state(tmp_path, monkeypatch):
    """An empty state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path, monkeypatch, state):
    """A signed directory below the working directory."""
    (tmp_path / "work" / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    sign(Path("runs/a"), CODE)
    return Path("runs/a")


def test_only_the_same_directory_with_the_same_code_is_own(run, tmp_path, monkeypatch):
    assert is_signed(run, CODE)
    assert is_signed(run.absolute(), CODE)
    assert not is_signed(run, {**CODE, "environment.id": "corridor:Other"})
    assert not is_signed(run, {**CODE, "environment.kwargs": {"length": 6}})
    shutil.copytree(run, "runs/b")
    assert not is_signed(Path("runs/b"), CODE), "a copy"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not is_signed(tmp_path / "work" / run, CODE), "modules of another working directory would be imported"
    monkeypatch.chdir(tmp_path / "work")
    shutil.move("runs/b", "runs/c")
    shutil.move("runs/a", "runs/b")
    assert not is_signed(Path("runs/b"), CODE), "a directory that was moved"


@pytest.mark.parametrize("found", [None, b"", b"short", bytes(32), bytes(33)])
def test_another_proof_is_none(found, run):
    right = (run / PROOF).read_bytes()
    assert len(right) == 32
    (run / PROOF).unlink()
    if found is not None:
        (run / PROOF).write_bytes(found)
    assert not is_signed(run, CODE)
    (run / PROOF).unlink(missing_ok=True)
    (run.parent / "proof").write_bytes(right)
    (run / PROOF).symlink_to(run.parent.absolute() / "proof")
    assert not is_signed(run, CODE), "a link"
    (run / PROOF).unlink()
    (run / PROOF).write_bytes(right + b"\0")
    assert not is_signed(run, CODE)
    (run / PROOF).write_bytes(right)
    assert is_signed(run, CODE)


def test_the_key_is_the_users_alone(run, state, monkeypatch):
    key = state / "evorl" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    before = key.read_bytes()
    assert len(before) == proof.KEY_BYTES
    assert len(set(before)) > 8
    sign(run, CODE)
    assert key.read_bytes() == before
    key.chmod(0o640)
    assert not is_signed(run, CODE), "others could have read it"
    (run / PROOF).unlink()
    sign(run, CODE)
    assert not (run / PROOF).exists()
    key.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
    sign(run, CODE)
    assert not (run / PROOF).exists(), "another user's"
    monkeypatch.undo()


def test_another_key_signs_nothing_of_this_one(run, state):
    key = state / "evorl" / "key"
    key.unlink()
    assert not is_signed(run, CODE), "there is no key"
    sign(Path("runs"), CODE)
    assert key.is_file()
    assert not is_signed(run, CODE)
    short = state / "evorl" / "key"
    short.write_bytes(b"")
    assert not is_signed(Path("runs"), CODE)


def test_where_no_key_can_be_kept_nothing_is_signed(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (run / PROOF).unlink()
    sign(run, CODE)
    assert not (run / PROOF).exists()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sign(run, CODE)
    assert (tmp_path / "home" / ".local" / "state" / "evorl" / "key").is_file()
    assert is_signed(run, CODE)


WALK = """
import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == self.length, False, {}
"""
ASKS = "names custom code to execute; add --allow-code"


def test_no_command_asks_for_the_code_of_an_own_run_and_each_for_that_of_a_copy(in_directory, monkeypatch, capsys):
    (in_directory / "signed_walk.py").write_text(WALK)
    monkeypatch.syspath_prepend(in_directory)
    settings = "environment=signed_walk:Walk", "environment.kwargs={length: 5}", "training.max_steps=40"
    assert train(*settings, "run.name=a") == 0
    assert "`evorl evaluate runs/a`, `evorl resume runs/a training" in capsys.readouterr().err
    evaluate = ["evaluate", "runs/a", "--episodes", "2"]
    assert run_program(run_command, evaluate) == 0
    assert evorl.load("runs/a").agent is not None
    assert resume_command(Path("runs/a"), (), None, 1)
    assert train(*settings, "run.name=a", "run.resume=auto", "run.timeout=50") == 0
    assert run_program(run_command, evaluate) == 0
    capsys.readouterr()

    config = Path("runs/a/config.yaml")
    text = config.read_text()
    config.write_text(text.replace("length: 5", "length: 6"))
    assert text != config.read_text()
    assert run_program(run_command, evaluate) == 2
    assert ASKS in error_line(capsys)
    config.write_text(text)
    assert run_program(run_command, evaluate) == 0
    capsys.readouterr()

    shutil.copytree("runs/a", "runs/b")
    assert run_program(run_command, ["evaluate", "runs/b"]) == 2
    assert ASKS in error_line(capsys)
    with pytest.raises(UserError, match=ASKS):
        resume_command(Path("runs/b"), (), None, 1)
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "2", "--allow-code"]) == 0


def test_a_run_without_code_of_its_own_needs_no_key(trained_run, state):
    assert not (trained_run / PROOF).exists()
    assert not state.exists()
    assert json.loads((trained_run / "summary.json").read_text())["ended"] == "finished"
