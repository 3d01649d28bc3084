"""CONTRIBUTING.md, followed word for word: its code is added to the package, and a population trains with it."""

import importlib
import re
import sys
import types

import pytest
import yaml
from helpers.support import ROOT, lines

from evorl.commands.command import run_command
from evorl.runs.program import run_program

BLOCK = re.compile(r"```(?:python|yaml)\n# (\S+?)(?:: (\w+))?\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
"""For each block of code its file, a registry in this file if it is an entry of one, and the code."""
SMALL = [
    "evolution.steps=64", "training.max_steps=192", "training.target_fitness=null", "network.hidden_sizes=[16]",
    "environment.num_envs=2", "evaluation.episodes=2", "evaluation.max_steps=20", "population.size=3",
]  # fmt: skip


def new_module(name, code, directory, monkeypatch):
    """A file of the package that is not there yet."""
    path = directory / f"{name.rpartition('.')[2]}.py"
    path.write_text(code)  # Settings read the sentences below their fields from the file.
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, path, "exec", dont_inherit=True), vars(module))


@pytest.fixture
def configurations(monkeypatch, tmp_path):
    """What CONTRIBUTING.md adds to the shipped configurations, once all its code has been added to the package."""
    found, names = [], []
    for file, registry, code in BLOCKS:
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if file.endswith(".yaml"):
            found.append(tmp_path / file.rpartition("/")[2])
            found[-1].write_text(code)
        elif not (ROOT / file).is_file():
            new_module(name, code, tmp_path, monkeypatch)
        elif registry:
            module = importlib.import_module(name)
            for key, value in eval(f"{{{code}}}", vars(module)).items():
                monkeypatch.setitem(getattr(module, registry), key, value)
        else:
            namespace = vars(importlib.import_module(name))
            known = set(namespace)
            exec(compile(code, file, "exec", dont_inherit=True), namespace)
            names += [(namespace, each) for each in set(namespace) - known]
    yield found
    for namespace, each in names:
        del namespace[each]


def test_what_it_adds_trains(configurations, in_directory):
    assert [key for _, key, _ in BLOCKS if key] == ["SETTINGS", "ALGORITHMS", "MUTATIONS", "SELECTIONS", "TRACKERS"]
    (file,) = configurations
    changes = [
        "tracking.backends=[fitness_csv]", "evolution.selection.name=ranking", "evolution.burn_in=0",
        "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 0, momentum: 1}",
    ]  # fmt: skip
    assert run_program(run_command, ["train", str(file), "--name", "a", *changes, *SMALL]) == 0
    run = in_directory / "runs" / "a"
    rows = lines(run / "metrics.jsonl")
    written = [line.split(",") for line in (run / "fitness.csv").read_text().splitlines()]
    assert [float(best) for _, best in written] == [row["best_fitness"] for row in rows]
    kinds = [row["mutation"]["kind"] for row in lines(run / "lineage.jsonl")]
    assert kinds[:3] == ["initial"] * 3
    children = {row["id"] for row in lines(run / "lineage.jsonl") if row["mutation"]["kind"] == "momentum"}
    assert len(children) == len(rows) - 1
    assert yaml.safe_load((run / "config.yaml").read_text())["algorithm"]["name"] == "reinforce"
