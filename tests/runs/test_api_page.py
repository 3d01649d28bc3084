"""docs/api.md: its examples run, its reference is that of the docstrings, and nothing of `evorl` is missing."""

import inspect
import re
import sys

import pytest
from helpers.support import ROOT, lines

import evorl

sys.path.insert(0, str(ROOT / "benchmarks"))
from api_page import filled

TEXT = (ROOT / "docs" / "api.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "begins"), [("metrics", "A line of `metrics"), ("lineage", "A line of `lineage")])
def test_every_field_of_a_runs_files_is_described(file, begins, trained_run):
    described = set(re.findall(r"`(\w+)`", TEXT[TEXT.index(begins) : TEXT.index("## Environments")]))
    assert lines(trained_run / f"{file}.jsonl")[-1].keys() <= described


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
    assert made == ["api-corridor", "api-first", "api-own-net", "stopped", "typed"]


def test_the_reference_is_what_the_docstrings_say(monkeypatch):
    """`python benchmarks/api_page.py` updates it."""
    assert filled(TEXT) == TEXT
    monkeypatch.setattr(evorl.load, "__doc__", "Something else.")
    assert "Something else." in filled(TEXT)


def test_signatures_are_as_a_reader_would_write_them():
    texts = blocks("text")
    assert len(texts) > 10
    for each in texts:
        assert "'" not in re.sub(r"= '[^']*'", "", each), "annotations without quotes"
    parameters = inspect.signature(evorl.train).parameters
    (own,) = [each for each in texts if each.startswith("evorl.train(")]
    assert [re.match(r"\W*(\w+)", line)[1] for line in own.splitlines()[1:-1] if line != "    *,"] == list(parameters)


@pytest.mark.parametrize("name", evorl.__all__)
def test_each_name_is_there(name):
    assert f"`evorl.{name}" in TEXT
