"""Actor-critics whose critics read what their policies do not."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import agent, algorithm, config, interface, population

from evorl.algorithms import make_algorithm
from evorl.envs.json_spaces import interface_from_json, interface_to_json
from evorl.export.network import ActingAgent
from evorl.runs.reading.loaded import LoadedAgent
from evorl.types.batches import RecurrentInput
from evorl.types.outcomes import UserError

PARTS = gym.spaces.Dict(
    {
        "policy": gym.spaces.Box(-1.0, 1.0, (5,)),
        "truth": gym.spaces.Box(-1.0, 1.0, (3,)),
        "clock": gym.spaces.Discrete(4),
    }
)
ASKED = ("network.policy_parts=[policy]", "network.critic_parts=[policy, truth]")
BOX = gym.spaces.Box(-1.0, 1.0, (2,))


def observation(**changes):
    generator = torch.Generator().manual_seed(0)
    parts = {"policy": torch.randn(2, 4, 5, generator=generator), "truth": torch.randn(2, 4, 3, generator=generator)}
    return {**parts, "clock": torch.zeros(2, 4, dtype=torch.int64), **changes}


OTHER = {"policy": torch.ones(2, 4, 5), "truth": torch.ones(2, 4, 3), "clock": torch.ones(2, 4, dtype=torch.int64)}


@pytest.mark.parametrize("more", ["layer_norm=false", "layer_norm=true", "recurrent=gru"])
@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_one_network_reads_different_parts_for_its_heads(name, more):
    chosen = algorithm(*ASKED, f"network.{more}", f"algorithm={{name: {name}}}", observations=PARTS)
    policy = population([agent(id=0, dqn=chosen), agent(id=1, dqn=chosen)], chosen).policy
    network, state = policy.stacks[0].networks["policy"], policy.initial_state(4)
    recurrent = RecurrentInput(state, torch.zeros(2, 1, 4, dtype=torch.bool)) if state.numel() else None
    before = network(observation(), recurrent)
    for part in PARTS:
        after = network(observation(**{part: OTHER[part]}), recurrent)
        for head in before:
            reads = part == "policy" or (part == "truth" and head == "value")
            assert torch.equal(before[head], after[head]) != reads


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_actors_and_critics_read_their_parts(name):
    chosen = algorithm(
        *ASKED, f"algorithm={{name: {name}}}", "network.layer_norm=null", observations=PARTS, actions=BOX
    )
    assert list(chosen.networks["actor"].network.parts) == ["policy"]
    assert sorted(chosen.networks["critics"].network.parts) == ["action", "policy", "truth"]


def loaded_agent(*more):
    asked = config(*ASKED, *more)
    spec = replace(interface(PARTS, gym.spaces.Discrete(3)), observation=PARTS)
    spec, reader = interface_from_json(interface_to_json(spec), asked.environment, "here")
    chosen = make_algorithm(asked, spec)
    return LoadedAgent(agent(dqn=chosen), asked, chosen, reader)


def test_prediction_needs_only_what_the_policy_reads():
    loaded = loaded_agent("algorithm={name: ppo}")
    batch = {"policy": np.random.default_rng(0).uniform(-1, 1, (4, 5)).astype(np.float32)}
    whole = {**batch, "truth": np.ones((4, 3), np.float32), "clock": np.full(4, 2)}
    actions = loaded.predict(batch)[0]
    assert actions.tolist() == loaded.predict(whole)[0].tolist()
    assert loaded.predict({"policy": batch["policy"][1]})[0] == actions[1]
    with pytest.raises(UserError, match="it has no part 'policy'"):
        loaded.predict({"truth": whole["truth"]})


def test_a_recurrent_agent_is_exported_whose_critic_remembers_what_its_policy_does_not_read(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from evorl.export.onnx_file import write_onnx

    loaded = loaded_agent("algorithm={name: ppo}", "network.recurrent=gru")
    assert write_onnx(loaded, tmp_path / "agent.onnx", {}) < 1e-5


@pytest.mark.parametrize("name", ["ppo", "td3"])
def test_an_exported_agent_reads_only_what_its_policy_does(name):
    actions = BOX if name == "td3" else gym.spaces.Discrete(3)
    chosen = algorithm(*ASKED, f"algorithm={{name: {name}}}", observations=PARTS, actions=actions)
    acting = ActingAgent(agent(dqn=chosen), chosen, PARTS)
    assert acting.inputs == ("policy",)
    seen = observation()
    (action,) = acting(seen["policy"][0])
    policy = population([agent(dqn=chosen)], chosen).policy
    started = torch.zeros(1, 4, dtype=torch.bool)
    one = {part: value[:1] for part, value in seen.items()}
    output, _ = policy.act(one, started, policy.initial_state(4), deterministic=True)
    np.testing.assert_allclose(action.numpy(), output.action[0].numpy(), rtol=1e-5, atol=1e-6)


def test_all_parts_are_read_by_default():
    chosen = algorithm("algorithm={name: ppo}", observations=PARTS)
    assert chosen.policy_parts == chosen.critic_parts == interface(PARTS).parts
