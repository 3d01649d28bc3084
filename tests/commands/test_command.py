"""The command line: every command explains itself, and mistakes are told in one line."""

import os
import re
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest
from helpers.support import ROOT, error_line

import evorl
from evorl import __main__ as cli
from evorl.commands.command import COMMANDS, EXAMPLES, MAY_CHANGE, parser_of, run_command
from evorl.runs.program import Parser, run_program
from evorl.runs.storage.directory import FREE_TO_CHANGE


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_the_parser_takes(name, capsys):
    run_command([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.isascii()
    for example in COMMANDS[name].examples:
        assert example in shown
        program, command, *arguments = shlex.split(example.partition(" > ")[0], comments=True)
        assert (program, command) == ("evorl", name)
        parser_of(name, Parser).parse_intermixed_args(arguments)


def test_the_help_of_all_lists_each(capsys):
    for arguments in ([], ["--help"]):
        run_command(arguments)
        shown = capsys.readouterr().out
        assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in COMMANDS)
    for example in EXAMPLES:
        assert example in shown
        parser_of(example.split()[1], Parser).parse_intermixed_args(shlex.split(example)[2:])


def test_the_help_of_resume_names_all_that_may_change():
    assert MAY_CHANGE.removeprefix("those of ").partition(";")[0].split(", ") == [
        key.strip(".") for key in FREE_TO_CHANGE
    ]


def test_help_the_version_and_what_is_mistyped_do_not_wait_for_torch():
    code = """
import contextlib, io, sys
from evorl.__main__ import main
def tell(words, slow):
    sys.argv = ["evorl", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main()
    print(code, (out.getvalue() or err.getvalue()).splitlines()[0], [name for name in slow if name in sys.modules])
for words in ("--help", "--version", "-V", "trian", "lineage --help"):
    tell(words, ("torch", "numpy", "pydantic", "yaml"))
tell("train ppo algorithm.learing_rate=1", ("torch",))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        "0 usage: evorl COMMAND ... []",
        f"0 evorl {evorl.__version__} []",
        f"0 evorl {evorl.__version__} []",
        "2 error: evorl: there is no command 'trian'; did you mean 'train'? []",
        "0 usage: evorl lineage [-h] [--settings] run []",
        "2 error: algorithm.learing_rate: unknown key; did you mean 'algorithm.learning_rate'? []",
    ]


@pytest.mark.parametrize("line", ["--help", "list ."])
def test_a_reader_that_leaves_early_sees_no_traceback(line, monkeypatch, capfd):
    """As `| head` does: some output fills the pipe, other output is written when the program ends."""
    monkeypatch.setattr("evorl.runs.program.limit_end", lambda code: None)
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["evorl", *line.split()])
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main() == 141
        print("more")
    assert capfd.readouterr().err == ""


def test_an_interrupt_before_signals_are_handled_shows_no_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["evorl", "list"])
    monkeypatch.setattr(cli, "mistake_in", Mock(side_effect=KeyboardInterrupt))
    assert cli.main() == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evalute x", "evorl: there is no command 'evalute'; did you mean 'evaluate'?"),
        ("evaluate", "the following arguments are required: run"),
        ("evaluate runs/a --episodes 0", "argument --episodes: 0 is out of range; it must be 1 to 1000000"),
    ],
)
def test_wrong_command_line_is_one_line(arguments, message, capsys):
    assert run_program(run_command, arguments.split()) == 2
    assert message in error_line(capsys)
