"""How many threads compute, and who says so."""

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import config, interface, train

from evorl.commands.command import run_command
from evorl.commands.train import processes_for
from evorl.config import Environment
from evorl.envs.vector import _atari_options
from evorl.kernels.library import usable_kernel
from evorl.runs.launch import use_threads
from evorl.system.processes import usable_cores
from evorl.types.outcomes import EvorlWarning, UserError

VECTOR = interface().parts
IMAGES = interface(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)).parts
SMALL_IMAGES = interface(gym.spaces.Box(0, 255, (64, 64, 1), np.uint8)).parts
BY_TORCH = "run.kernel=false"


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch):
    before, kernel = torch.get_num_threads(), usable_kernel("auto")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)
    if kernel is not None:
        kernel.threads = 1


@pytest.fixture
def kernel():
    return usable_kernel("auto") or pytest.skip("no kernel on this machine")


@pytest.mark.parametrize(
    ("wanted", "cores", "ranks", "count"), [("null", 64, 1, 64), ("null", 64, 8, 8), ("null", 2, 8, 1), ("3", 2, 8, 3)]
)
def test_large_images_and_the_kernel_take_a_share_of_the_cores(wanted, cores, ranks, count, monkeypatch, kernel):
    monkeypatch.setattr("evorl.runs.launch.usable_cores", lambda: cores)
    given = config(f"run.threads={wanted}", "population.size=64")
    assert use_threads(given, VECTOR, ranks) == count == kernel.threads
    assert torch.get_num_threads() == 1, "idle threads of torch keep cores busy"
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert use_threads(given, IMAGES, ranks) == count == kernel.threads
    one = 1 if wanted == "null" else count
    assert use_threads(given, SMALL_IMAGES, ranks) == one, "threads of small images wait for each other"
    for by_torch in (BY_TORCH, "network.bf16=true", "network.recurrent=gru"):
        assert use_threads(config(f"run.threads={wanted}", by_torch), VECTOR, ranks) == one


def test_actors_have_their_share_of_the_cores(monkeypatch, kernel):
    monkeypatch.setattr("evorl.runs.launch.usable_cores", lambda: 16)
    given = config("algorithm={name: impala}", "actors.count=3", "population.size=3").resolved()
    assert use_threads(given, VECTOR, 2) == 2 == kernel.threads
    assert use_threads(given, VECTOR, 1) == 3, "an agent is not divided"
    assert use_threads(given, VECTOR, 1, torch.device("cuda")) == 1 == torch.get_num_threads()


@pytest.mark.parametrize(
    ("written", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), (None, 8)]
)
def test_a_containers_quota_limits_the_cores(written, cores, tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("evorl.system.processes.CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    if written is not None:
        quota.write_text(written + "\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(("value", "expected"), [("3,1", 3), ("many", 1)])
def test_threads_follow_omp_num_threads(value, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert use_threads(config(BY_TORCH), VECTOR, 1) == expected == torch.get_num_threads()
    assert use_threads(config(BY_TORCH, "run.threads=4"), VECTOR, 1) == 4 == torch.get_num_threads()


def test_threads_ignore_omp_num_threads_of_a_launcher(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert use_threads(config(BY_TORCH), VECTOR, 1) == 1


def test_a_run_and_its_evaluation_compute_with_the_threads_of_the_configuration(in_directory, capsys):
    torch.set_num_threads(1)
    assert train("run.name=a", BY_TORCH, "run.threads=2", "training.max_steps=40") == 0
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    run_command(["evaluate", "runs/a", "--episodes", "1"])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with pytest.warns(EvorlWarning, match="not bit-exact: threads changed from 2 to 3"):
        assert train("run.name=a", BY_TORCH, "run.resume=auto", "run.threads=3", "training.max_steps=80") == 0
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_only_the_cores_that_the_process_may_use_are_counted(tmp_path, monkeypatch):
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(whole)})
    try:
        assert usable_cores() == 1
        assert _atari_options(Environment(id="ALE/Pong-v5"))["num_threads"] == 1
        with pytest.raises(UserError, match="--processes: the run had 2, but only 1 core is available"):
            processes_for(2, None)
        assert processes_for(2, 2) == 2, "a person may ask for more"
    finally:
        os.sched_setaffinity(0, whole)
