"""Two real processes under `accelerate launch`."""

import json

import pytest
import torch
from helpers.support import EVERY_MUTATION, cut_back, launch, lines, saved_agents, train

from evorl.distributed import RankLost, Ranks
from evorl.types.outcomes import EvorlWarning, UserError


@pytest.mark.two_process
def test_replicas_stay_bit_identical_over_generations_of_every_mutation(tmp_path, monkeypatch, forked_launch):
    """The run itself compares digests of trained and of evolved agents each generation and fails if they differ."""
    done = launch(tmp_path, "run.name=a", "training.max_steps=240", "checkpoint.keep=10", *EVERY_MUTATION)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "a"
    rows = lines(run / "metrics.jsonl")
    assert not any(row["drifts"] for row in rows), "replicas are meant to compute the same"
    last = len(rows)
    assert last >= 6
    kinds = {mutation.split(" ")[0] for row in rows for mutation in row["mutations"]}
    assert {"architecture", "parameters", "hyperparameters"} <= kinds
    assert len({json.dumps(shape) for row in rows for shape in row["architectures"]}) > 3
    assert json.loads((run / "summary.json").read_text())["ranks"] == 2
    assert (run / "checkpoints" / f"generation-{last:06d}" / "experience-rank-001.safetensors").is_file()
    assert not [line for line in done.stderr.splitlines() if line.startswith("error: ")]

    whole = {row["generation"]: row["fitness"] for row in rows}
    cut_back(run, 3, copy=tmp_path / "runs" / "b")
    settings = ("training.max_steps=240", "checkpoint.keep=10", *EVERY_MUTATION)
    forked_launch.well(tmp_path, "run.name=b", "run.resume=auto", *settings)
    resumed = {row["generation"]: row["fitness"] for row in lines(tmp_path / "runs" / "b" / "metrics.jsonl")}
    assert resumed == whole
    for first, second in zip(saved_agents(run, last), saved_agents(tmp_path / "runs" / "b", last), strict=True):
        torch.testing.assert_close(first.tensors, second.tensors, rtol=0, atol=0)

    # One process takes the run up too, with an empty replay, and says that this is another run from here on.
    monkeypatch.chdir(tmp_path)
    longer = ["run.name=b", "checkpoint.keep=10", "training.max_steps=280", "run.resume=auto", *EVERY_MUTATION]
    with pytest.warns(
        EvorlWarning, match="not bit-exact: the number of ranks changed from 2 to 1, .*the replay starts empty"
    ):
        assert train(*longer) == 0
    assert len(lines(tmp_path / "runs" / "b" / "metrics.jsonl")) > last


@pytest.mark.two_process
def test_sharded_ranks_train_their_own_agents_and_evolve_together(tmp_path, forked_launch):
    forked_launch.well(tmp_path, "run.name=a", "population.placement=sharded", *EVERY_MUTATION)
    rows = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert not any(row["drifts"] for row in rows), "replicas are meant to compute the same"
    assert all(len(row["fitness"]) == len(set(row["agents"])) == 4 for row in rows)
    assert sorted(rows[0]["agents"]) == [0, 1, 2, 3]
    # Each agent lives on one rank: 40 steps of it in 20 steps of its two environments.
    assert rows[0]["agent_steps"] == pytest.approx(40, abs=4)


PROGRAM = """
import numpy as np, torch
from evorl.distributed import Placement, Ranks, shutdown
from evorl.types.outcomes import UserError
ranks = Ranks(timeout=60)
assert ranks.size == 2
for size in (7, 300_000):
    flat = torch.arange(float(size)) * (1 + 2 * ranks.rank)
    ranks.average_(flat)
    assert torch.equal(flat, torch.arange(float(size)) * 2), size
assert ranks.gather(np.array([1.0 + ranks.rank])).tolist() == [[1.0], [2.0]]
assert ranks.gather_bytes(b"x" * ranks.rank, "test") == [b"", b"x"]
assert ranks.broadcast_bytes(b"main" if ranks.is_main else None, "test") == b"main"
assert ranks.broadcast_bytes(b"" if ranks.is_main else b"other", "test") == b""
assert ranks.from_main(lambda: b"told", "test") == b"told"
try:
    def fail():
        raise UserError("a mistake")
    ranks.from_main(fail, "test")
except UserError as error:
    assert str(error) == "a mistake" and error.reported_elsewhere == (not ranks.is_main)
ranks.assert_identical("same", "things")
try:
    ranks.assert_identical(f"digest {ranks.rank}", "things")
    raise SystemExit("unnoticed")
except RuntimeError as error:
    assert "rank 0 and rank 1 do not hold the same things" in str(error)
shares = {kind: Placement(ranks, kind, 4) for kind in ("replicated", "sharded")}
mine = np.array([10.0 + ranks.rank, 20.0 + ranks.rank])
assert shares["sharded"].total(mine, "test").tolist() == [10.0, 20.0, 11.0, 21.0]
assert shares["replicated"].total(mine, "test").tolist() == [21.0, 41.0]
assert shares["sharded"].local == slice(2 * ranks.rank, 2 * ranks.rank + 2) and shares["sharded"].copies == 1
assert shares["replicated"].local == slice(0, 4) and shares["replicated"].copies == 2
if ranks.is_main:
    print("all agree")
shutdown()
"""


@pytest.mark.two_process
def test_what_ranks_tell_each_other(tmp_path, forked_launch):
    done = forked_launch.well(tmp_path, instead=PROGRAM)
    assert done.stderr.count("all agree") == 1


def test_ranks_that_do_not_find_each_other_are_an_error(monkeypatch):
    """As when a launcher starts two processes and Accelerate tells each that it is alone."""

    class Alone:
        process_index, num_processes, device = 0, 1, torch.device("cpu")

        def __init__(self, **options):
            pass

    monkeypatch.setattr("evorl.distributed.ranks.Accelerator", Alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"2 processes were launched, but each is alone .* `distributed_type: MULTI_GPU`"
    ):
        Ranks()


@pytest.mark.parametrize(
    ("reason", "told"),
    [("rank 1: motor stuck", "but rank 1 has ended: motor stuck$"), ("", r"ended \(every wait .*run\.timeout; reset")],
)
def test_a_rank_that_waited_tells_why_the_other_has_ended_if_that_is_known(reason, told, monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(ranks, "first_reason", lambda: reason)
    with pytest.raises(RankLost, match=told), ranks._waiting("the gradients"):
        raise RuntimeError("reset by peer")
