"""Environments in processes of their own."""

import os
import subprocess
import sys
import time

import pytest
from helpers.learning import all_gone
from helpers.support import ROOT

RANK = """
import torch
from helpers.learning import descendants
from helpers.support import config
from evorl.envs import Environments

hanging = config("environment={id: 'helpers.faults:Hanging-v0', num_envs: 2, vectorization: async}").environment
others = descendants()
environments = Environments(hanging, 1, 2)
environments.reset(1)
print(*descendants() - others, flush=True)
for number in range(3):
    print(number, flush=True)
    environments.step(torch.zeros(1, 2, dtype=torch.int64))
"""


def test_an_environment_that_hangs_ends_with_its_rank():
    """The rank is a program of its own: a fork of the tests, which have threads, could inherit a held lock."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, env=environment, text=True) as rank:
        family = [int(pid) for pid in rank.stdout.readline().split()]
        begun = [rank.stdout.readline().strip() for _ in range(3)]
        time.sleep(0.5)
        waits = rank.poll() is None
        rank.kill()
    assert begun == ["0", "1", "2"]
    assert waits, "it is meant to wait for environments that hang"
    assert len(family) == 2
    assert all_gone(family)


STRANGE = """
import os
import signal
import gymnasium as gym
import numpy as np

MAIN = os.getpid()

class Strange(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, how):
        self.how, self.steps = how, 0
        if how == "constructor" and os.getpid() != MAIN:
            raise ValueError("the port is taken")

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 4 and self.how == "base" and os.getpid() != MAIN:
            raise BaseException("the end")
        size = 3 if self.steps == 4 and self.how == "shape" else 2
        return np.zeros(size, np.float32), 0.0, False, False, {}

    def close(self):
        if os.getpid() != MAIN:
            os.kill(os.getpid(), signal.SIGTERM)  # A parent that exits terminates the workers while they close.
"""


def trained_in_processes(directory, *settings, limit="true"):
    """The lines that training with a process for each environment prints to stderr after its header."""
    (directory / "strange.py").write_text(STRANGE)
    small = ("--no-track", "training.target_fitness=null", "population.size=2", "environment.vectorization=async")
    command = [sys.executable, "-m", "evorl", "train", "dqn", *settings, *small]
    done = subprocess.run(
        ["bash", "-c", f'{limit}; exec "$@"', "_", *command],
        cwd=directory, capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("constructor", "a process of `async` raised ValueError: the port is taken (strange.py:15 in __init__"),
        ("shape", "the step of strange:Strange returns the observation of shape [3]"),
    ],
)
def test_an_error_in_a_process_of_an_environment_is_one_line(how, told, tmp_path):
    lines = trained_in_processes(
        tmp_path, f"environment={{id: 'strange:Strange', num_envs: 2, kwargs: {{how: {how}}}}}"
    )
    assert lines[-1].startswith(f"error: environment.id: {told}")
    assert len(lines) <= 5, "the header has four"


def test_too_few_open_files_for_the_processes_of_environments_are_one_line(tmp_path):
    settings = ("environment.id=CartPole-v1", "environment.num_envs=64")
    lines = trained_in_processes(tmp_path, *settings, limit="ulimit -n 64")
    assert lines[-1] == "error: environment.num_envs: Too many open files; raise the limit with `ulimit -n 65536`"
    assert len(lines) <= 5
