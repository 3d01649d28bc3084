"""Files are written whole or not at all, whoever else writes them."""

import pytest

from evorl.system import files
from evorl.system.files import make_subdirectory, replacing, write_atomically


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "out"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path):
    (tmp_path / ".out.0123abcd.partial").write_bytes(b"half")
    (tmp_path / ".other.0123abcd.partial").write_bytes(b"half")
    write_atomically(tmp_path / "out", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.0123abcd.partial", "out"]


def test_a_temporary_file_that_another_writer_took_for_abandoned_is_made_again(tmp_path, monkeypatch):
    names = iter(["first", "second"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(names))
    lock = files._flock

    def removed(file, kind):
        (tmp_path / ".out.first.partial").unlink(missing_ok=True)
        return lock(file, kind)

    monkeypatch.setattr("evorl.system.files._flock", removed)
    write_atomically(tmp_path / "out", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_subdirectory_is_made_only_in_a_directory_that_exists(tmp_path):
    with pytest.raises(FileNotFoundError):
        make_subdirectory(tmp_path / "gone" / "elite")
    assert not (tmp_path / "gone").exists()
