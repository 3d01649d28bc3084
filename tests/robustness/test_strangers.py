"""A stranger's run directory: nothing of it is run, and it does not choose who is told what."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.support import ROOT, config

from evorl.commands.command import run_command
from evorl.commands.train import LOCAL_LAUNCHER, launch_command, resumption
from evorl.runs.launch import check
from evorl.runs.program import run_program
from evorl.system.processes import check_room, free_memory
from evorl.tracking.tracker import shared_settings
from evorl.types.outcomes import UserError

CANARY = "from pathlib import Path\nPath({path!r}).write_text('ran')\n"


@pytest.fixture
def run(trained_run, in_directory):
    """A stranger's run, which is the working directory."""
    shutil.copytree(trained_run, in_directory / "a")
    os.chdir(in_directory / "a")
    return in_directory / "a"


def plant(run, *names):
    """Put modules into the run's directory; gives the file that they write when they are imported."""
    for name in names:
        (run / f"{name}.py").write_text(
            CANARY.format(path=str(run / "canary")) + "def made(inputs, outputs):\n    pass\n"
        )
    return run / "canary"


@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_module_of_a_strangers_run_is_not_imported(command, run, capsys):
    canary = plant(run, "evilmod")
    text = (run / "config.yaml").read_text()
    assert "id: CartPole-v1" in text
    (run / "config.yaml").write_text(text.replace("id: CartPole-v1", "id: evilmod:CartPole-v1"))
    assert run_program(run_command, [command, str(run)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not canary.exists()


def test_resuming_imports_nothing_from_the_working_directory(run):
    canary = plant(run, "yaml", "torch", "accelerate", "sitecustomize", "ale_py")
    command = launch_command(*resumption(Path(), ["training.max_steps=80"], None, processes=2))
    launcher = command.index(str(LOCAL_LAUNCHER))
    done = subprocess.run([*command[: launcher + 1], "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()


WANDB = """
import sys
from pathlib import Path
from evorl.tracking.wandb import WeightsAndBiases
sys.path.insert(0, {tests!r})
from helpers.support import config
tracker = WeightsAndBiases(config(), Path("."))
print(tracker._run.settings.base_url)
tracker._run.finish()
"""


def test_wandb_settings_in_a_run_directory_are_ignored(run):
    (run / "wandb").mkdir(exist_ok=True)
    (run / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    command = [sys.executable, "-c", WANDB.format(tests=str(ROOT / "tests"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("https://")


def test_excluded_settings_are_not_shared():
    secret = "environment={id: CartPole-v1, kwargs: {token: secret, size: 3}}"
    assert "secret" in str(shared_settings(config(secret)))
    assert shared_settings(config(secret, "tracking.exclude=[environment.kwargs.token]"))["environment"]["kwargs"] == {
        "size": 3
    }
    assert "secret" not in str(shared_settings(config(secret, "tracking.exclude=[environment.kwargs]")))
    both = "tracking.exclude=[environment.kwargs, environment.kwargs.token, seed, seed]"
    assert not {"kwargs", "seed"} & {
        *shared_settings(config(secret, both))["environment"],
        *shared_settings(config(secret, both)),
    }


def test_a_published_run_lacks_what_it_excludes():
    page = config("environment.id=CartPole-v1", "tracking.exclude=[environment.kwargs.token]")
    check(page, trains=False)
    with pytest.raises(UserError, match=r"there is no setting 'environment\.kwargs\.token' to leave out"):
        check(page)


def test_free_memory_is_that_of_the_control_group(tmp_path, monkeypatch):
    job, step = tmp_path / "job", tmp_path / "job" / "step"
    step.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/job/step\n")
    monkeypatch.setattr("evorl.system.processes.GROUPS", tmp_path)
    monkeypatch.setattr("evorl.system.processes.MEMBERSHIP", tmp_path / "membership")

    def limited(group, most, used, cache):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
        return free_memory(torch.device("cpu"))

    assert limited(step, 1_000_000, 700_000, 200_000) == 500_000
    assert limited(step, 1_000_000, 1_700_000, 0) == 0
    assert limited(step, "max", 700_000, 0) > 1_000_000
    # The group above may leave less than the process's own.
    assert limited(job, 900, 300, 0) == 600


def test_all_ranks_of_a_host_share_its_memory(monkeypatch):
    monkeypatch.setattr("evorl.system.processes.free_memory", lambda device: 1000)
    check_room(500, "replay.capacity", processes=2)
    with pytest.raises(UserError, match=r"replay.capacity: .* do not fit, for each of 3 ranks,"):
        check_room(500, "replay.capacity", processes=3)
