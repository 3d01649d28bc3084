"""Suites of environments whose packages are optional."""

import sys

import pytest
import torch

from evorl.config import Environment
from evorl.envs import Environments
from evorl.types import UserError


@pytest.mark.parametrize(
    ("id", "module", "told"),
    [
        ("ALE/Pong-v5", "ale_py", r"'ALE/Pong-v5' needs the Atari extra: pip install -e '\.\[atari\]'"),
        ("Hopper-v5", "mujoco", r"'Hopper-v5' needs the MuJoCo extra: pip install -e '\.\[mujoco\]'"),
        ("Hopper-v5", "imageio", r"'Hopper-v5' needs the MuJoCo extra: pip install -e '\.\[mujoco\]'"),
    ],
)
def test_a_missing_package_is_named_by_its_extra(id, module, told, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"^environment.id: {told}$"):
        Environments(Environment(id=id), 1, 1)


@pytest.mark.parametrize(
    ("id", "numbers", "actions"),
    [("HalfCheetah-v5", 17, 6), ("Hopper-v5", 11, 3), ("Walker2d-v5", 17, 6), ("Ant-v5", 105, 8)],
)
def test_robots_step(id, numbers, actions):
    pytest.importorskip("mujoco")
    made = Environments(Environment(id=id), 2, 2)
    made.reset(3)
    assert made.observation["observation"].shape == (2, 2, numbers)
    before = made.observation["observation"].clone()
    transition = made.step(torch.full((2, 2, actions), 0.5))
    assert transition.valid.all()
    assert not torch.equal(made.observation["observation"], before)
    assert (transition.reward != 0).all()
    made.close()
