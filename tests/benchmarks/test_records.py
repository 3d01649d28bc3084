"""The files of results, plain and compressed, and runs that one process at a time works on."""

import sys

import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from records import append, claimed, read_lines, replace_lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_are_appended_and_replaced(name, tmp_path):
    path = tmp_path / name
    assert read_lines(path) == []
    append(path, {"run": 1, "score": 2.0})
    append(path, {"run": 2, "score": 3.0}, {"run": 3, "score": 4.0})
    assert [line["score"] for line in read_lines(path)] == [2.0, 3.0, 4.0]
    replace_lines(path, [{"run": 2, "score": 5.0}], lambda line: line["run"])
    assert [line["score"] for line in read_lines(path)] == [2.0, 4.0, 5.0]


def test_a_run_that_another_has_claimed_is_left_to_it_until_it_ends(tmp_path):
    job = ("lunar_lander", "pool", 101)
    with claimed(job, tmp_path) as first:
        assert first
        with claimed(job, tmp_path) as second, claimed(("lunar_lander", "pool", 102), tmp_path) as other:
            assert not second
            assert other
    with claimed(job, tmp_path) as again:
        assert again
