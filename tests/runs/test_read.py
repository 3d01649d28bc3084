"""Reading what a run has written, whole, unfinished or damaged."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.long_runs import write_long_run
from helpers.support import lines

from evorl.runs.json_lines import JsonLines, members_of, row_of
from evorl.runs.lineage import ancestry
from evorl.runs.read import read_overview, read_run
from evorl.runs.table import Table, columns
from evorl.system.files import read_lines, read_lines_backwards
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


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run of 120 generations of 12 agents, not to be changed."""
    return write_long_run(tmp_path_factory.mktemp("long") / "a", 120, 12)


def test_simulated_runs_have_the_lines_of_trained_ones(run, long_run):
    for name in ("metrics.jsonl", "lineage.jsonl"):
        trained, simulated = (lines(path / name)[0] for path in (run, long_run))
        first = list(trained).index("architectures")
        assert list(trained)[:first] == list(simulated)[:first], "in the order in which reports read them"
        assert trained.keys() == simulated.keys()


@pytest.mark.parametrize("text", ["", "\n", "a\n", "a", "a\nbb\n\nccccccccc\nd", "x" * 50 + "\n" + "y" * 9 + "\n"])
def test_lines_are_the_same_from_either_end(text, tmp_path, monkeypatch):
    (tmp_path / "a").write_text(text)
    for block in range(1, 12):
        monkeypatch.setattr("evorl.system.files.FIRST_BLOCK", block)
        forwards = list(read_lines(tmp_path / "a"))
        assert forwards == text.encode().splitlines(keepends=True)
        assert list(read_lines_backwards(tmp_path / "a")) == forwards[::-1]


def test_the_newest_line_is_found_before_damaged_ones(tmp_path):
    log = JsonLines(tmp_path / "a.jsonl")
    assert (log.last(), list(log.rows()), list(log.members("x"))) == (None, [], [])
    log.path.write_bytes(
        b'{"generation": 1}\n{"generation": 2, "x": 3}\n\xff\n[]\n{"generation": "3"}\n{"generation": 4'
    )
    assert log.last() == {"generation": 2, "x": 3}
    assert log.newest(9) == list(log.rows()) == list(log.members("x"))


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"generation": 3, "a": [1, {"b": 2}], "c": 1}', ("a",)),
        ('{"a":"}, \\"generation\\": 9","generation":3,"c":[]}', ("a",)),
        ('{"c": 1, "generation": 3}', ("a",)),
        ('{"generation": 3}', ()),
        ('  {"generation" : 3, "a": 1}', ("a",)),
        ('{"generation": 3, "a" 1}', ("a",)),
        ('{"generation": 3,, "a": 1}', ("a",)),
        ('{"generation": "3", "a": 1}', ("a",)),
        ("{}", ("a",)),
        ("{", ()),
        ("[3]", ()),
        ("", ("a",)),
    ],
)
def test_a_line_is_decoded_as_far_as_it_is_needed(line, names):
    whole, part = row_of(f"{line}\n".encode()), members_of(f"{line}\n".encode(), names)
    wanted = {"generation", *names}
    pick = lambda row: row and {name: value for name, value in row.items() if name in wanted}  # noqa: E731
    assert pick(part) == pick(whole)


ROWS = [
    {"a": 1, "b": {"c": True, "d": []}, "e": [1, 2]},
    {"a": 1.0, "b": 3, "e": [{"f": 1.5}, {"f": None, "g": ["x"] * 12}, [[0.5], []]]},
    {"a": 10**400, "b": {}, "h": "x"},
    {"a": False, "e": list(range(20)), "h": None, "b": {"c": "x"}},
    {},
    {"a": 2**53 + 1, "b": {"d": [1.0, 2]}},
]


def test_a_table_gives_back_its_rows_with_their_types():
    table = Table(ROWS)
    assert [json.loads(json.dumps(row, sort_keys=True)) for row in table] == ROWS
    for row, given in zip(table, ROWS, strict=True):
        assert json.dumps(row, sort_keys=True) == json.dumps(given, sort_keys=True), "1 is not 1.0, nor True"
    assert table[-1] == ROWS[-1]
    assert table[1:3] == ROWS[1:3]
    assert table == ROWS != table[:2]
    deep = [{"a": json.loads("[" * 200 + "]" * 200)}] * 2
    assert Table(deep) == deep


def peak_of(read):
    """The most memory in bytes that this takes."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


STREAMED = {
    "all lines": lambda run: sum(1 for _ in JsonLines(run / "metrics.jsonl").rows()),
    "the overview": read_overview,
    "the first members": lambda run: sum(1 for _ in JsonLines(run / "metrics.jsonl").members("agents")),
    "the lineage": lambda run: ancestry(run),
    "the cut": lambda run: JsonLines(run / "lineage.jsonl").cut_back(110),
}


@pytest.mark.parametrize("read", STREAMED.values(), ids=STREAMED)
def test_what_needs_no_table_keeps_a_few_lines_only(read, long_run, tmp_path, monkeypatch):
    run = shutil.copytree(long_run, tmp_path / "a")
    elite = json.loads((run / "elite" / "agent.json").read_text())
    monkeypatch.setattr("evorl.runs.lineage.load_elite", lambda run: ({}, SimpleNamespace(id=elite["id"])))
    monkeypatch.setattr("evorl.system.files.BLOCK", 2**14)
    read(run)  # What is imported or compiled at the first time.
    assert (long_run / "lineage.jsonl").stat().st_size > 1_000_000
    assert peak_of(lambda: read(run)) < 800_000


def test_a_run_is_kept_in_less_than_its_files(long_run):
    size = sum((long_run / name).stat().st_size for name in ("metrics.jsonl", "lineage.jsonl"))
    assert peak_of(lambda: read_run(long_run)) < 0.6 * size


def test_the_winner_is_followed_through_a_long_lineage(long_run, monkeypatch):
    elite = json.loads((long_run / "elite" / "agent.json").read_text())
    monkeypatch.setattr("evorl.runs.lineage.load_elite", lambda run: ({}, SimpleNamespace(id=elite["id"])))
    known = {(row["generation"], row["id"]): row for row in lines(long_run / "lineage.jsonl")}
    key, path = (elite["generation"], elite["id"]), []
    while key in known:
        row = known[key]
        path.append(key)
        before = key[0] - 1, key[1]
        key = before if before in known else (row["parent_generation"], row["parent"])
    assert len({agent for _, agent in path}) > 10
    assert [(stage.generation, stage.id) for stage in ancestry(long_run)] == path[::-1]
