"""What a run says before it trains: who learns where, from how much and how often."""

from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from helpers.support import algorithm, config, interface, train

from evorl.distributed import Placement
from evorl.envs.generation import generation_length
from evorl.envs.spaces import EnvSpec, observation_specs
from evorl.runs.console import header

PPO = "{name: ppo, rollout_steps: 256, batch_size: 64, epochs: 10, split_batches: %s}"


def header_of(*overrides, ranks=1, threads=1, device="cpu", seen=None):
    settings = config("environment.num_envs=8", *overrides)
    world = SimpleNamespace(size=ranks, hosts=1, backend="gloo", device=torch.device(device))
    placement = Placement(world, settings.population.placement, settings.population.size)
    pace = algorithm("environment.num_envs=8", *overrides).pace(placement.copies)
    length = generation_length(settings, placement.copies, 1)
    return header(settings, placement, seen or interface(), pace, length, threads=threads, directory=Path("runs/x"))


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        ((), 1, "dqn on CartPole-v1: 4 agents x 8 environments on 1 rank (cpu, 1 thread), in runs/x"),
        (
            ("population.size=1000", "environment.num_envs=1"), 2,
            "dqn on CartPole-v1: 1,000 agents x 1 environment on each of 2 ranks of 1 host (cpu, 1 thread each, gloo), "
            "in runs/x",
        ),
        (
            ("population.placement=sharded",), 2,
            "dqn on CartPole-v1: 4 agents x 8 environments divided over 2 ranks of 1 host (cpu, 1 thread each, gloo), "
            "in runs/x",
        ),
    ],
)  # fmt: skip
def test_who_trains_where(overrides, ranks, line):
    assert header_of(*overrides, ranks=ranks)[0] == line


SPACES = [
    (
        gym.spaces.Box(-1, 1, (8,)), gym.spaces.Discrete(4), False,
        "observations: Box(8,) of float32; actions: Discrete(4)",
    ),
    (
        gym.spaces.Dict(camera=gym.spaces.Box(0, 255, (4, 4, 3), "uint8"), gear=gym.spaces.Discrete(5)),
        gym.spaces.MultiDiscrete([3, 2]), True,
        "observations: {camera: Box(4, 4, 3) of uint8, gear: Discrete(5)}; actions: MultiDiscrete([3 2]), some of "
        "which may be forbidden",
    ),
    (
        gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(0, 1, (1,))]), gym.spaces.Box(-1, 1, (2,)), False,
        "observations: (Discrete(2), Box(1,) of float32); actions: Box(2,) of float32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("observation", "action", "masked", "line"), SPACES)
def test_spaces_are_named(observation, action, masked, line):
    seen = EnvSpec("CartPole-v1", observation_specs(observation), action, masked, observation)
    assert header_of(seen=seen)[1] == line


def test_a_single_agent_is_said_not_to_evolve():
    said = "a single agent trains on without selection and mutation; take population.size=2 or more to evolve"
    assert said in header_of("population.size=1")
    assert said not in header_of("population.size=2")


def test_devices_and_threads_are_named():
    assert "(cuda, 12 threads each, gloo)" in header_of(ranks=2, threads=12, device="cuda:1")[0]


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        ("{name: dqn, batch_size: 128, learn_step: 4}", 1, "128 transitions, one for every 4 environment steps"),
        ("{name: dqn, batch_size: 128, learn_step: 1}", 1, "128 transitions, one for every environment step"),
        ("{name: dqn, batch_size: 128, learn_step: 0.5}", 1, "128 transitions, 2 for every environment step"),
        (
            "{name: dqn, batch_size: 640, learn_step: 2.5}", 2,
            "1,280 transitions of 2 ranks, one for every 5 environment steps",
        ),
        (
            "{name: dqn, batch_size: 128, learn_step: 2.5, split_batches: true}", 2,
            "128 transitions of 2 ranks, one for every 2.5 environment steps",
        ),
        (PPO % "false", 2, "128 transitions of 2 ranks, 320 for every 4,096 environment steps"),
        (PPO % "true", 2, "64 transitions of 2 ranks, 320 for every 2,048 environment steps"),
        ("{name: a2c, rollout_steps: 16}", 1, "128 transitions, one for every 128 environment steps"),
    ],
)  # fmt: skip
def test_how_much_and_how_often_agents_learn(overrides, ranks, line):
    assert header_of(f"algorithm={overrides}", ranks=ranks)[2] == f"each update: {line} of an agent"


def test_a_run_says_it_once_with_the_steps_that_it_makes(in_directory, capsys):
    assert train("run.name=a", "algorithm={name: ppo, rollout_steps: 16, batch_size: 8}", "evolution.steps=70") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if " in runs/a" in line] == lines[:1]
    assert "a generation has 48 steps of each environment" in lines[4], "two environments, whole rollouts"
    assert lines[3] == (
        "no target; steps of each agent: 120 (tests/helpers/small.yaml); of a generation: 96 (your setting)"
    )


def test_products_in_bfloat16_are_named_and_a_machine_that_is_slow_at_them(tmp_path, monkeypatch):
    features = tmp_path / "cpuinfo"
    monkeypatch.setattr("evorl.system.processes.CPU_FEATURES", features)
    features.write_text("flags : avx2 avx512f avx512_vnni\n")
    assert [line for line in header_of() if "bf16" in line or "bfloat16" in line] == []
    first, *_, last = header_of("network.bf16=true")
    assert "(cpu, 1 thread, products in bfloat16)" in first
    assert last.startswith("network.bf16: this machine has no units for bfloat16")
    features.write_text("flags : avx2 amx_bf16 avx512f\n")
    assert len(header_of("network.bf16=true")) == len(header_of())
