"""docs/api.md: its examples run, its signatures are the real ones, and nothing that `evorl` offers is missing."""

import inspect
import re
import sys
from operator import attrgetter

import pytest
from helpers.support import ROOT

import evorl

TEXT = (ROOT / "docs" / "api.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_examples_run(in_directory, monkeypatch):
    monkeypatch.syspath_prepend(in_directory)
    own, names = [], {}
    for block in blocks("python"):
        if file := re.match(r"# (\w+)\.py\n", block):
            (in_directory / f"{file[1]}.py").write_text(block)
            own.append(file[1])
        else:
            exec(compile(block, "docs/api.md", "exec"), names)
    for name in own:
        sys.modules.pop(name, None)
    made = sorted(path.name for path in (in_directory / "runs").iterdir())
    assert made == ["corridor", "first", "own-net", "stopped"]


def test_signatures_are_the_real_ones():
    written = [re.sub(r"\s+", " ", line) for block in blocks("text") for line in re.split(r"\n(?=evorl\.)", block)]
    assert len(written) > 5
    for each in written:
        name = each.split("(", 1)[0].removeprefix("evorl.")
        signature = inspect.signature(attrgetter(name)(evorl))
        assert squeezed(each) == squeezed(f"evorl.{name}{signature}")


def squeezed(text):
    """Leave out what layout may change: blanks, quotes, and the comma behind the last parameter."""
    return re.sub(r",\)", ")", re.sub(r"[\s'\"]", "", text))


@pytest.mark.parametrize("name", evorl.__all__)
def test_each_name_is_there(name):
    assert f"`evorl.{name}" in TEXT
