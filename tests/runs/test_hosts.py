"""The directory of a run, which all ranks share: how it is claimed, seen from every rank, and cut back."""

import json
import shutil
from types import SimpleNamespace

import pytest
from helpers.support import config

from evorl.distributed.ranks import Launch
from evorl.runs.storage.directory import RunDirectory, owner_of
from evorl.system.files import Lock
from evorl.types.outcomes import RunFailed, UserError


def ranks_of_main(**more):
    """A main process that is the only rank."""
    methods = {
        "from_main": lambda compute, what: compute(),
        "gather_bytes": lambda payload, what: [payload],
        "broadcast_bytes": lambda payload, what: payload,
    }
    return SimpleNamespace(is_main=True, rank=0, **methods | more)


def test_a_rank_that_does_not_see_the_directory_of_the_main_process_is_an_error(tmp_path):
    settings = config(f"run={{name: a, directory: {tmp_path}}}")

    def raises(problem, what):
        if problem:
            raise UserError(problem)

    launch = Launch("a launch", restarted=False)
    RunDirectory.open(settings, ranks_of_main(launch=launch, raise_if_any_failed=raises)).release()
    owner = owner_of(launch) | {"host": "node-a"}
    (tmp_path / "a" / ".lock").write_text(json.dumps(owner))

    def seen_by_rank_1(path):
        reply = json.dumps({"path": str(path), "owner": owner}).encode()
        other = SimpleNamespace(is_main=False, rank=1, launch=launch, raise_if_any_failed=raises)
        other.from_main = lambda compute, what: reply
        return RunDirectory.open(settings, other).path

    assert seen_by_rank_1(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(UserError, match=r"rank 1 on \S+ does not see \S+elsewhere of rank 0 on node-a; all hosts"):
        seen_by_rank_1(tmp_path / "elsewhere")


def test_a_run_whose_directory_is_made_anew_leaves_that_of_the_other_run_alone(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    run = RunDirectory(path, lock=Lock(path, 0))
    run.flush()
    shutil.rmtree(path)
    with pytest.raises(RunFailed, match=r"\.lock is missing"):
        run.flush()
    path.mkdir()
    theirs = RunDirectory(path, lock=Lock(path, 0))
    partial = theirs.checkpoints._gathering(1)
    for write in (run.flush, lambda: run.write_checkpoint(ranks_of_main(), run.checkpoints, 50, {"state.json": b"{}"})):
        with pytest.raises(RunFailed, match=r"a: the directory .* \(\.lock is that of another run\)"):
            write()
    assert partial.is_dir()
    assert theirs.checkpoints.generations() == []
    theirs.release()
    run.release()
