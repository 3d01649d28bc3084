"""Commands that look at runs, or remove something of them."""

import fcntl
import json
import os
import shutil

import pytest
from helpers.support import error_line, lines

from evorl.commands import evaluate, watch
from evorl.commands.command import run_command
from evorl.commands.evaluate import evaluate_elite
from evorl.commands.lineage import rows_of
from evorl.config import Environment
from evorl.envs.vector import for_evaluation
from evorl.records import Mutation
from evorl.runs.ancestry import SAME, Stage
from evorl.runs.launch import run_program
from evorl.system import extras
from evorl.types import UserError


@pytest.fixture
def run(trained_run, in_directory):
    return shutil.copytree(trained_run, in_directory / "runs" / "a")


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


def locked_by_another_process(run):
    """Hold the run's lock in a process of its own; a file to close when it may end."""
    ready, go_on = os.pipe(), os.pipe()
    if not os.fork():
        os.close(go_on[1])
        with (run / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    return go_on[1]


def test_a_run_that_trains_is_said_to_and_keeps_its_checkpoints(run, capsys):
    holder = locked_by_another_process(run)
    run_command(["list", str(run.parent)])
    assert "training" in capsys.readouterr().out
    assert run_program(run_command, ["clean", "runs/a", "--yes"]) == 2
    assert "runs/a: is still training" in error_line(capsys)
    assert (run / "checkpoints").is_dir()
    os.close(holder)
    os.wait()


def test_clean_removes_checkpoints_when_told_to_and_nothing_else(run, capsys):
    before = {path.name for path in run.iterdir()}
    run_command(["clean", "runs/a"])
    assert {path.name for path in run.iterdir()} == before
    run_command(["clean", "runs/a", "--yes"])
    assert {path.name for path in run.iterdir()} == before - {"checkpoints"}
    assert "MB of checkpoints removed" in capsys.readouterr().out
    assert evaluate_elite(run, 1, 0)["episodes"] == 1
    assert run_program(run_command, ["clean", "runs"]) == 2
    (run / "checkpoints").symlink_to(run.parent)
    assert run_program(run_command, ["clean", "runs/a", "--yes"]) == 2
    assert run.is_dir()


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
    rows = rows_of(stages, lambda name, value: value)
    assert rows == [("#3", "1 to 2", "1 to 2", "initial"), ("#7", "3", "-", str(change))]


def test_watch_writes_a_film_of_the_episodes_that_evaluate_plays(run, capsys):
    av = pytest.importorskip("av")
    run_command(["watch", "runs/a", "--video", "best.mp4", "--episodes", "2"])
    told = capsys.readouterr().out
    mean = evaluate_elite(run, 2, 0)["mean"]
    assert f"mean return {mean:.1f} over 2 episodes" in told
    with av.open("best.mp4") as film:
        assert film.streams.video[0].average_rate == 50
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) == int(told.split(": ")[1].split()[0]) == round(2 * mean) + 2, "one before each step, one after"
    assert frames[0].std() > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--video", "best.avi"], "best.avi must end in .mp4"),
        (["--video", "none/best.mp4"], "there is no directory none"),
        ([], "there is no display for a window; take --video FILE.mp4"),
    ],
)
def test_what_watch_lacks_is_said_before_anything_is_loaded(words, message, monkeypatch, in_directory, capsys):
    pytest.importorskip("av")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watch.sys, "platform", "linux")
    assert run_program(run_command, ["watch", "runs/none", *words]) == 2
    assert message in error_line(capsys)


def test_a_package_that_is_missing_is_named(monkeypatch, in_directory, capsys):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    assert run_program(run_command, ["watch", "runs/none", "--video", "a.mp4"]) == 2
    assert "--video needs av; install it with" in error_line(capsys)


def test_code_is_not_run_to_watch(run, capsys):
    text = (run / "config.yaml").read_text().replace("id: CartPole-v1", "id: evilmod:CartPole-v1")
    (run / "config.yaml").write_text(text)
    pytest.importorskip("av")
    assert run_program(run_command, ["watch", "runs/a", "--video", "a.mp4"]) == 2
    assert "add --allow-code if you trust this run" in error_line(capsys)
    assert json.loads((run / "environment.json").read_text())["environment"] == "CartPole-v1"


def test_returns_below_one_are_shown_by_their_digits(trained_run, monkeypatch, capsys):
    found = {"run": "a", "agent": 3, "episodes": 5, "mean": 0.9421, "std": 0.04, "min": -0.5, "max": 12.3456}
    monkeypatch.setattr(evaluate, "evaluate_elite", lambda *_: found)
    run_command(["evaluate", str(trained_run)])
    # ± is the standard error of the mean: 0.04 / sqrt(5).
    told = (
        "agent 3 of a: mean return 0.942 ± 0.0179 over 5 fresh episodes (standard deviation 0.04, min -0.5, max 12.3)\n"
    )
    assert capsys.readouterr().out == told


def test_a_class_of_the_users_is_known_to_what_only_evaluates(in_directory):
    (in_directory / "door_of_mine.py").write_text("import gymnasium as gym\nclass Door(gym.Env):\n    pass\n")
    assert for_evaluation(Environment(id="door_of_mine:Door")).vectorization == "auto"
    with pytest.raises(UserError, match=r"environment\.id: cannot make 'no_such_module:Door': No module named"):
        for_evaluation(Environment(id="no_such_module:Door"))
