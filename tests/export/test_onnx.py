"""An exported agent acts as the run's own does, through onnxruntime and nothing of evorl."""

import gymnasium as gym
import numpy as np
import pytest
from helpers.loaded import SPACES, fresh_run, spaces_run
from helpers.support import SMALL, needs_its_extra

import evorl
from evorl.commands.command import run_command
from evorl.config.yaml import configuration_file, read_settings
from evorl.export import onnx_file
from evorl.export.network import ActingAgent
from evorl.types.outcomes import UserError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def exported(run, *options):
    run_command(["export", str(run), *options])
    return onnxruntime.InferenceSession(str(run / "agent.onnx"), providers=["CPUExecutionProvider"])


def weights(run):
    """The shapes of all numbers in the file."""
    graph = onnx.load(run / "agent.onnx").graph
    constants = [each.t for node in graph.node if node.op_type == "Constant" for each in node.attribute]
    return [tuple(each.dims) for each in (*graph.initializer, *constants)]


def parameters(agent):
    """All parameters and statistics of an agent, except those of what only learns."""
    networks = {name: roles for name, roles in agent.agent.tensors.items() if name not in ("critics", "temperature")}
    return {
        (name, role, key): value.numpy()
        for name, roles in networks.items()
        for role in ("parameters", "buffers")
        for key, value in roles[role].items()
    }


@pytest.mark.parametrize(
    "name", ["apex_dqn", "dqn_minatar", "ppo_recurrent", "rainbow_atari", "sac_mujoco", "td3_mujoco"]
)
def test_every_shipped_configuration_is_exported(name, tmp_path):
    needs_its_extra(name)
    num_envs = read_settings(configuration_file(name), [])["environment"]["num_envs"]
    config = fresh_run(tmp_path / "a", configuration_file(name), f"environment.num_envs={num_envs}")
    session = exported(tmp_path / "a")
    inputs = {each.name: each.shape for each in session.get_inputs()}
    assert all(shape[0] == "batch" for shape in inputs.values())
    assert ("state" in inputs) == (config.network.recurrent is not None)
    # Only what acts is inside, in its true size.
    own = sum(value.size for value in parameters(evorl.load(tmp_path / "a")).values())
    assert 0 < sum(np.prod(shape) for shape in weights(tmp_path / "a")) <= 1.01 * own + 100


@pytest.mark.parametrize("kind", SPACES)
def test_every_kind_of_space_is_exported(kind, tmp_path):
    spaces_run(tmp_path / "a", kind)
    exported(tmp_path / "a", "--allow-code")


def test_a_network_of_the_users_own_is_exported(tmp_path):
    fresh_run(tmp_path / "a", SMALL, "network={name: module, factory: 'helpers.support:probe_network'}")
    exported(tmp_path / "a", "--allow-code")


def test_onnx_file_is_not_padded(tmp_path):
    fresh_run(tmp_path / "a", SMALL, "network.hidden_sizes=[20, 37]", "network.layer_norm=true")
    exported(tmp_path / "a")
    model = onnx.load(tmp_path / "a" / "agent.onnx")
    assert {(4, 20), (20, 37), (37, 2)} <= {shape[-2:] for shape in weights(tmp_path / "a")}
    assert {prop.key: prop.value for prop in model.metadata_props}["environment"] == "CartPole-v1"


def test_onnx_file_plays_an_episode_alike(tmp_path):
    """Pendulum, whose actions are bounded and observations normalised, by an agent that remembers."""
    settings = [
        "algorithm={name: a2c, rollout_steps: 16, normalize_observations: true}",
        "network.recurrent=lstm",
        "network.recurrent_size=20",
    ]
    fresh_run(tmp_path / "a", SMALL, "replay={}", "environment.id=Pendulum-v1", *settings)
    session, agent = exported(tmp_path / "a"), evorl.load(tmp_path / "a")
    returns = []
    for act in (True, False):
        env, total, state = gym.make("Pendulum-v1"), 0.0, None
        observation, _ = env.reset(seed=3)
        shape = [1, *session.get_inputs()[1].shape[1:]]
        carried = np.zeros(shape, np.float32)
        for _ in range(60):
            if act:
                action, state = agent.predict(observation, state)
            else:
                given = {"observation": observation[None], "state": carried}
                (action,), carried = session.run(None, given)
            assert env.action_space.contains(action)
            observation, reward, *_ = env.step(action)
            total += reward
        returns.append(total)
    assert returns[0] == pytest.approx(returns[1], abs=1e-2)


def test_onnx_file_that_acts_otherwise_is_not_written(tmp_path, monkeypatch):
    fresh_run(tmp_path / "a", SMALL, "replay={}", "algorithm={name: a2c}", "environment.id=Pendulum-v1")
    true = ActingAgent._to_environment
    monkeypatch.setattr(ActingAgent, "_to_environment", lambda self, action: true(self, action) + 1e-4)
    with pytest.raises(
        UserError, match=r"agent\.onnx: was not written, because its outputs differ from the agent's by 0\.0001"
    ):
        run_command(["export", str(tmp_path / "a")])
    assert not (tmp_path / "a" / "agent.onnx").exists()


def test_bfloat16_agent_is_exported_in_float32(tmp_path, capsys):
    fresh_run(tmp_path / "a", SMALL, "network.bf16=true")
    exported(tmp_path / "a")
    assert "exported in float32" in capsys.readouterr().out


def test_what_is_missing_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"an export needs onnx and onnxruntime; install it with `pip install -e '\.\["):
        run_command(["export", str(tmp_path / "nothing")])
    assert onnx_file.TOLERANCE == 1e-5
