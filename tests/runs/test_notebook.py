"""docs/quick_start.ipynb: its cells run from top to bottom, and what it shows is of such a run."""

import json
import re

import pytest
from helpers.support import ROOT

TEXT = (ROOT / "docs" / "quick_start.ipynb").read_text()
CELLS = [cell for cell in json.loads(TEXT)["cells"] if cell["cell_type"] == "code"]


def outputs(kind):
    return [each for cell in CELLS for each in cell["outputs"] if each["output_type"] == kind]


def test_notebook_cells_run_from_top_to_bottom(in_directory, monkeypatch, capsys):
    """As Jupyter runs them, in one namespace, with fewer steps of training."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    drawn = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append([len(axis.lines) for axis in pyplot.gcf().axes]))
    names = {}
    for cell in CELLS:
        source = re.sub(r"^STEPS = [\d_]+", "STEPS = 300", "".join(cell["source"]), flags=re.MULTILINE)
        exec(compile(source, "docs/quick_start.ipynb", "exec"), names)
    pyplot.close("all")
    assert len(drawn) == len(outputs("display_data")), "a figure of each that the notebook holds"
    assert drawn[0] == [6, 1], "four agents, the best, the mean; learning rates"
    assert re.search(r"mean return \d+\.\d, standard deviation", capsys.readouterr().out)
    assert len(names["record"].metrics) == names["run"].summary["generations"] > 0


def test_notebook_shows_one_run_in_a_fresh_kernel():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert not outputs("error")
    assert re.search(r"<TrainedRun runs/\S+: ppo on CartPole-v1, finished", TEXT)
    assert len({*re.findall(r"runs/[\w-]+", TEXT)}) == 1, "one run"
    assert not re.search(r'"/(home|tmp|root|opt|usr)|site-packages', TEXT), "no paths of a machine"
    assert len(TEXT) < 100_000
