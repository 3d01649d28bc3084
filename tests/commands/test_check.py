"""`evorl check`: environments with one mistake each, which is named where it shows and nowhere else."""

import re

import gymnasium as gym
import pytest

from evorl.commands import check
from evorl.commands.command import run_command
from evorl.runs.program import run_program

pytestmark = pytest.mark.usefixtures("forgotten_names")

MODULE = '''
import gymnasium as gym
import numpy as np


class Good(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=4):
        self.size = size
        self.buffer = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        self.number += 1
        return self.observe(), 1.0, False, self.number >= self.size, {}


class OldStep(Good):
    def step(self, action):
        return self.observe(), 1.0, False, {}


class Unseeded(Good):
    def observe(self):
        return np.random.uniform(-1, 1, 2).astype(np.float32)


class Outside(Good):
    def observe(self):
        return 1 + super().observe() ** 2


class NoObservation(Good):
    def observe(self):
        return super().observe() * (np.nan if self.number == 2 else 1)


class Endless(Good):
    def step(self, action):
        return *super().step(action)[:3], False, {}


class Buffered(Good):
    def observe(self):
        self.buffer[:] = super().observe()
        return self.buffer


class Hidden(Good):
    """Its rewards depend on the episodes before."""

    total = 0

    def step(self, action):
        observation, _, *rest = super().step(action)
        self.total += 1
        return observation, float(self.total), *rest


class Unactable(Good):
    action_space = gym.spaces.MultiBinary(2)


class Limbs(Good):
    action_space = gym.spaces.Dict(limbs=gym.spaces.MultiBinary(2))

    def step(self, action):
        return super().step(action["limbs"])


class Late(Good):
    def step(self, action):
        if self.number == 2:
            raise RuntimeError("the wheel came off")
        return super().step(action)


class Masked(Good):
    action_space = gym.spaces.MultiDiscrete([2, 3])
    allowed = (1, 2)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self.info()

    def info(self):
        return {"action_mask": np.array([0, 1, 0, 0, 1], np.int8)}

    def step(self, action):
        assert tuple(action) == self.allowed, action
        return *super().step(action)[:4], self.info()


class ManyActions(Good):
    action_space = gym.spaces.Discrete(2**31 - 1)


class Unbounded(Good):
    action_space = gym.spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (2,))


class MaskedAtFirst(Masked):
    def info(self):
        return super().info() if self.number < 3 else {}

    def step(self, action):
        return *Good.step(self, action)[:4], self.info()
'''


@pytest.fixture(autouse=True)
def module(in_directory, monkeypatch):
    monkeypatch.syspath_prepend(in_directory)
    monkeypatch.setattr(check, "SECONDS", 0.0)
    (in_directory / "checked_module.py").write_text(MODULE)


def verdicts(name, *words, steps=60):
    settings = check.settings_of(f"checked_module:{name}", list(words)).environment
    return list(check.verdicts(settings, steps))


def test_the_categories_of_an_observation_are_counted(capsys):
    run_command(["check", "FrozenLake-v1", "--steps", "20"])
    assert "observation (categories [16]); Discrete(4); " in capsys.readouterr().out


