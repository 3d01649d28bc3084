"""Checkpoints of hosts with directories of their own: what they have in common wherever a process is killed."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest
from helpers.support import config

from evorl.distributed.ranks import Launch
from evorl.runs.checkpoint import CheckpointManager, InterimCheckpoints
from evorl.runs.directory import Checkpoints, Owner, RunDirectory
from evorl.system.files import Lock, is_locked
from evorl.types import RunFailed, UserError


class Killed(BaseException):
    pass


def ranks_of_main(**more):
    """The main process's view of ranks, of which it is the only one on its host."""
    known = {"gather_bytes": lambda payload, what: [payload], "broadcast_bytes": lambda payload, what: payload}
    return SimpleNamespace(is_main=True, rank=0, on_host=1, **known | more)


def with_checkpoints(path, *numbers, stem="generation"):
    checkpoints = Checkpoints(path, keep=9, stem=stem)
    for number in numbers:
        checkpoints.complete(number, {"state.json": checkpoints.write(number, "state.json", b"{}")})
    return checkpoints


def test_nothing_is_removed_before_all_hosts_have_the_new_one(tmp_path):
    run = RunDirectory(tmp_path, keep=1)
    files = {"state.json": b"{}"}
    for number in (1, 2):
        assert run.write_checkpoint(ranks_of_main(), run.checkpoints, number, files) == ""
        assert run.prune(run.checkpoints) == ""
    assert run.checkpoints.generations() == [2]

    def killed(payload, what):
        if what == "the other hosts' checkpoints":
            raise Killed
        return [payload]

    with pytest.raises(Killed):
        run.write_checkpoint(ranks_of_main(gather_bytes=killed), run.checkpoints, 3, files)
    assert run.checkpoints.generations() == [2, 3], "another host may have 2 alone"


@pytest.mark.parametrize(
    ("generation", "known", "has_problem"),
    [
        (12, [5, 11, 12], False),  # It was away for five generations.
        (11, [5, 11, 12], False),
        (8, [5, 7, 8], True),  # It was killed before it completed its part of the newest.
        (7, [5, 7, 8], False),
        (8, [8], False),  # It was away for one, and no other is left.
        (8, [5, 8], False),
        (9, [9], False),
    ],
)
def test_a_host_that_was_away_is_as_a_new_one(generation, known, has_problem, tmp_path):
    manager = object.__new__(CheckpointManager)
    manager._checkpoints = with_checkpoints(tmp_path, 5, 6, 7)
    manager._ranks, manager._directory = SimpleNamespace(is_main=False), SimpleNamespace(leads=True)
    assert ("is not there on" in manager._problem(generation, known)) == has_problem


@pytest.mark.parametrize(
    ("mains", "own", "newest", "left"),
    [([3, 4], [3], 3, [3]), ([4], [3], 4, [4]), ([4], None, 4, [4]), ([], [3], 0, [])],
)
def test_the_newest_within_a_generation_is_one_that_all_hosts_have(mains, own, newest, left, tmp_path):
    interim = object.__new__(InterimCheckpoints)
    interim._checkpoints = with_checkpoints(tmp_path, *mains, stem="interim")
    interim._directory = SimpleNamespace(leads=True)
    interim._ranks = SimpleNamespace(
        raise_if_any_failed=lambda problem, what: None,
        gather_bytes=lambda payload, what: [payload, json.dumps(own).encode()],
    )
    assert interim._newest() == newest
    assert interim._checkpoints.generations() == left


def test_a_rollback_that_a_full_disk_ends_can_be_repeated(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path, keep=9)
    with_checkpoints(run.checkpoints.directory, 1, 2)
    for each in (run.metrics, run.lineage):
        each.add([{"generation": 1}, {"generation": 2}])
    run.flush()

    def full(generation):
        raise OSError(errno.ENOSPC, "No space left on device")

    problems = []
    ranks = ranks_of_main(raise_if_any_failed=lambda problem, what: problems.append(problem))
    with monkeypatch.context() as patch:
        patch.setattr(run.metrics, "cut_back", full)
        run.rollback(ranks, 1, b"")
    assert "No space left" in problems.pop()
    assert run.checkpoints.generations() == [1, 2]
    run.rollback(ranks, 1, b"")
    assert problems == [""]
    assert run.checkpoints.generations() == [1]


@pytest.mark.parametrize(
    ("mains", "others", "refused"),
    [([1, 2], [1, 2], False), ([2], [], False), ([], [], False), ([], [1, 2], True), ([1, 2], [3], True)],
)
def test_a_main_process_on_another_host_does_not_begin_anew(mains, others, refused, tmp_path):
    """Its own directory is empty or old, and that of the host which had it before has the newest generation."""
    manager = object.__new__(CheckpointManager)
    manager._checkpoints = with_checkpoints(tmp_path, *mains)
    manager._checkpoints.complete(9, {"replay": manager._checkpoints.write(9, "replay", b"a rank's part")})
    manager._directory = SimpleNamespace(leads=True)
    manager._ranks = SimpleNamespace(
        is_main=True,
        raise_if_any_failed=lambda problem, what: None,
        gather_bytes=lambda payload, what: [payload, json.dumps([max(others, default=0), "b"]).encode()],
    )
    if refused:
        with pytest.raises(UserError, match=f"on b has generation {max(others)}, and on .* nothing was changed"):
            manager._refuse_a_newer_one_elsewhere()
    else:
        manager._refuse_a_newer_one_elsewhere()


def test_a_run_whose_directory_is_made_anew_leaves_that_of_the_other_run_alone(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    run = RunDirectory(path, keep=1, lock=Lock(path, 0))
    run.flush()
    shutil.rmtree(path)
    with pytest.raises(RunFailed, match=r"\.lock is missing"):
        run.flush()
    path.mkdir()
    theirs = RunDirectory(path, keep=1, lock=Lock(path, 0))
    partial = theirs.checkpoints._gathering(1)
    for write in (run.flush, lambda: run.write_checkpoint(ranks_of_main(), run.checkpoints, 50, {"state.json": b"{}"})):
        with pytest.raises(RunFailed, match=r"a: the directory .* \(\.lock is that of another run\)"):
            write()
    assert partial.is_dir()
    assert theirs.checkpoints.generations() == []
    theirs.release()
    run.release()


def test_an_interrupted_claim_releases_the_lock(tmp_path, monkeypatch):
    owner = Owner.here(Launch("a launch", restarted=False))
    settings = config(f"run={{name: a, directory: {tmp_path}}}")

    def interrupted(self, owner):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lock, "sign", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            RunDirectory.claim(settings, owner)
    assert not is_locked(tmp_path / "a"), f"an interactive session keeps the {kept.type}, and by it the lock"
    RunDirectory.claim(settings, owner).release()
