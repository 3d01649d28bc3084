"""How many threads compute, and who says so."""

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import interface, train

from evorl.commands.command import run_command
from evorl.commands.train import processes_for
from evorl.config import Environment
from evorl.envs.vector import _atari_options
from evorl.runs.launch import use_threads
from evorl.system.processes import usable_cores
from evorl.types.outcomes import EvorlWarning, UserError

VECTOR = interface().parts


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch):
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wanted", "cores", "ranks", "count"), [(None, 64, 1, 64), (None, 64, 8, 8), (None, 2, 8, 1), (3, 2, 8, 3)]
)
def test_images_take_a_share_of_the_cores(wanted, cores, ranks, count, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("evorl.runs.launch.usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    images = interface(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)).parts
    assert use_threads(wanted, images, ranks) == count
    small = interface(gym.spaces.Box(0, 255, (64, 64, 1), np.uint8)).parts
    assert use_threads(wanted, small, ranks) == (wanted or 1), "threads of small images wait for each other"


@pytest.mark.parametrize("value", [None, "3,1", "many"])
def test_threads_follow_omp_num_threads(value, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    expected = 3 if value == "3,1" else 1
    assert use_threads(None, VECTOR, 1) == expected == torch.get_num_threads()
    assert use_threads(4, VECTOR, 1) == 4 == torch.get_num_threads()


def test_threads_ignore_omp_num_threads_of_a_launcher(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert use_threads(None, VECTOR, 1) == 1


def test_a_run_and_its_evaluation_compute_with_the_threads_of_the_configuration(in_directory, capsys):
    torch.set_num_threads(1)
    assert train("run.name=a", "run.threads=2", "training.max_steps=40") == 0
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    run_command(["evaluate", "runs/a", "--episodes", "1"])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with pytest.warns(EvorlWarning, match="not bit-exact: threads changed from 2 to 3"):
        assert train("run.name=a", "run.resume=auto", "run.threads=3", "training.max_steps=80") == 0
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_only_the_cores_that_the_process_may_use_are_counted(tmp_path, monkeypatch):
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(whole)})
    try:
        assert usable_cores() == 1
        assert _atari_options(Environment(id="ALE/Pong-v5"))["num_threads"] == 1
        monkeypatch.setattr("evorl.commands.train._ranks_of", lambda run: 2)
        with pytest.raises(UserError, match="--processes: the run had 2, but only 1 core is available"):
            processes_for(tmp_path, None)
        assert processes_for(tmp_path, 2) == 2, "a person may ask for more"
    finally:
        os.sched_setaffinity(0, whole)
