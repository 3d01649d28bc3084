"""Checkpoints of hosts with directories of their own: what they have in common wherever a process is killed."""

import json
from types import SimpleNamespace

import pytest

from evorl.runs.checkpoint import CheckpointManager, InterimCheckpoints
from evorl.runs.directory import Checkpoints, RunDirectory


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
