"""demos/online.py and demos/asynchronous.py, as a user copies them to another folder."""

import shutil
import subprocess
import sys

import pytest
from helpers.support import ROOT


@pytest.mark.parametrize(("demo", "name"), [("online", "ppo"), ("asynchronous", "appo.yaml")])
def test_a_copied_training_loop_finds_the_shipped_configurations(demo, name, in_directory):
    shutil.copy(ROOT / "demos" / f"{demo}.py", in_directory)
    command = [sys.executable, f"{demo}.py", "--config", name, "training.max_step=9"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "error: training.max_step: unknown key; did you mean 'training.max_steps'?" in told.stderr
