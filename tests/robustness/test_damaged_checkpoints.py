"""Files of a checkpoint that are damaged: noticed, named, and never resumed from."""

import os
import shutil

import pytest
from comparison import differences
from helpers.support import train, train_below

from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.types.outcomes import EvorlWarning, UserError

LATER = "training.max_steps=200"


def flip(path, payload):
    middle = len(payload) // 2
    path.write_bytes(payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :])


def link(path, payload):
    """A link to an equal file, which can change later or be anybody's."""
    os.link(path, path.parent.parent.parent / "equal")
    path.unlink()
    path.symlink_to(path.parent.parent.parent / "equal")


def pipe(path, payload):
    path.unlink()
    os.mkfifo(path)


def directory(path, payload):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "truncated": lambda path, payload: path.write_bytes(payload[: len(payload) // 2]),
    "bit flipped": flip,
    "byte appended": lambda path, payload: path.write_bytes(payload + b"\0"),
    "emptied": lambda path, payload: path.write_bytes(b""),
    "zeros": lambda path, payload: path.write_bytes(bytes(len(payload))),
    "nested": lambda path, payload: path.write_bytes(b"[" * 200_000),
    "removed": lambda path, payload: path.unlink(),
    "symbolic link": link,
    "pipe": pipe,
    "directory": directory,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that is trained to its end at once."""
    return train_below(tmp_path_factory.mktemp("undisturbed"), LATER)


def newest(run):
    return max((run / "checkpoints").glob("generation-*"))


def damage(path, kind="truncated"):
    DAMAGES[kind](path, path.read_bytes())


@pytest.mark.parametrize("kind", DAMAGES)
def test_verify_names_the_damaged_file(kind, trained_run, tmp_path):
    names = sorted(path.name for path in newest(trained_run).iterdir())
    assert len(names) >= 4
    for name in names:
        run = shutil.copytree(trained_run, tmp_path / name)
        checkpoint = newest(run)
        damage(checkpoint / name, kind)
        with pytest.raises(UserError, match=f"{checkpoint / name}: "):
            Checkpoints(checkpoint.parent).verify(int(checkpoint.name[-6:]))


@pytest.mark.parametrize("name", ["agents.safetensors", "manifest.json"])
def test_damaged_run_resumes_from_the_checkpoint_before_and_ends_as_undisturbed(name, run, undisturbed):
    damage(newest(run) / name)
    with pytest.warns(EvorlWarning, match=rf"{name}: .*the checkpoint before it"):
        assert train("run.name=a", "run.resume=auto", LATER) == 0
    # What is damaged stays beside the checkpoints.
    assert {file.split("/")[1].partition("-")[0] for file in differences(run, undisturbed)} <= {"damaged"}
