"""An algorithm of an installed package, which names its classes as entry points."""

import site
import sys

import pytest
import yaml
from helpers.support import SMALL

from evorl.algorithms import make_algorithm
from evorl.algorithms.base import Algorithm
from evorl.commands.command import run_command
from evorl.config import validate
from evorl.runs.program import run_program
from evorl.system.plugins import installed
from evorl.types.outcomes import UserError

SETTINGS = """
from evorl.config.off_policy import DQNSettings

class MySettings(DQNSettings):
    name: str = "mine"
"""
ALGORITHM = """
from evorl.algorithms.dqn import DQN

LOSSES = []

class Mine(DQN):
    def loss(self, *arguments):
        LOSSES.append(arguments)
        return super().loss(*arguments)
"""
POINTS = "[evorl.settings]\nmine = mine_settings:MySettings\n[evorl.algorithms]\nmine = mine:Mine\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a distribution with these entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    (tmp_path / "mine_settings.py").write_text(SETTINGS)
    (tmp_path / "mine.py").write_text(ALGORITHM)

    def install(points):
        folder = tmp_path / "mine-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(points)

    yield install
    for name in ("mine", "mine_settings"):
        sys.modules.pop(name, None)


def test_commands_know_it(package, in_directory):
    package(POINTS)
    settings = ["--no-track", "--name", "a", "algorithm.name=mine", "training.max_steps=200"]
    commands = (
        ["train", str(SMALL), *settings],
        ["evaluate", "runs/a", "--episodes", "2"],
        ["lineage", "runs/a"],
        ["config", "algorithm.name=mine"],
        ["config", "algorithm.name=mine", "--explain", "gamma"],
    )
    for command in commands:
        assert run_program(run_command, command) == 0
    assert sys.modules["mine"].LOSSES
    settings = yaml.safe_load((in_directory / "runs" / "a" / "config.yaml").read_text())
    assert settings["algorithm"]["name"] == "mine"


def test_a_mistyped_name_is_told_from_it(package):
    package(POINTS)
    with pytest.raises(UserError, match="there is no algorithm 'mien'; did you mean 'mine'"):
        validate({"algorithm": "mien"})


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        (POINTS.replace("mine_settings:", "nowhere:"), "nowhere:MySettings cannot be imported: ModuleNotFoundError"),
        (POINTS.replace("MySettings", "DQNSettings.model_fields"), "and no subclass of AlgorithmSettings"),
    ],
)
def test_settings_that_are_none(package, points, reason):
    package(points)
    with pytest.raises(UserError, match=reason):
        validate({"algorithm": "mine"})


def test_a_package_that_only_lies_on_the_path_is_not_installed(package, monkeypatch):
    package(POINTS)
    monkeypatch.setattr(site, "getsitepackages", list)
    with pytest.raises(UserError, match="there is no algorithm 'mine'"):
        validate({"algorithm": {"name": "mine"}})
    assert "mine_settings" not in sys.modules


def test_settings_without_an_algorithm(package):
    package(POINTS.partition("[evorl.algorithms]")[0])
    with pytest.raises(UserError, match=r"mine has settings, but no entry point in the group evorl\.algorithms"):
        make_algorithm(validate({"algorithm": {"name": "mine"}}), None)
    assert installed("evorl.algorithms", "mine", Algorithm) is None
