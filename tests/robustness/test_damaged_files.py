"""Files of a checkpoint that are damaged in any way: noticed, named, and never resumed from."""

import os

import corruption
import numpy as np
import pytest

from evorl.runs.directory import Checkpoints
from evorl.system.files import read_owner
from evorl.types import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory above `runs/` with the run that is damaged, its newest checkpoint and the older ones."""
    directory = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        newest, others = corruption.prepare(directory / "runs" / "original")
    return directory, newest, others


def test_no_damage_goes_unnoticed(trained, capsys):
    _, newest, others = trained
    plan = list(corruption.damages(newest, others, np.random.default_rng(5), rounds=3))
    assert len(plan) >= 100
    assert {damage.file for damage in plan} >= {path.name for path in newest.iterdir()}
    assert corruption.verify_all(newest, plan) == []
    again = corruption.damages(newest, others, np.random.default_rng(5), rounds=3)
    assert list(again) == plan
    Checkpoints(newest.parent, 4).verify(int(newest.name[-6:]))


def test_damage_that_is_not_noticed_is_counted(trained, monkeypatch, capsys):
    _, newest, others = trained
    monkeypatch.setattr(Checkpoints, "verify", Checkpoints.files)
    damages = list(corruption.damages(newest, others, np.random.default_rng(5), 1, ["state.json"]))
    assert len(corruption.verify_all(newest, damages)) == len(damages)


def test_a_damaged_run_ends_as_one_that_was_left_alone(trained, monkeypatch):
    directory, newest, others = trained
    monkeypatch.chdir(directory)
    plan = list(corruption.damages(newest, others, np.random.default_rng(6), rounds=1))
    rng = np.random.default_rng(7)
    assert corruption.resume_some(directory / "runs" / "original", newest, others, plan, rng, 2) == []


@pytest.mark.parametrize("name", ["agents.safetensors", "manifest.json"])
def test_nobody_waits_for_a_pipe_in_a_checkpoint(name, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.complete(1, {"agents.safetensors": checkpoints.write(1, "agents.safetensors", b"")})
    pipe = checkpoints.path(1) / name
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=f"{name}: cannot be read: not a file"):
        checkpoints.verify(1)


def test_nobody_waits_for_a_pipe_in_place_of_a_lock(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert read_owner(tmp_path) == {}


def test_a_host_without_files_of_its_own_has_checkpoints_too(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.complete(5, {})
    assert checkpoints.verify(5) == {}
