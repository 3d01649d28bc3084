"""Completion by shells, generated from the commands' parsers."""

import functools
import re
import shutil
import subprocess

import pytest

from evorl.commands.command import COMMANDS
from evorl.commands.completion import keys, script
from evorl.config.yaml import shipped_names

SHELLS = ("bash", "zsh", "fish")
printed = functools.cache(script)


def completions(tmp_path, *lines):
    """What bash completes at the end of each line of words, the last of which is being typed."""
    text = [printed("bash"), "compopt() { [[ $* != *nospace* ]] || echo nospace; }"]
    for words in lines:
        text.append(f"COMP_WORDS=(evorl {' '.join(words)}); COMP_CWORD={len(words)}; COMPREPLY=()")
        text.append(f"_evorl evorl {words[-1]} {['evorl', *words][-2]}")
        text.append('printf "%s " "${COMPREPLY[@]}"; echo "|"')
    done = subprocess.run(["bash", "-c", "\n".join(text)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    return [set(each.split()) for each in done.stdout.split("|\n")][:-1]


def test_bash_completes_commands_options_configurations_keys_and_files(tmp_path):
    (tmp_path / "pp.yaml").touch()
    (tmp_path / "runs").mkdir()
    assert completions(
        tmp_path,
        ("''",),
        ("re",),
        ("train", "--p"),
        ("train", "pp"),
        ("train", "ppo", "population.p"),
        ("train", "--processes", "2", "ppo", "checkpoint.k"),
        ("resume", "runs", "checkpoint."),
        ("resume", "r"),
        ("plot", "pp"),
        ("completion", "f"),
    ) == [
        set(COMMANDS),
        {name for name in COMMANDS if name.startswith("re")},
        {"--processes"},
        {name for name in shipped_names() if name.startswith("pp")} | {"pp.yaml"},
        {"population.placement=", "nospace"},
        {"checkpoint.keep=", "nospace"},
        {f"{key}=" for key in keys() if key.startswith("checkpoint.")},
        {"runs"},
        set(),
        {"fish"},
    ]


def test_keys_that_no_argument_can_set_are_not_completed():
    assert "network.convolutions" in keys()
    assert not [key for key in keys() if key.startswith(("network.convolutions.", "evolution.hyperparameters."))]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_knows_each_command_and_is_read_by_its_shell(shell, tmp_path):
    text = printed(shell)
    for word in (*COMMANDS, "episodes", "ppo_recurrent", "generation", "population.size=", "algorithm.clip="):
        assert re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", text)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True)
