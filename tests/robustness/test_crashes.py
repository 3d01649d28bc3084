"""Runs that a kill or a power failure stops at any call to the file system."""

import os
import re
from collections import Counter

import crashes
import pytest
from call_log import CallLog, lay_out, tree_of
from lossy_disk import ROOT, Entries, Sync, Truncate, World, Write

EVERY = 40


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The sessions of a run, undisturbed."""
    return crashes.sessions(tmp_path_factory.mktemp("crashes"), 2)


@pytest.mark.slow
def test_a_run_that_stops_at_any_call_ends_as_one_that_was_left_alone(played, tmp_path):
    """The short form of crashes.py."""
    done = [one for session in played for one in crashes.disturb(session, tmp_path, EVERY)]
    done += crashes.fail_twice(played[0], tmp_path, EVERY)
    assert {failure.phase for failure, _, _ in done} == {*(session.phase for session in played), crashes.TWICE}
    assert Counter((failure.phase, problem) for failure, _, problem in done if problem) == {}


def written_carelessly(path, payload):
    path.write_bytes(payload)


@pytest.mark.parametrize(
    ("name", "instead", "unsynced", "kind", "problem"),
    [
        ("sync_directory", lambda path: None, "rename", "kept", "it (lives generation [12] again|ends with 2)"),
        ("write_through", written_carelessly, "write", "lost", "it ends with 2: .* every checkpoint in .* is damaged"),
    ],
)
def test_an_fsync_that_is_missing_is_noticed(played, tmp_path, monkeypatch, name, instead, unsynced, kind, problem):
    with monkeypatch.context() as patch:
        patch.setattr(f"evorl.runs.directory.{name}", instead)
        careless = crashes.record(tmp_path / "careless", "careless", 2, World(), 0, played[0].alone)
    where = f"not synced: {unsynced} runs/run/checkpoints/"
    assert any(where in told for told in crashes.waiting(careless))
    assert not any(where in told for told in crashes.waiting(played[0]))
    ends = [tree for left, tree in careless.before.after(careless.calls).after_failures() if left == kind]
    # Of the names that were not synced none, or all: `after_failures` tries the shortest choices first.
    tree = ends[0] if unsynced == "rename" else max(ends, key=len)
    end = crashes.resume(careless, tree, tmp_path / "resumed")
    failure = crashes.Failure("careless", kind, "", careless.safe(len(careless.calls)))
    assert failure.safe == 2
    assert re.match(problem, crashes.verdict(failure, end))


def test_the_log_gives_each_call_and_the_tree_again(tmp_path):
    root = tmp_path / "root"
    lay_out({"there": b"before"}, root)
    log = CallLog(root, World.of({"there": b"before"}))
    with log.recording():
        (root / "a").mkdir()
        with (root / "a" / ".b").open("wb") as file:
            file.write(b"12")
            file.flush()
            os.fsync(file.fileno())
        (root / "a" / ".b").replace(root / "a" / "b")
        with (root / "there").open("a+", encoding="utf-8") as file:
            file.truncate(0)
            file.write("after")
        (tmp_path / "elsewhere").write_text("x")
    assert [call.label for call in log.calls] == [
        "mkdir a", "create a/.b", "write a/.b", "fsync a/.b", "rename a/.b to b", "truncate there", "write there",
    ]  # fmt: skip
    assert tree_of(root) == log.world.now.tree() == {"a": None, "a/b": b"12", "there": b"after"}
    assert log.world.durable.tree() == {"there": b"before"}


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "link").symlink_to("there"),
        lambda root: os.truncate(root / "there", 1),
        lambda root: os.close(os.open(root / "new", os.O_CREAT | os.O_WRONLY)),
    ],
)
def test_a_call_that_the_log_does_not_know_is_noticed(change, tmp_path):
    root = tmp_path / "root"
    lay_out({"there": b"before"}, root)
    with pytest.raises((AssertionError, ValueError)), CallLog(root, World.of({"there": b"before"})).recording():
        change(root)


def test_what_a_power_failure_leaves_of_a_file_that_replaces_another():
    """Worked by hand: the new bytes are synced or not, and the rename lasts or not."""
    world = World.of({"a": b"old"})
    new = world.new(is_directory=False)
    old = world.now.entries[ROOT]["a"]
    begun = world.after([Entries("", ROOT, {"b": new}), Write("", new, 0, b"four")])
    lasting = {kind: [] for kind in ("kept", "torn", "zeros", "lost")}
    for kind, tree in begun.after_failures():
        lasting[kind].append(tree)
    assert all(trees[0] == {"a": b"old"} for trees in lasting.values())
    assert [trees[1]["b"] for trees in lasting.values()] == [b"four", b"fo", bytes(4), b""]
    renamed = begun.after([Sync("", new), Entries("", ROOT, {"b": None, "a": new})])
    trees = [dict(tree) for _, tree in renamed.after_failures()]
    assert {tuple(sorted(tree.items())) for tree in trees} == {
        (("a", b"old"),), (("a", b"old"), ("b", b"four")), (("a", b"four"),),
    }  # fmt: skip
    settled = renamed.after([Sync("", ROOT), Truncate("", old, 0)])
    assert [tree for _, tree in settled.after_failures()] == [{"a": b"four"}] * 4
