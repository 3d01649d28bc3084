"""Reading what a run has written, whole, unfinished or damaged."""

import json
import shutil

import numpy as np
import pytest
from helpers.support import lines

from evorl.runs.read import columns, read_run
from evorl.types import UserError


@pytest.fixture
def run(trained_run, in_directory):
    return shutil.copytree(trained_run, in_directory / "a")


def test_a_run_is_read_as_it_was_written(run):
    record = read_run(run)
    rows = lines(run / "metrics.jsonl")
    assert record.metrics == rows
    assert record.lineage == lines(run / "lineage.jsonl")
    assert record.config["algorithm"]["name"] == "dqn"
    assert record.elite["id"] == json.loads((run / "elite" / "agent.json").read_text())["id"]
    assert record.summary["ended"] == "finished"
    assert record.metric("best_fitness").tolist() == [row["best_fitness"] for row in rows]


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


@pytest.mark.parametrize("payload", [b"", b"[]", b"[" * 100_000, b"{", b"\xff\xfe", b"3"])
def test_a_damaged_file_is_as_one_that_is_not_there(payload, run):
    for name in ("metrics.jsonl", "summary.json", "elite/agent.json"):
        (run / name).write_bytes(payload)
    record = read_run(run)
    assert (record.metrics, record.elite, record.summary) == ([], {}, {})


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "elite", "elite/agent.json", "summary.json"])
def test_a_link_is_not_followed(name, run, tmp_path):
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a symbolic link"):
        read_run(run)


def test_no_run_and_too_many_columns_are_errors(tmp_path):
    with pytest.raises(UserError, match="there is no run here"):
        read_run(tmp_path)
    with pytest.raises(UserError, match=r"10,001 columns"):
        columns([{str(number): number for number in range(10_001)}])
