"""Reading what a run has written, whole, unfinished or damaged."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.drawn import write_long_run
from helpers.support import lines

from evorl.runs.reading.lineage import ancestry
from evorl.runs.reading.read import columns, read_run
from evorl.runs.storage.json_lines import JsonLines
from evorl.types.outcomes import UserError


def test_a_run_is_read_as_it_was_written(run):
    record = read_run(run)
    rows = lines(run / "metrics.jsonl")
    assert record.metrics == rows
    assert record.lineage == lines(run / "lineage.jsonl")
    assert record.config["algorithm"]["name"] == "dqn"
    assert record.elite["id"] == json.loads((run / "elite" / "agent.json").read_text())["id"]
    assert record.summary["ended"] == "finished"
    assert record.metric("best_fitness").tolist() == [row["best_fitness"] for row in rows]


@pytest.mark.parametrize("name", ["bestfitness", "mutations"])
def test_a_metric_that_no_generation_has_is_refused(name, run):
    with pytest.raises(UserError, match=rf"a: no generation has the number '{name}'; did you mean|known"):
        read_run(run).metric(name)


def test_columns_are_numbers_where_all_are(run):
    record = read_run(str(run))
    table = columns(record.lineage)
    assert {len(column) for column in table.values()} == {len(record.lineage)}
    assert table["hyperparameters.learning_rate"].dtype == np.float64
    assert table["mutation.kind"].tolist() == [row["mutation"]["kind"] for row in record.lineage]
    parents = [row["parent"] for row in record.lineage]
    assert np.isnan(table["parent"]).tolist() == [parent is None for parent in parents]
    assert None in parents


def test_rows_that_differ_give_columns_of_one_length():
    table = columns([{"a": 1, "b": {"c": True}}, {"a": None, "d": [1, 2]}, {"a": 10**400}])
    assert table["a"][0] == 1.0
    assert np.isnan(table["a"][1:]).all()
    assert table["b.c"].tolist()[0] == 1.0
    assert table["d"].tolist() == [None, [1, 2], None]
    assert columns([]) == {}
    deep = json.loads('{"a": ' * 200 + "1" + "}" * 200)
    assert {len(column) for column in columns([deep, {"a.b": 1, "a": {"b": 2}}]).values()} == {2}


def test_a_run_that_has_only_begun_is_read(run):
    for name in ("metrics.jsonl", "lineage.jsonl", "summary.json"):
        (run / name).unlink()
    shutil.rmtree(run / "elite")
    record = read_run(run)
    assert (record.metrics, record.lineage, record.elite, record.summary) == ([], [], {}, {})
    assert record.metric("best_fitness").shape == (0,)


def test_a_line_that_is_not_yet_whole_is_left_out(run):
    before = read_run(run).metrics
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"generation": 4, "best_fit')
    assert read_run(run).metrics == before


@pytest.mark.parametrize("payload", [b"", b"[", b"\xff\xfe"])
def test_a_damaged_file_is_as_one_that_is_not_there(payload, run):
    for name in ("metrics.jsonl", "summary.json", "elite/agent.json"):
        (run / name).write_bytes(payload)
    record = read_run(run)
    assert (record.metrics, record.elite, record.summary) == ([], {}, {})


def test_a_link_is_not_followed(run, tmp_path):
    (run / "elite").rename(tmp_path / "outside")
    (run / "elite").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a symbolic link"):
        read_run(run)


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="there is no run here"):
        read_run(tmp_path)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run of 120 generations of 12 agents, not to be changed."""
    return write_long_run(tmp_path_factory.mktemp("long") / "a", 120, 12)


def test_the_newest_line_is_found_before_damaged_ones(tmp_path):
    log = JsonLines(tmp_path / "a.jsonl")
    assert (log.last(), list(log.rows())) == (None, [])
    log.path.write_bytes(
        b'{"generation": 1}\n{"generation": 2, "x": 3}\n\xff\n[]\n{"generation": "3"}\n{"generation": 4'
    )
    assert log.last() == {"generation": 2, "x": 3}
    assert log.newest(9) == list(log.rows())


def test_the_winner_is_followed_through_a_long_lineage(long_run, monkeypatch):
    elite = json.loads((long_run / "elite" / "agent.json").read_text())
    monkeypatch.setattr("evorl.runs.reading.lineage.load_elite", lambda run: ({}, SimpleNamespace(id=elite["id"])))
    known = {(row["generation"], row["id"]): row for row in lines(long_run / "lineage.jsonl")}
    key, path = (elite["generation"], elite["id"]), []
    while key in known:
        row = known[key]
        path.append(key)
        before = key[0] - 1, key[1]
        key = before if before in known else (row["parent_generation"], row["parent"])
    assert len({agent for _, agent in path}) > 10
    assert [(stage.generation, stage.id) for stage in ancestry(long_run)] == path[::-1]
