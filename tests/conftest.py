import gc
import os
import shutil
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from helpers import forked_servers
from helpers.forked_launches import ForkedLaunches
from helpers.support import EVERY_MUTATION, LEAGUE, own_copy, train_below

from evorl.actors import server

# Collection imports much and leaves little garbage, for which all objects would be looked through again and again.
gc.disable()
# Forked and launched processes share two cores, and a parent that has run multi-threaded work must not fork.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without bytecode, each launched process would compile evorl again, and pytest would rewrite each file of tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Launched processes print their warnings, whatever the user's shell says of them.
os.environ.pop("PYTHONWARNINGS", None)


LAUNCH_LIMIT = 300
"""Seconds for a test that launches processes or is slow; those of the others are in pyproject.toml."""


def pytest_collection_modifyitems(config, items):
    if "campaign" not in config.getoption("markexpr"):
        campaigns = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]
    for item in items:
        launches = item.get_closest_marker("two_process") or item.get_closest_marker("slow")
        if launches and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LAUNCH_LIMIT))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_syncs():
    """Without waiting for the disk, which only a power failure would tell; tests of those look at the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory):
    """A state directory of the tests' own, for the list of code that they train with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_servers():
    """Actors whose server need not import anything, for runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "subprocess", forked_servers.patched())
        yield


@pytest.fixture
def forgotten_names():
    """Forget environments that a test registers without a version: other modules have versioned ones of these names."""
    before = {*gym.registry}
    yield
    for name in {*gym.registry} - before:
        if "-v" not in name:
            gym.registry.pop(name)


@pytest.fixture
def launched_servers(monkeypatch):
    """Actors of a server that is started as users' are."""
    monkeypatch.setattr(server, "subprocess", subprocess)


@pytest.fixture
def in_directory(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A run of three generations, none of them cut short, to be copied and not to be changed."""
    return train_below(tmp_path_factory.mktemp("trained"), "training.max_steps=116")


@pytest.fixture
def run(trained_run, in_directory):
    """A run of three generations, of which the last two have checkpoints, in `runs/a` of the working directory."""
    return shutil.copytree(trained_run, in_directory / "runs" / "a")


@pytest.fixture(scope="session")
def mutated_run(tmp_path_factory):
    """A run of six generations in which agents mutate in every way, to be read and not to be changed."""
    return train_below(tmp_path_factory.mktemp("mutated"), *EVERY_MUTATION, "training.max_steps=200")


@pytest.fixture(scope="session")
def league_run(tmp_path_factory):
    """A run of a league of three agents in a game, to be copied and not to be changed."""
    return train_below(tmp_path_factory.mktemp("league"), *LEAGUE, "training.max_steps=40")


@pytest.fixture
def own_league_run(league_run, in_directory):
    """The user's own run of a league, in `runs/a` of the working directory."""
    return own_copy(league_run, in_directory / "runs" / "a")


@pytest.fixture(scope="session")
def forked_launch():
    """A launch of the demo whose ranks need not import anything."""
    launches = ForkedLaunches()
    yield launches
    launches.close()
