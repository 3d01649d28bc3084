"""Commands that say what runs are, or delete something of them."""

import fcntl
import os
import shutil

import pytest
from helpers.support import lines, train

from evorl.commands.command import run_command
from evorl.commands.inspect import lineage_table
from evorl.runs.reading.lineage import SAME, Stage
from evorl.types.agents import Mutation


def test_list_says_what_runs_are_and_how_they_ended(run, capsys):
    for name in ("killed", "begun", "broken"):
        shutil.copytree(run, run.parent / name)
        (run.parent / name / "summary.json").unlink()
    (run.parent / "begun" / "metrics.jsonl").unlink()
    (run.parent / "broken" / "config.yaml").write_text("- 1")
    (run.parent / "notes").mkdir()
    run_command(["list"])
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "environment", "algorithm", "seed", "best", "steps", "state", "size"]
    told = {row.split()[0]: row for row in rows}
    assert set(told) == {"a", "killed", "begun", "broken"}
    last = lines(run / "metrics.jsonl")[-1]
    steps = f"{last['agent_steps']:,}"
    assert told["a"].split()[1:7] == ["CartPole-v1", "dqn", "1", f"{last['elite_fitness']:.1f}", steps, "finished"]
    assert "killed" in told["killed"].split()[1:]
    assert told["begun"].split()[4:7] == ["-", "-", "begun"]
    assert "cannot be read" in told["broken"]


def test_list_names_runs_of_a_group_and_a_run_itself(run, capsys, monkeypatch):
    shutil.copytree(run, run.parent / "group" / "b")
    run_command(["list"])
    assert {row.split()[0] for row in capsys.readouterr().out.splitlines()[1:]} == {"a", "group/b"}
    for place in (str(run), "."):
        run_command(["list", place])
        (row,) = capsys.readouterr().out.splitlines()[1:]
        assert row.split()[:2] == ["a", "CartPole-v1"]
        monkeypatch.chdir(run)


@pytest.mark.filterwarnings("ignore:no episode ended:evorl.types.outcomes.EvorlWarning")
def test_list_says_where_runs_come_from(run, capsys):
    def told():
        run_command(["list"])
        heading, *rows = capsys.readouterr().out.splitlines()
        return {row.split()[0]: row[heading.index("origin") :] for row in rows}

    assert train("run.name=b", "training.max_steps=40", "population.from=runs/a") == 0
    assert told() == {"a": "", "b": "agents of a"}


def locked_by_another_process(run):
    """Hold the run's lock in a process of its own; a file to close when it may end."""
    ready, go_on = os.pipe(), os.pipe()
    if not (holder := os.fork()):
        os.close(go_on[1])
        with (run / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    return holder, go_on[1]


def test_a_run_that_trains_is_said_to(run, capsys):
    holder, go_on = locked_by_another_process(run)
    run_command(["list", str(run.parent)])
    assert "training" in capsys.readouterr().out
    os.close(go_on)
    os.waitpid(holder, 0)


def test_lineage_has_a_row_for_each_ancestor(run, capsys):
    run_command(["lineage", "runs/a"])
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "agent"
    assert "initial" in first
    change = Mutation("hyperparameters", "gamma", 0.9, 0.99)
    stages = [
        Stage(1, 3, None, None, Mutation("initial"), {}, {}, 1.0),
        Stage(2, 3, None, None, SAME, {}, {}, 2.0),
        Stage(3, 7, 3, 2, change, {}, {}, None),
    ]
    _, *rows = lineage_table(stages, lambda name, value: value)
    assert [row.split(maxsplit=n) for row, n in zip(rows, (7, 3), strict=True)] == [
        ["#3", "1", "to", "2", "1", "to", "2", "initial"],
        ["#7", "3", "-", str(change)],
    ]
