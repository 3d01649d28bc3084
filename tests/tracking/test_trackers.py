"""Trackers: a run that is taken up again goes on in the same curves, and a tracker that fails ends nothing."""

import json
import re
import shutil
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import wandb
from helpers.offline_wandb import records
from helpers.support import config, lines, train
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evorl.tracking.tracker import Record
from evorl.tracking.trackers import TRACKERS, Trackers
from evorl.types.outcomes import EvorlWarning

HISTORY = [Record(number, 10 * number, {"x": -number, "time/training": number}) for number in range(1, 8)]


def offline(run):
    """The offline directories of a run in their order: its id and its rows {step: points} in each."""
    found = []
    for directory in sorted((run / "wandb").glob("offline-run-*")):
        rows, run_id = [], None
        for record in records(directory):
            if record.HasField("run"):
                run_id = record.run.run_id
                assert not record.run.resume, "an upload would be added to an earlier one instead of replacing it"
            if record.HasField("history"):
                items = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
                rows.append((record.history.step.num, items))
        assert len({step for step, _ in rows}) == len(rows), "a step is there twice"
        found.append((run_id, dict(rows)))
    return found


def scalars(run, name="time/training", line=""):
    accumulator = EventAccumulator(str(run / "tensorboard" / line), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def logged(name, directory, history, upto):
    """Log the generations after `history` up to `upto`, as a run does."""
    trackers = Trackers(config(f"tracking.backends=[{name}]"), directory, history)
    for entry in HISTORY[len(history) : upto]:
        trackers.log(entry)
    return trackers


def test_wandb_takes_from_its_own_variables_what_organises_runs(tmp_path, monkeypatch, capsys):
    given = {"ENTITY": "team", "RUN_GROUP": "seeds", "JOB_TYPE": "search", "NOTES": "a note", "TAGS": "one,two"}
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # It reads them once in a process.
    finish(logged("wandb", tmp_path, (), 1))
    assert capsys.readouterr().out.count("W&B: no key found, so the run is recorded offline") == 1
    wandb.teardown()
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    run = next(record.run for record in records(directory) if record.HasField("run"))
    assert (run.entity, run.run_group, run.job_type, run.notes) == ("team", "seeds", "search", "a note")
    assert list(run.tags) == ["one", "two"]


def finish(trackers):
    trackers.finish({"solved": False}, [])


def test_a_stopped_run_goes_on_in_the_same_curves(in_directory):
    backends = "tracking.backends=[wandb, tensorboard]"
    run = in_directory / "runs" / "a"
    assert train("run.name=a", "training.max_steps=80", backends) == 0
    time.sleep(1)  # W&B names its directories by the second.
    assert train("run.name=a", "training.max_steps=160", "run.resume=auto", backends) == 0
    rows = lines(run / "metrics.jsonl")
    steps = [row["global_steps"] for row in rows]
    assert len(rows) >= 4
    (before, first), (after, newest) = offline(run)
    assert before == after == json.loads((run / "tracking.json").read_text())["wandb"]
    assert list(first) == steps[: len(first)]
    assert 2 <= len(first) < len(rows)
    assert list(newest) == steps == [points["global_steps"] for points in newest.values()]
    assert [points["fitness/best"] for points in newest.values()] == [row["best_fitness"] for row in rows]
    assert (run / "wandb" / "latest-run").resolve() == sorted((run / "wandb").glob("offline-run-*"))[-1]
    assert scalars(run, "fitness/mean") == [
        (step, pytest.approx(row["mean_fitness"])) for step, row in zip(steps, rows, strict=True)
    ]
    shown = plugin_event_accumulator.EventAccumulator(
        str(run / "tensorboard"), tensor_size_guidance={"text": 0}
    ).Reload()
    assert len(shown.Tensors("lineage/text_summary")) == 1, "the first part's is replaced"


@pytest.mark.parametrize(("recorded", "lacks"), [(4, [50, 60, 70]), (3, [41, 50, 60, 70])])
def test_an_online_run_is_told_what_it_lacks_and_nothing_twice(recorded, lacks, tmp_path, monkeypatch):
    """W&B has four generations, or three and a point beyond the fourth's end; the checkpoint has three."""
    started, steps = [], []

    def init(**arguments):
        started.append((arguments["id"], arguments["resume"]))
        return SimpleNamespace(
            starting_step=41,
            summary={"generation": recorded},
            define_metric=lambda *names, **options: None,
            log=lambda _, step, commit: steps.append(step),
        )

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "online")
    logged("wandb", tmp_path, HISTORY[:3], 7)
    assert steps == lacks
    assert started == [(json.loads((tmp_path / "tracking.json").read_text())["wandb"], "allow")]


