"""Actions are elements of their space, whatever its dtype, start and bounds, and whoever chooses them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.loaded import fresh_run
from helpers.support import SMALL, algorithm, config

import evorl
from evorl.commands.check import _actions
from evorl.commands.play import ask
from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.games.players import MoveRequest, RandomPlayers, is_allowed
from evorl.envs.reading import action_reader, split
from evorl.envs.spaces import choices
from evorl.export import onnx_file
from evorl.league.players import Players
from evorl.population import Policy, initial_population
from evorl.runs.output.video import play

WHOLE = [np.int8, np.uint16, np.int64, np.uint64]


def _spaces():
    for dtype in WHOLE:
        limits = np.iinfo(dtype)
        for start in (3, min(limits.max - 2, 2**62)):
            yield f"{dtype.__name__} from {start}", gym.spaces.Discrete(3, start=start, dtype=dtype)
        table, lowest = np.array([[2, 3], [3, 1]]), np.full((2, 2), max(limits.min, -(2**62)))
        yield f"table of {dtype.__name__}", gym.spaces.MultiDiscrete(table, dtype=dtype, start=lowest)
        yield f"box of {dtype.__name__}", gym.spaces.Box(limits.min, limits.max, (2,), dtype)
    yield "half of int8", gym.spaces.Discrete(127, start=-127, dtype=np.int8)
    yield "flags", gym.spaces.Box(0, 1, (2,), bool)
    for dtype in (np.float16, np.float32, np.float64):
        for low, high in ((-0.3, 0.1), (-np.inf, np.inf), (2000.1, 2010.3)):
            yield f"{dtype.__name__} from {low} to {high}", gym.spaces.Box(low, high, (2,), dtype)
    yield "wide", gym.spaces.Box(-1e300, 1e300, (2,), np.float64)


SPACES = dict(_spaces())
EXPORTED = [name for name in SPACES if "from 3" in name or name.startswith(("box of", "table", "flags", "float"))]


class Strict(gym.Env):
    """It ends the run at an action that its space does not contain."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, name, render_mode=None):
        self.action_space, self.render_mode = SPACES[name], render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise evorl.UserError(f"{action!r} of type {type(action)} is not in {self.action_space}")
        self.done_steps += 1
        return np.zeros(2, np.float32), 1.0, False, self.done_steps == 4, {}

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)


def settings(name, **others):
    return Environment(id="test_actions:Strict", kwargs={"name": name}, **others)


def algorithms_for(space):
    names = ["a2c", "ppo", *(["sac"] if choices(space) or space.is_bounded() else [])]
    if isinstance(space, gym.spaces.Discrete):
        return [*names, "dqn"]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return names[:2]
    return [*names, *(["ddpg", "td3"] if not choices(space) and space.is_bounded() else [])]


@pytest.mark.parametrize("name", SPACES)
def test_agents_of_every_algorithm_act_in_the_space(name):
    space = SPACES[name]
    for kind in algorithms_for(space):
        with Environments(settings(name), 2, 2) as environments:
            overrides = f"algorithm={{name: {kind}}}", "population.size=2"
            chosen = algorithm(*overrides, actions=space, observations=Strict.observation_space)
            policy = Policy(initial_population(config(*overrides), chosen), chosen, torch.Generator())
            environments.try_step()
            environments.reset(0)
            for deterministic in (False, True, False):
                state = policy.initial_state(2)
                output, _ = policy.act(environments.observation, environments.started, state, deterministic)
                environments.step(output.action)
            with Environments(settings(name), 2, 2) as others:
                assert not others.load_state_dict(environments.state_dict(), 5), (
                    "replayed actions are in the space, too"
                )
                others.step(output.action)


@pytest.mark.parametrize("name", SPACES)
def test_others_act_in_the_space(name, monkeypatch):
    space, rng = SPACES[name], np.random.default_rng(0)
    asked = MoveRequest(np.zeros((5, 2), np.float32), None, np.arange(5), np.ones(5, dtype=bool))
    with Environments(settings(name), 1, 5) as environments:
        interface = environments.interface
        checked = action_reader(space, 5)(_actions(interface, None, 5, rng)[0].numpy())
    chosen = algorithm("algorithm={name: a2c}", actions=space, observations=Strict.observation_space)
    policy = Policy(initial_population(config("algorithm={name: a2c}"), chosen)[:1], chosen, torch.Generator())
    typed = " ".join(map(str, np.ravel(space.sample()).astype(int if choices(space) else float)))
    monkeypatch.setattr("builtins.input", lambda prompt: typed)
    for moves in (
        RandomPlayers(space)(asked),
        Players(policy, settings(name), interface, [0] * 5)(asked),
        checked,
        [ask(space, None)],
    ):
        assert all(is_allowed(np.asarray(move), None, space) for move in moves)


@pytest.mark.parametrize("name", SPACES)
def test_a_loaded_agent_acts_in_the_space(name, tmp_path):
    space = SPACES[name]
    environment = f"environment={{id: 'test_actions:Strict', kwargs: {{name: '{name}'}}}}"
    fresh_run(tmp_path / "a", SMALL, "replay={}", "algorithm={name: a2c}", environment, "network.hidden_sizes=[4]")
    agent = evorl.load(tmp_path / "a", allow_code=True)
    assert agent.action_space == space
    for deterministic in (True, False):
        assert space.contains(np.asarray(agent.predict(np.zeros(2), deterministic=deterministic)[0]))
        assert all(space.contains(each) for each in agent.predict(np.zeros((3, 2)), deterministic=deterministic)[0])
    for _ in play(agent, agent.config.environment, [0], 3, "rgb_array"):
        pass
    if name in EXPORTED:
        runtime = pytest.importorskip("onnxruntime")
        onnx_file.write_onnx(agent, tmp_path / "agent.onnx", {})
        session = runtime.InferenceSession(str(tmp_path / "agent.onnx"), providers=["CPUExecutionProvider"])
        actions = session.run(["action"], {"observation": np.eye(2, dtype=np.float32) * 1e6})[0]
        assert all(space.contains(action) for action in actions)


@pytest.mark.parametrize("name", [name for name, space in SPACES.items() if choices(space)])
def test_observed_choices_count_from_zero(name):
    space = SPACES[name]
    sizes = np.reshape(choices(space), space.shape)
    for seed in range(20):
        space.seed(seed)
        counted = split(space, np.asarray(space.sample())[None])["observation"]
        assert ((counted >= 0) & (counted < sizes)).all()


def test_an_unclipped_action_beyond_a_bound_becomes_the_bound():
    space = gym.spaces.Box(np.array([0.1, -0.7]), np.array([0.3, 0.2]), dtype=np.float64)
    read = action_reader(space, 1)(np.float32([[0.1, 0.2], [9.0, -9.0], [np.nan, np.nan]]))
    assert read.tolist() == [[float(np.float32(0.1)), 0.2], [0.3, -0.7], [0.1, 0.0]]
