"""What a run says before it trains: who learns where and until when."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.support import SMALL, config, train

from evorl.distributed import Placement
from evorl.runs.configuration import read_config
from evorl.runs.output.console import announcement, header


def parts_of(*overrides, ranks=1, device="cpu", backend="gloo", unused_gpus=0):
    settings = config("environment.num_envs=8", "run.kernel=false", *overrides)
    device = torch.device(device)
    world = SimpleNamespace(size=ranks, hosts=1, backend=backend, device=device, unused_gpus=unused_gpus)
    return settings, Placement(world, settings.population.placement, settings.population.size)


def header_of(*overrides, threads=1, **world):
    settings, placement = parts_of(*overrides, **world)
    return [*announcement(settings), *header(settings, placement, threads=threads, directory=Path("runs/x"))]


def test_header_names_agents_environments_and_ranks():
    what, _, where = header_of("population.size=1000", "environment.num_envs=1", ranks=2)
    assert what == "dqn on CartPole-v1: 1,000 agents x 1 environment"
    assert where == "on each of 2 ranks of 1 host (cpu, 1 thread each, gloo), in runs/x"


def test_header_says_that_a_gpu_of_apple_is_not_used(monkeypatch):
    assert not any("mps" in line for line in header_of())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert header_of()[-1].startswith("Apple's GPU (device mps) is not used")


def test_header_says_that_the_kernel_cannot_be_built(monkeypatch):
    monkeypatch.setattr("evorl.kernels.library.load_kernel", lambda: "no C++ compiler")
    told = "dense layers by torch, without the C++ kernel: no C++ compiler"
    assert header_of("run.kernel=auto")[-1] == told
    assert told not in header_of() + header_of("run.kernel=auto", device="cuda")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "for 120 steps of each agent, without a target"),
        (
            ["training.target_fitness=475", "training.max_steps=1000000"],
            "until the mean return is above 475, or for 1,000,000 steps of each agent",
        ),
        (
            ["training.target_fitness=0.9", "evolution.fitness=info.success"],
            "until the mean info.success is above 0.9, or for 120 steps of each agent",
        ),
    ],
)
def test_until_when(overrides, line):
    assert announcement(read_config(SMALL, overrides))[1:] == [line]


ROLLOUTS = (
    "algorithm={name: ppo, rollout_steps: 16, batch_size: 8}", "evolution.steps=70", "run.kernel=false",
)  # fmt: skip


def test_a_run_says_it_in_four_lines(in_directory, capsys):
    assert train("run.name=a", *ROLLOUTS) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:4] == [
        "ppo on CartPole-v1: 4 agents x 2 environments",
        "for 120 steps of each agent, without a target",
        "on 1 rank (cpu, 1 thread), in runs/a",
    ]
    assert lines[0] == "settings: tests/helpers/small.yaml, as written"
    assert lines[4].startswith("gen 1/")


def test_a_run_says_that_rollouts_lengthen_its_generations(in_directory, capsys):
    assert (
        train("run.name=a", *ROLLOUTS, "evolution.steps=10", "training.max_steps=40", "environment.carry_over=true")
        == 0
    )
    told = "each generation has 32 steps of each agent, not 10 (evolution.steps): whole rollouts of every environment"
    assert capsys.readouterr().err.splitlines()[4] == told