def test_tensorboard_is_dropped_in_one_line_where_its_directory_was_removed(tmp_path, monkeypatch):
    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    trackers = logged("tensorboard", tmp_path, (), 1)
    shutil.rmtree(tmp_path / "tensorboard")
    with pytest.warns(EvorlWarning, match="tensorboard failed and is off from here on: .* No such file or directory"):
        trackers.log(Record(2, 20, {"x": 2.0}))
    assert not tracebacks
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_forgets_what_is_rerun_and_learns_what_it_missed(tmp_path):
    finish(logged("tensorboard", tmp_path, HISTORY[:0], 5))
    finish(logged("tensorboard", tmp_path, HISTORY[:3], 6))
    assert scalars(tmp_path) == [(10 * generation, generation) for generation in range(1, 7)]
    late = tmp_path / "late"
    late.mkdir()
    finish(logged("tensorboard", late, HISTORY[:4], 5))
    assert scalars(late, "x") == [(10 * generation, -generation) for generation in range(1, 6)]
    finish(logged("tensorboard", late, HISTORY[:0], 2))
    assert scalars(late) == [(10, 1), (20, 2)], "a run without a checkpoint begins again"


class Failing:
    """A tracker that raises or hangs where it is told to."""

    def __init__(self, where, how):
        self.where, self.how, self.calls = where, how, []

    def log(self, record):
        self._call("log")

    def finish(self, summary, lineage):
        self._call("finish")

    def _call(self, name):
        self.calls.append(name)
        if name == self.where:
            self.how()


OPEN = threading.Event()


def no_room():
    raise OSError("no room")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how", "calls", "message"),
    [
        ("log", no_room, ["log"], "no room"),
        ("finish", OPEN.wait, ["log"] * 3 + ["finish"], "it did not close within 3 s"),
    ],
)
def test_a_tracker_that_fails_is_told_once_and_training_ends_well(
    where, how, calls, message, in_directory, monkeypatch, request
):
    OPEN.clear()
    request.addfinalizer(OPEN.set)  # The end of every later run would wait for the thread.
    failing = Failing(where, how)
    # The other tracker must close within it as well.
    monkeypatch.setattr("evorl.tracking.trackers.GRACE", 60.0 if how is no_room else 2.9)
    monkeypatch.setattr("evorl.tracking.trackers.TRACKER_PATIENCE", 0.1)
    monkeypatch.setitem(TRACKERS, "wandb", lambda config, directory, history: failing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        assert train("run.name=a", "training.max_steps=108", "tracking.backends=[wandb, tensorboard]") == 0
        assert time.monotonic() - began < 30
    told = [str(w.message) for w in caught if "failed and is off from here on" in str(w.message)]
    assert len(told) == 1
    line = r" \(.*test_trackers.py:\d+ in no_room: raise OSError\(\"no room\"\)\)" if how is no_room else ""
    assert re.fullmatch(f"tracking.backends: wandb failed and is off from here on: {message}{line}", told[0])
    assert failing.calls == calls
    assert len(scalars(in_directory / "runs" / "a")) == 3, "the other tracker goes on"
    assert json.loads((in_directory / "runs" / "a" / "summary.json").read_text())["ended"] == "finished"
