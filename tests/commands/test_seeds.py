"""Several seeds of one configuration."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from helpers.support import OUTSIDE, SMALL, error_line

from evorl.commands import train
from evorl.commands.command import run_command
from evorl.runs.program import run_program


def a_run(directory, number, best, solved=None):
    path = directory / f"a-seed-{number}"
    path.mkdir()
    (path / "config.yaml").write_text(f"seed: {number}\n")
    told = {"elite_fitness": best, "elite_episodes": 60, "agent_steps": 4000, "wall_clock_seconds": 12.3}
    (path / "summary.json").write_text(json.dumps({**told, "solved": solved, "ended": "finished"}))
    return number, path


def test_seeds_summary_has_a_line_for_each_and_the_mean(tmp_path):
    runs = [a_run(tmp_path, number, best, True) for number, best in ((1, 190.0), (2, 210.0), (7, 200.0), (9, 200.0))]
    heading, first, *_, last = train.summary_lines(runs)
    assert heading.split() == list(train.HEADINGS)
    assert first.split() == ["1", "a-seed-1", "190.0", "60", "4,000", "12", "solved"]
    # 200 ± 3.182 * 8.165 / sqrt(4).
    assert last == "best agents of 4 seeds: mean 200.0 (95 % interval 187.0 to 213.0); solved: 4 of 4"
    last = train.summary_lines(runs[:3])[-1]
    assert last == "best agents of 3 seeds: mean 200.0; solved: 3 of 3", "too few for an interval"
    (runs[0][1] / "summary.json").write_text(json.dumps({"ended": "SIGTERM", "elite_fitness": None}))
    assert train.summary_lines(runs)[1].split() == ["1", "a-seed-1", "-", "-", "0", "0", "SIGTERM"], "no agent yet"
    (runs[0][1] / "summary.json").unlink()
    row = {"generation": 1, "agent_steps": 3000, "wall_clock_seconds": 9.0, "best_fitness": 250.0}
    (runs[0][1] / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    killed, *_, last = train.summary_lines(runs)[1:]
    assert killed.split() == ["1", "a-seed-1", "-", "-", "3,000", "9", "killed"]
    assert last.startswith("best agents of 3 seeds: mean 203.3; "), "its best agent had fewer steps"


def test_output_follows_its_seed_and_codes_are_given_back(capfd):
    commands = [
        (1, [sys.executable, "-c", "import sys; print('one', file=sys.stderr)"]),
        (2, [sys.executable, "-c", "raise SystemExit(3)"]),
    ]
    assert train.train_each(commands, "") == {1: 0, 2: 3}
    assert capfd.readouterr().err == "seed 1:\none\nseed 2:\n"


def test_seeds_are_a_group_of_wandb_unless_the_user_names_one(capfd, monkeypatch):
    tell = [sys.executable, "-c", "import os; print(os.environ['WANDB_RUN_GROUP'])"]
    for variable, group in ((None, "wide"), ("mine", "mine")):
        if variable:
            monkeypatch.setenv("WANDB_RUN_GROUP", variable)
        assert train.train_each([(1, tell)], "wide") == {1: 0}
        assert capfd.readouterr().out == f"{group}\n"


def test_interrupted_seeds_end_all_and_begin_no_other(tmp_path):
    """A launcher's SIGTERM reaches this process alone."""
    waits = [sys.executable, "-c", f"import time; open({str(tmp_path / 'waiting')!r}, 'w'); time.sleep(60)"]
    begins = [sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"]

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def interrupt_once_it_waits():
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=interrupt_once_it_waits, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train.train_each([(1, waits), (2, begins)], "")
    signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 30
    assert not (tmp_path / "begun").exists()


def commands_of(monkeypatch, *words):
    given = []
    monkeypatch.setattr(train, "train_each", lambda commands, group: given.append((commands, group)) or {})
    monkeypatch.setattr(train, "summary_lines", lambda runs: [])
    assert run_program(run_command, ["train", str(SMALL), *words]) == 0
    return given[0]


def test_words_after_seeds_are_settings(in_directory, monkeypatch):
    commands, group = commands_of(monkeypatch, "--seeds", "4", "5", "population.size=2")
    assert group == "dqn-CartPole-v1"
    for number, command in commands:
        name = f'run.name="dqn-CartPole-v1-seed-{number}"'
        assert command[4:] == [
            "train", str(SMALL), "population.size=2", f"seed={number}", name,
            "run.resume=auto",
        ]  # fmt: skip
    assert [number for number, _ in commands] == [4, 5]
    commands, group = commands_of(monkeypatch, "--seeds", "1", "2", "3", "--name", "x", "--processes", "2")
    assert [(number, command[-2]) for number, command in commands] == [(n, f'run.name="x-seed-{n}"') for n in (1, 2, 3)]
    assert all(command[4:7] == ["train", "--processes", "2"] for _, command in commands)
    assert group == "x"
    commands, _ = commands_of(monkeypatch, "--seeds", "1", "--name", "run🙂", OUTSIDE)  # Each seed warns of it.
    assert commands[0][1][-2] == 'run.name="run🙂-seed-1"'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "1", "1"], "--seeds: each seed may be given once, not 1 1"),
        (["--seeds", "1", "seed=4"], "seed: --seeds sets it; leave one of them out"),
        (["--no-track", "tracking.backends=[tensorboard]"], "tracking.backends: --no-track sets it; leave one of them"),
        (["--seeds", "1", "algorithm.gamma=7"], "algorithm.gamma: 7 is out of range"),
    ],
)
def test_wrong_options_of_seeds_are_refused_first(words, message, in_directory, monkeypatch, capsys):
    monkeypatch.setattr(train, "train_each", None)
    assert run_program(run_command, ["train", str(SMALL), *words]) == 2
    assert message in error_line(capsys)


