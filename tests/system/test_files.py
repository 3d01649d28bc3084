"""Files are written whole or not at all, whoever else writes them."""

import errno
import os
from pathlib import Path

import pytest

from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.system.files import make_directory, make_subdirectory, read_json, reason, replacing, write_atomically
from evorl.types.outcomes import UserError


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "out"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_a_write_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as error, replacing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.filename == str(tmp_path / "out")
    with pytest.raises(OSError, match=r"^encoder error -2$"), replacing(tmp_path / "out"):
        raise OSError("encoder error -2")

    class Nameless(OSError):
        filename = property(lambda self: None)

    with pytest.raises(Nameless), replacing(tmp_path / "out"):
        raise Nameless(errno.ENOSPC, "No space left on device")


def test_a_subdirectory_is_made_only_in_a_directory_that_exists(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_subdirectory(tmp_path / "gone" / "elite")
    assert not (tmp_path / "gone").exists()


@pytest.fixture
def disk_calls(monkeypatch):
    """The syncs and renames of this process in their order: what a power failure may not undo or reorder."""
    calls, rename = [], Path.replace

    def renamed(path, target):
        calls.append(f"rename {Path(target).name}")
        return rename(path, target)

    def synced(descriptor):
        calls.append(f"sync {os.path.realpath(f'/proc/self/fd/{descriptor}').rpartition('/')[2]}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(Path, "rename", renamed)
    return calls


def test_a_file_is_synced_before_its_name_and_its_directory_after(tmp_path, disk_calls):
    write_atomically(tmp_path / "out", b"whole")
    written, renamed, *after = disk_calls
    assert written.startswith("sync .out.")
    assert [renamed, *after] == ["rename out", f"sync {tmp_path.name}"]


def test_a_checkpoint_is_synced_before_its_name_and_its_directory_after(tmp_path, disk_calls):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.complete(1, {"state.json": checkpoints.write(1, "state.json", b"{}")})
    at = disk_calls.index("rename generation-000001")
    assert {"rename state.json", "rename manifest.json"} <= {*disk_calls[:at]}
    assert disk_calls[at - 1].startswith("sync .partial"), "the names in it"
    assert disk_calls[at + 1 :] == [f"sync {tmp_path.name}"]


def test_new_directories_are_synced_in_their_parents(tmp_path, disk_calls):
    make_directory(tmp_path / "runs" / "a" / "checkpoints")
    assert {*disk_calls} == {f"sync {name}" for name in (tmp_path.name, "runs", "a")}
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "runs", fresh=True)


def test_too_many_open_files_name_the_limit():
    error = OSError(errno.EMFILE, "Too many open files")
    assert reason(error, Path("runs/a")) == "runs/a: Too many open files; raise the limit with `ulimit -n 65536`"


def test_a_file_that_is_nested_without_end_is_invalid_and_no_more(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(file)


def test_nothing_is_written_in_a_directory_that_has_become_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a symbolic link"):
        make_subdirectory(tmp_path / "elite")
