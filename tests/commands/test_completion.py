"""Completion by shells, generated from the commands."""

import shutil
import subprocess

import pytest

from evorl.commands import COMMANDS
from evorl.commands.completion import SHELLS
from evorl.config.shipped import shipped_names


def completions(*words, cwd):
    """What bash completes after these words, the last of which is being typed."""
    script = SHELLS["bash"]() + f"COMP_WORDS=(evorl {' '.join(words)}); COMP_CWORD={len(words)}; _evorl\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_names_and_files(tmp_path):
    (tmp_path / "pp.yaml").touch()
    assert completions("''", cwd=tmp_path) == set(COMMANDS)
    assert completions("re", cwd=tmp_path) == {name for name in COMMANDS if name.startswith("re")}
    assert completions("train", "--p", cwd=tmp_path) == {"--processes"}
    assert completions("train", "pp", cwd=tmp_path) == {n for n in shipped_names() if n.startswith("pp")} | {"pp.yaml"}
    assert completions("plot", "ppo", cwd=tmp_path) == set()
    assert completions("completion", "f", cwd=tmp_path) == {"fish"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_knows_each_command_and_is_read_by_its_shell(shell, tmp_path):
    text = SHELLS[shell]()
    for name in COMMANDS:
        assert name in text
    for word in ("episodes", "ppo_recurrent", "yes"):
        assert word in text
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / "script").write_text(text)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True)
