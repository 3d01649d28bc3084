"""`evorl train`, as far as one process can try it."""

import json
import os

import pytest
from helpers.support import OUTSIDE, ROOT, SMALL, error_line, lines

from evorl.commands import train
from evorl.commands.command import run_command
from evorl.commands.train import program_arguments
from evorl.config.yaml import configuration_file, read_settings, shipped_names
from evorl.runs.configuration import ASYNCHRONOUS, ONLINE, program_for, read_config
from evorl.runs.program import run_program
from evorl.runs.train import main_of
from evorl.system.processes import usable_cores
from evorl.types.outcomes import UserError


def test_it_trains_in_this_process_what_the_command_line_says(in_directory):
    words = [str(SMALL), "training.max_steps=40", "--seed", "5", "--name", "a b", "--evaluation.episodes=2"]
    assert run_program(run_command, ["train", *words]) == 0
    run = in_directory / "runs" / "a b"
    settings = read_settings(run / "config.yaml", [])
    assert (settings["seed"], settings["evaluation"]["episodes"]) == (5, 2)
    assert lines(run / "metrics.jsonl")[-1]["agent_steps"] >= 36


def test_a_run_is_resumed_by_as_many_processes_as_trained_it(tmp_path):
    assert train.ranks_of(tmp_path) == 1
    interim = tmp_path / "checkpoints" / "interim-000001" / "state.json"
    for place, state in (
        (tmp_path / ".lock", {"ranks": 2}),
        (tmp_path / "checkpoints" / "generation-000002" / "state.json", {"ranks": 3, "generation": 2}),
        (interim, {"ranks": 4, "generation": 2}),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(state))
        assert train.ranks_of(tmp_path) == state["ranks"]
    (tmp_path / ".lock").write_text(json.dumps({"ranks": 1}))
    assert train.ranks_of(tmp_path) == 4, "a start that failed has saved nothing"
    interim.write_text(json.dumps({"ranks": 4, "generation": 1}))
    assert train.ranks_of(tmp_path) == 3, "a later generation is resumed"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seed", "3", "seed=4"), "seed: --seed sets it; leave one of them out"),
        (("--name", "a", "run.name=b"), "run.name: --name sets it"),
        (("--no-track", "tracking.backends=[tensorboard]"), "tracking.backends: --no-track sets it"),
        (("--seed", "-1"), "seed: -1 is out of range"),
    ],
)
def test_an_option_and_its_setting_are_not_given_together(words, told, in_directory, capsys):
    assert run_program(run_command, ["train", str(SMALL), *words]) == 2
    assert told in error_line(capsys)


def test_a_run_is_not_resumed_for_fewer_steps_than_it_has_trained(run, capsys):
    again = ["train", "runs/a/config.yaml", "--name", "a", "run.directory=runs", "run.resume=auto"]
    for command in (["resume", "runs/a"], again):
        assert run_program(run_command, [*command, "training.max_steps=40"]) == 2
        assert "training.max_steps: runs/a has trained 114 steps of each agent, more than 40" in error_line(capsys)
    assert run_program(run_command, ["resume", "runs/a"]) == 0
    settings = read_settings(run / "config.yaml", [])
    assert settings["run"]["resume"] == "never"


def test_several_processes_are_started_by_the_launcher_after_a_check(in_directory, monkeypatch, capsys):
    begun, paths = [], []
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setattr(
        train.os,
        "execve",
        lambda program, command, variables: (begun.append(command), paths.append(variables["PYTHONPATH"])),
    )
    assert run_program(run_command, ["train", "impala", "--processes", "2", "--name", "a"]) == 0
    (command,) = begun
    assert paths[0].split(os.pathsep) == [str(ROOT), "elsewhere"], "another evorl may be installed"
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[command.index(str(ASYNCHRONOUS)) + 1 :] == [
        "--config", str(ROOT / "configs" / "training" / "impala.yaml"), 'run.name="a"',
    ]  # fmt: skip
    capsys.readouterr()
    assert run_program(run_command, ["train", "ppo", "--processes", "64", OUTSIDE]) == 0, "the processes warn of it"
    assert ("64 processes share" in capsys.readouterr().err) == (usable_cores() < 64)
    del begun[1:]
    assert run_program(run_command, ["train", "ppo", "--processes", "2", "network.activation=relo"]) == 2
    assert "network.activation: there is no 'relo'" in error_line(capsys)
    assert len(begun) == 1


def test_each_shipped_configuration_has_its_program():
    for name in shipped_names():
        program = program_for(read_config(configuration_file(name), []))
        assert program == (ASYNCHRONOUS if name.startswith(("a3c", "apex", "appo", "impala")) else ONLINE), name
        assert callable(main_of(program))


def test_train_refuses_unknown_configurations(in_directory):
    with pytest.raises(UserError, match="'pppo' is neither a file nor a shipped configuration; did you mean 'ppo'"):
        program_arguments(["pppo"], None, None)
    with pytest.raises(UserError, match="name one algorithm or file, not several: 'ppo', 'dqn'"):
        program_arguments(["ppo", "seed=1", "dqn"], None, None)
    assert program_arguments([], None, "42")[1:] == [str(configuration_file("dqn")), 'run.name="42"']
