"""Two real ranks train every algorithm of the registry alike, and a resumed run is the one that was left alone."""

import pytest
import torch
from helpers.dqns import RAINBOW
from helpers.support import cut_back, lines, saved_agents

from evorl.algorithms import ALGORITHMS

REPLAYED = "batch_size: 8, learn_step: 2"
SETTINGS = {
    "a2c": ("algorithm={name: a2c, rollout_steps: 8}",),
    "a3c": (
        "algorithm={name: a3c, rollout_steps: 4, entropy_scales: [1, 2], normalize_observations: true}",
        "actors={count: 2, lockstep: true}", "network.recurrent=lstm", "network.recurrent_size=8",
    ),
    "a3c_data_parallel": (
        "algorithm={name: a3c_data_parallel, rollout_steps: 2, rollouts: 2}", "actors={count: 2, lockstep: true}",
    ),
    "a3c_shared": (
        "algorithm={name: a3c_shared, rollout_steps: 4, normalize_observations: true}",
        "actors={count: 2, lockstep: true}", "population.placement=sharded",
    ),
    "apex_ddpg": (
        f"algorithm={{name: apex_ddpg, {REPLAYED}, rollout_steps: 4, exploration: {{random_steps: 20}}}}",
        "environment.id=Pendulum-v1", "replay.prioritised={}", "actors={count: 2, lockstep: true}",
    ),
    "apex_dqn": (
        f"algorithm={{name: apex_dqn, {REPLAYED}, rollout_steps: 4}}", "replay={n_step: 3, prioritised: {}}",
        "replay.learning_starts=20", "replay.capacity=500", "actors={count: 2, lockstep: true}",
    ),
    "appo": ("algorithm={name: appo, rollout_steps: 4}", "actors={count: 2, lockstep: true}"),
    "ddpg": (
        f"algorithm={{name: ddpg, {REPLAYED}, exploration: {{random_steps: 20}}}}", "environment.id=Pendulum-v1",
        "replay.n_step=3", "replay.prioritised={}",
    ),
    "dqn": (f"algorithm={{name: dqn, {REPLAYED}}}",),
    "dqn on islands": (
        f"algorithm={{name: dqn, {REPLAYED}}}", "population={size: 2, islands: 2, control: true}",
    ),
    "dqn on sharded islands": (
        f"algorithm={{name: dqn, {REPLAYED}}}", "replay.prioritised={}",
        "population={size: 2, islands: 2, control: true, placement: sharded}",
    ),
    "dqn with memory": (
        f"algorithm={{name: dqn, {REPLAYED}, sequence_length: 4, burn_in: 2}}", "replay.prioritised={}",
        "network.recurrent=lstm", "network.recurrent_size=8",
    ),
    "impala": (
        "algorithm={name: impala, rollout_steps: 4, normalize_observations: true}",
        "actors={count: 2, lockstep: true}",
        "network.recurrent=gru", "network.recurrent_size=8",
    ),
    "ppo": (
        "algorithm={name: ppo, rollout_steps: 8, batch_size: 8, epochs: 2, normalize_observations: true,"
        " normalize_rewards: true}",
        "environment={id: 'helpers.spaces:Shown-v0', kwargs: {kind: dict}, num_envs: 2}",
        "network.convolutions=[{channels: 8, kernel: 4, stride: 2}, {channels: 8, kernel: 3}]",
    ),
    "ppo with memory": (
        "algorithm={name: ppo, rollout_steps: 8, sequence_length: 4, batch_size: 8, epochs: 2,"
        " normalize_rewards: true}",
        "network={recurrent: gru, recurrent_size: 12, layer_norm: true}",
    ),
    "rainbow": RAINBOW,
    "sac": (
        f"algorithm={{name: sac, {REPLAYED}, exploration: {{random_steps: 20}}}}", "environment.id=Pendulum-v1",
    ),
    "td3": (
        f"algorithm={{name: td3, {REPLAYED}, exploration: {{random_steps: 20}}}}", "environment.id=Pendulum-v1",
    ),
}  # fmt: skip


MUTATED = {"ppo": "channels", "ppo with memory": "recurrent"}
"""Sizes that only these have, which must mutate in them."""


@pytest.mark.two_process
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *SETTINGS}))
def test_replicas_are_bit_identical_and_so_is_a_resumed_run(name, tmp_path, forked_launch):
    common = (
        "training.max_steps=96", "evolution.steps=32", "checkpoint.keep=10", "evaluation.max_steps=10",
        "environment.carry_over=auto",
        "evolution.mutation={none: 0, architecture: 1, parameters: 0.5, activation: 0.3, hyperparameters: 0.5}",
        "evolution.architecture={min_units: 4, max_units: 64, max_layers: 4}", *SETTINGS[name],
    )  # fmt: skip
    forked_launch.well(tmp_path, "run.name=a", *common)
    runs = tmp_path / "runs"
    rows = lines(runs / "a" / "metrics.jsonl")
    last = len(rows)
    assert last >= 3
    assert not any(row["drifts"] for row in rows), "replicas are meant to compute the same"
    changed = " ".join(mutation for row in rows for mutation in row["mutations"])
    assert MUTATED.get(name, "") in changed
    # A later one that is cut short may have only the few steps that are left.
    whole = [row for row in rows[1:] if row["generation"] <= 3 or not row["shortened_by"]]
    assert all(min(row["updates"]) > 0 for row in whole)

    cut_back(runs / "a", 2, copy=runs / "b")
    done = forked_launch.well(tmp_path, "run.name=b", "run.resume=auto", *common)
    assert "not bit-exact" not in done.stderr
    for first, second in zip(saved_agents(runs / "a", last), saved_agents(runs / "b", last), strict=True):
        torch.testing.assert_close(first.tensors, second.tensors, rtol=0, atol=0)
        assert first.describe() == second.describe()
