"""docs/python.md: its examples run, and the fields of a run's files are described."""

import re
import sys

import pytest
from helpers.support import ROOT, lines

TEXT = (ROOT / "docs" / "python.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "begins"), [("metrics", "A line of `metrics"), ("lineage", "A line of `lineage")])
def test_every_field_of_a_runs_files_is_described(file, begins, trained_run):
    described = set(re.findall(r"`(\w+)`", TEXT[TEXT.index(begins) : TEXT.index("## Environments")]))
    assert lines(trained_run / f"{file}.jsonl")[-1].keys() <= described


def test_api_page_examples_run(in_directory, monkeypatch):
    monkeypatch.syspath_prepend(in_directory)
    own, names = [], {}
    for block in blocks("python"):
        if file := re.match(r"# (\w+)\.py\n", block):
            (in_directory / f"{file[1]}.py").write_text(block)
            own.append(file[1])
        else:
            exec(compile(block, "docs/python.md", "exec"), names)
    for name in own:
        sys.modules.pop(name, None)
    made = sorted(path.name for path in (in_directory / "runs").iterdir())
    assert made == ["api-corridor", "api-first", "api-own-net", "stopped", "typed"]
