"""Trackio: the real one, in a process of its own since it reads its directory once, and its database read back."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest
from helpers.support import ROOT, config

from evorl.tracking.trackers import announcements

PROGRAM = """
import sys
from pathlib import Path
from helpers.support import config
from evorl.tracking.tracker import Record
from evorl.tracking.trackers import Trackers

history = [Record(number, 10 * number, {"x": -number, "losses/q_loss": 0.5}) for number in range(1, 8)]
settings = ("tracking={backends: [trackio], project: mine, exclude: [environment.kwargs]}", "seed=7")
for name, known, upto in (("a", 0, 5), ("a", 3, 6), ("b", 0, 2)):
    directory = Path(sys.argv[1]) / name
    directory.mkdir(exist_ok=True)
    trackers = Trackers(config(*settings), directory, history[:known])
    for record in history[known:upto]:
        trackers.log(record)
        trackers.log_within(record.step + 1, {"within": 1.0})
    assert "trackio" in trackers._trackers
    row = {"kind": "initial", "target": None}
    lines = [{"generation": 1, "id": 3, "parent": None, "fitness": 2.0, "mutation": row}]
    trackers.finish({"solved": True}, lines)
"""


@pytest.mark.slow
def test_a_resumed_run_replaces_its_curves_by_its_whole_history(tmp_path):
    pytest.importorskip("trackio")
    database = tmp_path / "trackio"
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    environment = own | {
        "TRACKIO_DIR": str(database), "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = "Trackio: recorded on this machine; see it with `trackio show --project mine`"
    assert done.stdout.splitlines() == [told] * 3
    (file,) = database.glob("mine*.db")
    with sqlite3.connect(file) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = dict(connection.execute("select run_name, config from configs"))
    ids = {name: json.loads((tmp_path / name / "tracking.json").read_text())["wandb"] for name in "ab"}
    names = {name: f"{name}-{id[:8]}" for name, id in ids.items()}
    found = {name: [(step, json.loads(points)) for run, step, points in rows if run == names[name]] for name in "ab"}
    assert {run for run, _, _ in rows} == set(names.values())
    assert {step: points["x"] for step, points in found["a"] if "x" in points} == {
        10 * number: -number for number in range(1, 7)
    }, "what was trained again is there once"
    assert len([points for _, points in found["a"] if "x" in points]) == 6
    assert {points["losses/q_loss"] for _, points in found["a"] if "x" in points} == {0.5}
    assert sorted(step for step, points in found["a"] if "within" in points) == [41, 51, 61]
    assert [points["x"] for _, points in found["b"] if "x" in points] == [-1, -2]
    assert "| 1 | 3 | None | initial | 2.0 |" in json.dumps(found["a"][-1][1]["lineage"])
    settings = json.loads(configs[names["a"]])
    assert settings["seed"] == 7
    assert "kwargs" not in settings["environment"], "what is to be kept is kept"


def test_a_line_says_so_where_it_sends_to_another_machine(monkeypatch):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    local = config("tracking.backends=[trackio]", "tracking.project=mine")
    assert announcements(local) == []
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://example.org?write_token=secret")
    (line,) = announcements(local)
    assert "go to the project 'mine' at 'https://example.org' (TRACKIO_SERVER_URL); `--no-track`" in line
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    assert "at 'me/space' (TRACKIO_SPACE_ID)" in announcements(local)[0]
