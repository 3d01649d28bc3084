"""The elite's ancestors, read from a run's lineage."""

import json
import shutil
from itertools import pairwise

import pytest
from helpers.support import lines

from evorl.commands.command import run_command
from evorl.runs.reading.lineage import SAME, ancestry
from evorl.types.agents import Mutation
from evorl.types.outcomes import UserError

pytestmark = pytest.mark.filterwarnings("ignore:no episode ended")


@pytest.fixture
def run(mutated_run, in_directory):
    return shutil.copytree(mutated_run, in_directory / "runs" / "a")


def test_stages_lead_from_an_initial_agent_to_the_elite(run):
    stages = ancestry(run)
    rows = {(row["generation"], row["id"]): row for row in lines(run / "lineage.jsonl")}
    assert stages[0].generation == 1
    assert stages[0].parent is None
    assert stages[-1].id == json.loads((run / "elite" / "agent.json").read_text())["id"]
    for before, after in pairwise(stages):
        if after.id == before.id:
            assert after.mutation == SAME, "a birth is told once"
            assert after.generation == before.generation + 1
        else:
            assert (before.generation, before.id) == (after.parent_generation, after.parent)
            assert after.mutation == Mutation(**rows[after.generation, after.id]["mutation"])
    assert len({stage.id for stage in stages}) > 2, "the winner is meant to have ancestors"


def test_ancestry_tells_a_mutation_only_at_birth(run):
    elite = json.loads((run / "elite" / "agent.json").read_text())["id"]
    row = lines(run / "lineage.jsonl")[0]
    born = {"kind": "parameters", "target": "noise", "before": None, "after": 0.1}
    child = {**row, "id": elite, "parent": row["id"], "parent_generation": 1, "mutation": born}
    change(run, lambda rows: rows.__setitem__(slice(None), [row, child | {"generation": 2}, child | {"generation": 3}]))
    metrics = lines(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text(json.dumps(metrics[-1] | {"elite_generation": 3}) + "\n")
    assert [stage.mutation.kind for stage in ancestry(run)] == ["initial", "parameters", "none"]


def test_lineage_settings_shows_each_stage_and_mutation(run, capsys):
    run_command(["lineage", str(run), "--settings"])
    shown = capsys.readouterr().out.splitlines()
    stages = ancestry(run)
    assert len(shown) == 1 + len(stages)
    for line, stage in zip(shown[1:], stages, strict=True):
        assert line.split()[:2] == [str(stage.generation), str(stage.id)]
        assert stage.mutation == SAME or str(stage.mutation) in line


def change(run, what):
    rows = lines(run / "lineage.jsonl")
    what(rows)
    (run / "lineage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_ancestry_refuses_an_empty_lineage(run):
    change(run, lambda rows: rows.clear())
    with pytest.raises(UserError, match=r"lineage.jsonl: has no line for agent \d+ in generation"):
        ancestry(run)


def test_ancestry_refuses_a_circular_lineage(run):
    def circle(rows):
        for row in rows:
            row["id"], row["parent"], row["parent_generation"] = row["id"] + row["generation"] * 1000, row["id"], 99

    change(run, circle)
    with pytest.raises(UserError, match=r"lineage.jsonl"):
        ancestry(run)
