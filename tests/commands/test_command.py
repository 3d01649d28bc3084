"""The command line: every command explains itself, and mistakes are told in one line."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.support import ROOT, error_line

from evorl import commands
from evorl.commands import COMMANDS
from evorl.commands.command import command_named, parser_of, run_command
from evorl.commands.overview import EXAMPLES
from evorl.runs.launch import Answered, run_program


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_the_parser_takes(name, capsys):
    with pytest.raises(Answered):
        run_command([name, "--help"])
    shown = capsys.readouterr().out
    for example in command_named(name).examples:
        assert example in shown
        program, command, *arguments = shlex.split(example.partition(" > ")[0], comments=True)
        assert (program, command) == ("evorl", name)
        parser_of(name).parse_intermixed_args(arguments)


def test_each_command_has_a_file_and_each_file_a_command():
    files = {path.stem for path in Path(commands.__file__).parent.glob("*.py")}
    named = {name for name in files if hasattr(importlib.import_module(f"evorl.commands.{name}"), "COMMAND")}
    assert named == set(COMMANDS)


def test_the_help_of_all_lists_each(capsys):
    for arguments in ([], ["--help"]):
        run_command(arguments)
        shown = capsys.readouterr().out
        assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in COMMANDS)


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; sys.argv = ['evorl', '--help']; from evorl.cli import main; main(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    shown, loaded = done.stdout[:-1].rsplit("\n", 1)
    assert loaded == "False"
    for example in EXAMPLES:
        assert example in shown
        parser_of(example.split()[1]).parse_intermixed_args(shlex.split(example)[2:])


def test_importing_evorl_does_not_wait_for_torch():
    code = "import sys, evorl; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evalute x", "evorl: there is no 'evalute'; did you mean 'evaluate'?"),
        ("evaluate", "the following arguments are required: run"),
        ("evaluate runs/a --episodes 0", "argument --episodes: 0 is out of range; it must be 1 to 1000000"),
        ("evaluate runs/a --episodes few", "argument --episodes: invalid count value: 'few'"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert run_program(run_command, arguments.split()) == 2
    assert message in error_line(capsys)


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["evorl", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("evorl", run_name="__main__")
    assert ended.value.code == 0
    assert "usage: evorl" in capsys.readouterr().out
