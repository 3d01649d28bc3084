"""Code that a run names is executed if this user has trained with it here, or if it is an installed class."""

import shutil
import stat
import threading
from pathlib import Path

import pytest
from helpers.support import config, error_line, train

import evorl
from evorl.commands.command import run_command
from evorl.commands.train import resumption
from evorl.runs.program import run_program
from evorl.runs.storage.trust import code_to_allow, is_trained, note_trained, refuse_code
from evorl.types.outcomes import UserError

WALK = """
import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == self.length, False, {}


def make(length=4):
    return Walk(length)
"""
MINE = config("environment=walks:Walk", "environment.kwargs={length: 5}")
REFUSAL = "names custom code to execute; add --allow-code"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The user's list of code, which is not there yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "evorl" / "trained"


def test_code_is_trusted_with_the_same_arguments_in_the_same_working_directory(trained, tmp_path, monkeypatch):
    assert not is_trained(MINE)
    note_trained(MINE)
    assert is_trained(MINE)
    refuse_code(MINE, False)
    for change in (
        "environment.kwargs={length: 6}", "environment.id=walks:make",
        "network={name: module, factory: 'walks:net'}",
    ):  # fmt: skip
        with pytest.raises(UserError, match=REFUSAL):
            refuse_code(config("environment=walks:Walk", "environment.kwargs={length: 5}", change), False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not is_trained(MINE), "modules of another directory would be imported"


def test_the_list_survives_half_a_line_and_writers_at_once(trained):
    configs = [config("environment=walks:Walk", f"environment.kwargs={{length: {length}}}") for length in range(20)]
    note_trained(MINE)
    trained.write_bytes(trained.read_bytes()[:20])
    threads = [threading.Thread(target=note_trained, args=(each,)) for each in configs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(is_trained, configs))
    assert len({*trained.read_bytes().split()}) == 1 + len(configs), "each has a line of its own"
    assert stat.S_IMODE(trained.parent.stat().st_mode) == 0o700


def test_without_a_list_code_needs_leave(trained, tmp_path):
    (tmp_path / "other").write_bytes(b"")
    trained.parent.mkdir(parents=True)
    trained.symlink_to(tmp_path / "other")
    note_trained(MINE)
    assert (tmp_path / "other").read_bytes() == b"", "nothing is written through a link"
    assert not is_trained(MINE)
    shutil.rmtree(trained.parent)
    trained.parent.write_bytes(b"")
    note_trained(MINE)
    assert not is_trained(MINE)
    note_trained(config())
    refuse_code(config(), False)


@pytest.mark.parametrize("settings", [
    ["environment.id=gymnasium.envs.classic_control:CartPoleEnv"],
    ["environment.id=gymnasium.envs.classic_control:CartPole-v1"],
    ["network={name: module, factory: 'torch.nn:Linear'}"],
])  # fmt: skip
def test_classes_and_environments_of_installed_packages_need_no_leave(settings, trained):
    assert code_to_allow(config(*settings)) == {}


@pytest.mark.parametrize("settings", [
    ["environment.id=gymnasium.envs.registration:make"],
    ["environment.id=subprocess:Popen"],
    ["environment.id=__main__:Walk"],
    ["network={name: module, factory: 'torch:save'}"],
    ["network={name: module, factory: 'gymnasium:make'}"],
])  # fmt: skip
def test_functions_and_the_standard_library_need_leave(settings, trained):
    assert len(code_to_allow(config(*settings))) == 1


def test_no_command_asks_for_trained_code_and_each_for_other_code(in_directory, monkeypatch, capsys):
    (in_directory / "trusted_walk.py").write_text(WALK)
    monkeypatch.syspath_prepend(in_directory)
    settings = "environment=trusted_walk:Walk", "environment.kwargs={length: 5}", "training.max_steps=40"
    assert train(*settings, "run.name=a") == 0
    assert "`evorl evaluate runs/a`, `evorl resume runs/a training" in capsys.readouterr().err
    shutil.copytree("runs/a", "runs/b")
    for run in ("runs/a", "runs/b"):
        assert run_program(run_command, ["evaluate", run, "--episodes", "2"]) == 0
        assert evorl.load(run).agent is not None
        assert resumption(Path(run), (), None, 1)
    path = Path("runs/b/config.yaml")
    path.write_text(path.read_text().replace("length: 5", "length: 6"))
    capsys.readouterr()
    assert run_program(run_command, ["evaluate", "runs/b"]) == 2
    assert REFUSAL in error_line(capsys)
    with pytest.raises(UserError, match=REFUSAL):
        resumption(Path("runs/b"), (), None, 1)
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "2", "--allow-code"]) == 0


def test_the_environment_of_evaluation_is_code_too(trained):
    other = config("evaluation.environment={id: 'walks:Walk', kwargs: {length: 5}}")
    with pytest.raises(UserError, match=r"evaluation.environment.id: 'walks:Walk' names custom code"):
        refuse_code(other, False)
    note_trained(other)
    refuse_code(other, False)
    assert not is_trained(config("evaluation.environment={id: 'walks:Walk', kwargs: {length: 6}}"))
