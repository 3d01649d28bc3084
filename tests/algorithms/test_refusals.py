"""What an algorithm cannot take is named: its settings, the spaces of an environment, and a user's module."""

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import algorithm

from evorl.types.outcomes import UserError

BOX, CHOICE, PART = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (5,))
PARTS = gym.spaces.Dict(policy=PART, truth=PART, clock=gym.spaces.Discrete(4))
MODULE = "network={name: module, factory: 'helpers.support:probe_network'}"
READS = ("network.policy_parts=[policy]", "network.critic_parts=[policy, truth]")
GRU = ("network.recurrent=gru", "network.recurrent_size=7")
APEX = ("algorithm={name: apex_dqn, rollout_steps: 8, double: true}", "replay.prioritised={}")
APPO = ("algorithm={name: appo, rollout_steps: 4, rollouts: 2, minibatches: 3}", "environment.num_envs=1")
ON_A_BOX, CHOOSING, READING = {"actions": BOX}, {"actions": CHOICE}, {"observations": PARTS}
REFUSED = [
    ("dqn", (), ON_A_BOX, "dqn cannot act in Box.* of Some-v0; it takes Di"),
    ("dqn", (), {"observations": gym.spaces.Text(3)}, "environment.id: the observation is Text.*no encoder supports"),
    ("dqn", (), {"observations": gym.spaces.Dict(a=gym.spaces.Text(3))}, "environment.id: part 'a' of the observation"),
    ("dqn", (), {"observations": gym.spaces.Box(0, 1, (2, 3, 4, 5))}, "environment.id: .* no encoder"),
    ("td3", (), {"actions": gym.spaces.Box(-1, 1, (0,))}, "td3 cannot act in Box"),
    (
        "td3", (), {"observations": gym.spaces.Dict(action=BOX), **ON_A_BOX},
        r"environment\.id: a part .* is called 'action'; rename it",
    ),
    ("td3", ("network.recurrent=gru",), ON_A_BOX, "network.recurrent: td3 cannot be recurrent; leave 'gru' out"),
    ("td3", ("algorithm.exploration.noise=brownian",), ON_A_BOX, "algorithm.exploration.noise: 'brownian'"),
    ("td3", (MODULE,), ON_A_BOX, "to read observation, action"),
    ("sac", ("algorithm.target_entropy_share=2",), ON_A_BOX, "algorithm.target_entropy_share: 2 is out of range"),
    (
        "sac", ("evolution.hyperparameters={target_entropy_share: {min: 0.1, max: 0.9}}",), ON_A_BOX,
        "target_entropy_share: has no effect on continuous actions",
    ),
    (
        "sac", ("algorithm.exploration.noise=gaussian",), CHOOSING,
        "algorithm.exploration.noise: gaussian noise is for a Box, and Some-v0 ha",
    ),
    (
        "sac", ("algorithm.state_dependent_noise={}",), CHOOSING,
        r"state_dependent_noise: is for a Box, and Some-v0 has Discrete\(3\)",
    ),
    ("sac", ("algorithm.state_dependent_noise={}", MODULE), ON_A_BOX, r"or use network.name=standard"),
    ("ppo", ("algorithm.distribution=squashed",), CHOOSING, "squashed is for a Box between bounds, and Some-v0"),
    (
        "ppo", ("algorithm.distribution=squashed",), {"actions": gym.spaces.Box(-1.0, np.inf, (2,))},
        "squashed is for a Box between bounds, and Some-v0",
    ),
    (
        "ppo", ("algorithm.distribution=squashed", "algorithm.initial_log_std=-1", MODULE), ON_A_BOX,
        "algorithm.initial_log_std: a module .*; leave it out, or use ",
    ),
    *(("ppo", (f"algorithm.initial_log_std={x}",), {}, "algorithm.initial_log_std") for x in (-6, 3, ".nan", "low")),
    ("dqn", ("algorithm.noisy={}", MODULE), {}, "algorithm.noisy: a module has to have noisy layers of its own"),
    ("dqn", (MODULE, "network.bf16=true"), {}, r"network\.bf16: a module computes as it is written"),
    ("dqn", READS, READING, "network.policy_parts: dqn has no critic beside its policy"),
    ("ppo", (*READS, "algorithm.critic=shared"), READING, "network.critic_parts: with algorithm.critic=shared"),
    ("ppo", (*READS, "network.critic_parts=[trooth]"), READING, "no part 'trooth' of the observation.*truth"),
    ("dqn", (*GRU, "replay.n_step=3"), {}, "replay.n_step: recurrent agents learn from returns of one step"),
    ("", (*APEX, *GRU), {}, "network.recurrent: apex_dqn cannot be recurrent"),
    ("", (APEX[0], "replay.prioritised=null"), {}, "apex_dqn draws by priorities; set replay.prioritised={}"),
    ("", (*APEX, "replay.n_step=9"), {}, "replay.n_step: 9 exceeds algorithm.rollout_steps 8"),
    ("", (*APEX, "algorithm.exploration={end: 0.2}"), {}, "algorithm: exploration: is fixed; set `ladder`"),
    ("", (*APPO, "network.recurrent=lstm"), {}, "a batch has 2 rollouts of an environment .* use at most 2"),
    ("dqn", ("actors={count: 2}",), {}, "actors: dqn collects in the learner's own process"),
    ("", ("algorithm={name: impala, sequence_length: 4}",), {}, "sequence_length: 4 does not fit"),
    ("", ("algorithm={name: impala, split_batches: true}",), {}, "algorithm.split_batches"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "spaces", "message"), REFUSED)
def test_what_an_algorithm_cannot_take_is_named(name, settings, spaces, message):
    with pytest.raises(UserError, match=message):
        algorithm(*([f"algorithm={{name: {name}}}"] if name else []), *settings, **spaces)