@pytest.mark.slow
def test_seeds_train_and_are_taken_up_again(in_directory, capfd):
    settings = ["--name", "a", "training.max_steps=40"]
    words = ["train", str(SMALL), "--seeds", "1", "2", *settings]
    assert run_program(run_command, ["train", str(SMALL), "--seeds", "1", *settings]) == 0
    first = in_directory / "runs" / "a-seed-1" / "metrics.jsonl"
    kept = first.read_bytes()
    capfd.readouterr()
    assert run_program(run_command, words) == 0
    told = capfd.readouterr()
    assert "best agents of 2 seeds: mean" in told.out
    assert [line for line in told.err.splitlines() if line.startswith("seed ")] == ["seed 1:", "seed 2:"]
    assert sorted(path.parent.name for path in in_directory.rglob("metrics.jsonl")) == ["a-seed-1", "a-seed-2"]
    assert first.read_bytes() == kept
    assert run_program(run_command, [*words, "algorithm.gamma=0.5"]) == 2
    refused = capfd.readouterr().err
    assert "was started with another configuration: algorithm.gamma was" in refused
    assert "`evorl branch runs/a-seed-1 NEW algorithm.gamma=0.5`" in refused
    assert run_program(run_command, [*words, "evaluation.max_steps=7"]) == 2
    told = capfd.readouterr()
    assert "was started with another evaluation.max_steps; choose another --name" in told.err
    assert "best agents of" not in told.out, "they are of other settings"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--processes", "2"], "number of processes"),
        (["--processes", "2", "algorithm.split_batches=true"], "configuration: algorithm.split_batches"),
        (["training.max_steps=40"], "training.max_steps"),
        (["--processes", "2", "population.placement=sharded"], "population.placement"),
        (["population.placement=sharded"], "population.placement"),
        (["training.max_steps=110"], None),
        (["training.max_steps=200"], None),
    ],
)
def test_a_seed_that_cannot_be_averaged_with_the_others_is_refused(words, reason, run, monkeypatch, capfd):
    """The run has gone to 116 steps."""
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("max_steps: 116", "max_steps: 110"))
    run.rename(run.parent / "a-seed-1")
    monkeypatch.setattr(train, "train_each", lambda commands, group: {})
    code = run_program(
        run_command, ["train", str(SMALL), "training.max_steps=110", *words, "--name", "a", "--seeds", "1"]
    )
    assert code == (2 if reason else 0), capfd.readouterr().err
    if reason:
        assert f"runs/a-seed-1 was started with another {reason}" in error_line(capfd)
