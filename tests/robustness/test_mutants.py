"""The sampler of mutants: what it changes, and what it says of a small program with a gap in its tests."""

import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

PROGRAM = '''
def total(values: list[int] | None) -> int | None:
    """Add up 3 numbers or more."""
    found, at = 0, 0
    while at < len(values):
        found += values[at]
        at += 1
    return found


def is_even(number, strict=True):
    return number % 2 == 0 and not (number is None)
'''
TESTS = """
from evorl.replay.sums import total

def test_total():
    assert total([1, 2, 4]) == 7
"""


# Each mutant is tried by a fork that would otherwise import pytest and the plugins of the real program's tests.
WARM = """
import importlib, sys, mutants
from _pytest.config import default_plugins

def warm():
    import pytest, pytest_timeout
    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")

mutants.warm = warm
"""
VARIABLES = os.environ | {
    "PYTHONPATH": str(Path(mutants.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_timeout",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    for name, text in {"evorl/__init__.py": "", "evorl/replay/__init__.py": "", "evorl/replay/sums.py": PROGRAM,
                       "tests/replay/test_sums.py": TESTS}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow", "two_process", "gpu"]\n')
    return tmp_path


def test_each_token_of_behaviour_has_a_mutant_and_texts_and_annotations_have_none(tree):
    found = mutants.mutants(tree)
    swapped = [(each.old, each.new) for each in found if not each.old.isdigit()]
    assert sorted(swapped) == sorted(
        [("<", "<="), ("+", "-"), ("+", "-"), ("True", "False"), ("%", "*"), ("==", "!="), ("and", "or"),
         ("not ", ""), ("is", "is not")]
    )  # fmt: skip
    numbers = [(each.line, each.old) for each in found if each.old.isdigit()]
    assert sorted(numbers) == [(4, "0"), (4, "0"), (7, "1"), (12, "0"), (12, "2")]
    for each in found:
        changed = each.apply(PROGRAM).splitlines()
        before = PROGRAM.splitlines()
        assert [at for at, line in enumerate(before) if changed[at] != line] == [each.line - 1]
        compile("\n".join(changed), "mutant", "exec")
    assert {each.names for each in found} == {("sums", "total"), ("sums", "is_even")}


def test_operators_of_several_words_and_lines_are_found_where_they_stand():
    text = "möglich = (a\n  not in b) or c is not None\n"
    finder = mutants.Finder(text, "a.py")
    finder.visit(mutants.ast.parse(text))
    assert sorted(each.apply(text) for each in finder.found) == sorted(
        [
            "möglich = (a\n  in b) or c is not None\n",
            "möglich = (a\n  not in b) and c is not None\n",
            "möglich = (a\n  not in b) or c is None\n",
        ]
    )


@pytest.mark.campaign
def test_mutants_are_killed_by_tests_or_by_the_limit_and_a_gap_is_shown(tree):
    program = WARM + "sys.exit(mutants.main(sys.argv[1:]))"
    lines = [word for line in (5, 7, 12) for word in ("--at", f"replay/sums.py:{line}")]
    command = [sys.executable, "-c", program, "--tree", str(tree), "--limit", "3", *lines]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = [line.partition(" (")[0] for line in done.stdout.splitlines()]
    by = "killed by tests/replay/test_sums.py::test_total"
    assert f"replay/sums.py:5:13 < -> <=: {by}" in said
    assert f"replay/sums.py:7:11 + -> -: {by}" in said
    assert "replay/sums.py:12:27 and -> or: SURVIVES" in said
    assert said[-1] == "3 of 10 mutants killed"
    assert (tree / "evorl" / "replay" / "sums.py").read_text() == PROGRAM


@pytest.mark.campaign
def test_a_test_that_hangs_is_ended_and_one_that_fails_by_itself_is_an_error(tree, tmp_path_factory):
    program = WARM + (
        "warm(); from pathlib import Path; tree = Path(sys.argv[1]); "
        "place = mutants.Workplace(tree, Path(sys.argv[2]), 5.0); "
        "found = mutants.mutants(tree)[0]; print(place.tried(found).late); "
        "(Path(sys.argv[2]) / 'tree/tests/replay/test_sums.py').write_text('def test_none(): assert False'); "
        "place.tried(found)"
    )
    scratch = tmp_path_factory.mktemp("scratch")
    (tree / "tests" / "replay" / "test_sums.py").write_text(
        "import time, evorl.replay.sums as s\ndef test_slow():\n    time.sleep(60 * (s.total([]) != 0))\n"
    )
    command = [sys.executable, "-c", program, str(tree), str(scratch)]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    assert "test_none fails without a mutant too" in done.stderr