def test_what_is_right_passes_with_figures(capsys):
    run_command(["check", "checked_module:Good", "size=5", "--steps", "60"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"pass"}
    names = [re.split(r"  +", line)[1] for line in lines]
    assert names == ["interface", "spaces", "gymnasium", "episodes", "resuming", "speed"]
    text = dict(zip(names, lines, strict=True))
    assert "observation (vector [2]); Discrete(2); for a2c, a3c, " in text["spaces"]
    assert " apex_dqn, " in text["spaces"]
    assert "td3" not in text["spaces"]
    assert "rewards 1 to 1; ended episodes: 12, truncated: 12" in text["episodes"]
    assert re.search(r"steps/s with 1 copy, .* steps/s with 8 copies \(sync\)", text["speed"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Unseeded", {"gymnasium": "fail", "resuming": "warn"}),
        ("Outside", {"gymnasium": "fail"}),
        ("NoObservation", {"episodes": "fail", "resuming": "fail"}),
        ("Endless", {"episodes": "warn"}),
        ("Unbounded", {"spaces": "warn"}),
        ("MaskedAtFirst", {"episodes": "fail", "resuming": "fail"}),
        ("Buffered", {"gymnasium": "fail"}),
        ("Hidden", {"gymnasium": "fail", "resuming": "warn"}),
        ("Late", {"episodes": "fail", "resuming": "fail"}),
    ],
)
def test_a_mistake_is_told_where_it_shows_and_nowhere_else(name, expected):
    found = {name: verdict for name, verdict in verdicts(name) if verdict.level != "pass"}
    # Gymnasium's checks differ between its versions, and speed is counted for too short here to meet every mistake.
    own = {name: verdict.level for name, verdict in found.items() if name not in ("gymnasium", "speed")}
    assert own == {name: level for name, level in expected.items() if name not in ("gymnasium", "speed")}
    assert found.keys() >= {"gymnasium"} & expected.keys()


@pytest.mark.parametrize(
    ("name", "last", "text"),
    [
        ("Nothing", "interface", "neither defines nor registers 'Nothing'"),
        ("OldStep", "interface", "returns (ndarray, float, bool, dict); it must return 5 values"),
        ("ManyActions", "spaces", "4 agents for its spaces, with the layers of network.hidden_sizes: "),
        ("Unactable", "spaces", "no algorithm takes it: algorithm.name: a2c cannot act in MultiBinary(2)"),
        ("Limbs", "spaces", "no algorithm takes it: algorithm.name: a2c cannot act in Dict('limbs': MultiBinary(2))"),
    ],
)
def test_checks_that_make_no_sense_are_left_out(name, last, text):
    *before, (where, verdict) = verdicts(name)
    assert [each.level for _, each in before] == ["pass"] * len(before)
    assert (where, verdict.level) == (last, "fail")
    assert text in verdict.text


def test_masked_actions_are_allowed_ones():
    found = dict(verdicts("Masked"))
    assert {verdict.level for verdict in found.values()} == {"pass"}
    assert "MultiDiscrete([2 3]) with masks; for a2c" in found["spaces"].text


def test_the_exit_code_tells_of_failures(capsys):
    assert run_program(run_command, ["check", "checked_module:Endless", "--steps", "30"]) == 0
    assert run_program(run_command, ["check", "checked_module:OldStep"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: 1 check of checked_module:OldStep failed\n"
    assert run_program(run_command, ["check", "checked_module:Good", "length=3"]) == 1
    assert "environment.kwargs: 'checked_module:Good' cannot be made with these arguments" in capsys.readouterr().out


def test_words_are_keyword_arguments_or_settings_of_the_environment(capsys):
    found = check.settings_of("CartPole-v1", ["sutton_barto_reward=true", "environment.num_envs=3"]).environment
    assert found.kwargs == {"sutton_barto_reward": True}
    assert found.num_envs == 3
    assert run_program(run_command, ["check", "CartPole-v1", "environment.copies=1"]) == 2
    assert "environment.copies: unknown key" in capsys.readouterr().err


def test_rewards_are_those_of_transitions_where_a_native_vector_spends_a_step_on_resets(capsys):
    assert run_program(run_command, ["check", "CartPole-v1", "--steps", "300"]) == 0
    assert re.search(r"finite in 2\d\d random steps, rewards 1 to 1; ", capsys.readouterr().out)


def test_an_environment_with_a_vector_implementation_alone_is_not_failed(monkeypatch, capsys):
    id, entry = "VectorAlone-v0", "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    monkeypatch.setitem(gym.registry, id, gym.envs.registration.EnvSpec(id, vector_entry_point=entry))
    assert run_program(run_command, ["check", id, "--steps", "60"]) == 0
    assert re.search(r"^warn +gymnasium +only a vector environment is registered", capsys.readouterr().out, re.M)
