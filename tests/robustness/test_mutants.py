"""The sampler of mutants: what it changes, and what it says of a small program with a gap in its tests."""

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


@pytest.fixture
def tree(tmp_path):
    for name, text in {"evorl/__init__.py": "", "evorl/replay/__init__.py": "", "evorl/replay/sums.py": PROGRAM,
                       "tests/replay/test_sums.py": TESTS}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow", "two_process"]\n')
    return tmp_path


def test_mutants_cover_tokens_but_no_texts_and_annotations(tree):
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
