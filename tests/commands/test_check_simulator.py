"""`evorl check` of simulators of tensors: mistakes are named where they show."""

import re
from typing import ClassVar

import gymnasium as gym
import pytest
import torch

from evorl.commands.command import run_command
from evorl.runs.program import run_program

CARTPOLE = "tensor:helpers.torch_cartpole:make"


def checked(capsys, *words, code=0):
    assert run_program(run_command, ["check", CARTPOLE, *words, "--steps", "60"]) == code
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[1]: " ".join(line.split()) for line in lines}


def test_a_good_simulator_passes(capsys):
    rows = checked(capsys)
    assert rows["spaces"].endswith("Discrete(2); for a2c, dqn, ppo, sac")
    assert rows["resets"].startswith("pass resets true last observations in all")
    assert rows["determinism"].startswith("pass determinism episodes are the same from one seed")
    assert rows["device"].startswith("pass device tensors on cpu: observation float32, reward float32, terminated bool")
    assert rows["resuming"].startswith("warn resuming running episodes cannot be saved")
    assert re.search(r"steps/s with 64 copies \(a simulator\)", rows["speed"])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ("final=", "warn resets no last observations in"),
        ("fake=true", "fail resets in all terminations the last observation is the next episode's first"),
        ("alike=true", "warn determinism all copies begin alike"),
        ("unseeded=true", "warn determinism episodes from one seed differ"),
    ],
)
def test_mistakes(capsys, kwargs, words):
    rows = checked(capsys, kwargs, code=int(words.startswith("fail")))
    assert re.match(words, rows[words.split()[1]])


class FewStates:
    """Shows one of a few numbers at random; episodes take three steps. Every second one is terminated, the others are
    truncated, with true last observations unless `wrong`.
    """

    single_observation_space, single_action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)
    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, num_envs, device, seed, states=2, wrong=False):
        self.num_envs, self.device, self.random, self.steps = num_envs, device, torch.Generator(), 0
        self.states, self.wrong = states, wrong

    def reset(self, *, seed=None, options=None):
        self.random.manual_seed(self.random.seed() if seed is None else seed)
        return self.number(), {}

    def number(self):
        return torch.randint(self.states, (self.num_envs, 1), generator=self.random) / self.states

    def step(self, action):
        self.steps += 1
        terminated, truncated = (torch.full((self.num_envs,), self.steps % 6 == at) for at in (3, 0))
        first, last = self.number(), self.number()
        last = first if self.wrong and truncated.any() else last
        return first, torch.ones(self.num_envs), terminated, truncated, {"final_obs": last}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), r"warn  resets .* in [23]\d\d of 1280 ends of episodes the last is the next first observation, by chance"),
        (
            ("states=1000", "wrong=true"),
            "fail  resets .* in all truncations the last observation is the next",
        ),
    ],
)
def test_first_and_last_observations_may_be_alike_by_chance(words, told, capsys):
    code = run_program(run_command, ["check", f"tensor:{__name__}:FewStates", *words, "--steps", "60"])
    assert code == int(told.startswith("fail"))
    assert re.search(told, capsys.readouterr().out)


def test_a_simulator_that_does_not_say_when_it_resets_is_told_how(capsys):
    rows = checked(capsys, "mode=null", code=1)
    assert "does not say when it resets; declare it where the environment is made" in rows["interface"]
