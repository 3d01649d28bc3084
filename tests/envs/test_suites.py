"""Suites of environments whose packages are optional."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.spaces import as_numbers
from evorl.envs.vector import make_vector
from evorl.types.outcomes import UserError


@pytest.mark.parametrize(
    ("id", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("Hopper-v5", "mujoco", "mujoco"),
        ("MinAtar/Breakout-v1", "minatar", "minatar"),
    ],
)
def test_a_missing_package_is_named_by_its_extra(id, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    told = rf"environment.id: '{id}' needs {module}; install it with `pip install -e '\.\[{extra}\]'`"
    with pytest.raises(UserError, match=f"^{told}$"):
        Environments(Environment(id=id), 1, 1)


def test_a_package_that_cannot_be_imported_is_not_said_to_be_missing(monkeypatch):
    def make(*args, **kwargs):
        raise gym.error.DependencyNotInstalled("MuJoCo is not installed") from ImportError("libGL.so.1: cannot open")

    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(UserError, match=r"^environment.id: cannot make 'Hopper-v5': libGL\.so\.1: cannot open"):
        Environments(Environment(id="Hopper-v5"), 1, 1)


@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])
def test_games_are_images_of_flags_and_are_kept_as_bytes(game):
    pytest.importorskip("minatar")
    made = Environments(Environment(id=f"MinAtar/{game}-v1"), 1, 2)
    made.reset(3)
    part = made.interface.parts["observation"]
    assert (part.kind, part.image_size, part.channels_last) == ("image", (10, 10), True)
    assert made.observation["observation"].dtype == torch.uint8
    assert made.observation["observation"].unique().tolist() == [0, 1]
    assert as_numbers(made.observation["observation"], part).unique().tolist() == [0.0, 1.0]
    made.close()


def test_a_game_is_determined_by_its_seed_and_actions_whatever_was_played_before():
    """Also by the action that a first sticky one repeats, and by the generator that the game has for itself."""
    pytest.importorskip("minatar")

    def game(made, seed):
        made.reset(seed)
        steps = [made.step(torch.full((1, 64), 1 + step % 2)) for step in range(40)]
        return torch.stack([step.observation["observation"] for step in steps])

    used, new = (Environments(Environment(id="MinAtar/Breakout-v1"), 1, 64) for _ in range(2))
    first = game(used, 3)
    assert not torch.equal(game(used, 4), first)
    assert torch.equal(game(used, 3), first)
    assert torch.equal(game(new, 3), first)
    used.close()
    new.close()


@pytest.mark.filterwarnings("error")
def test_a_game_is_filmed_in_colour():
    pytest.importorskip("minatar")
    pytest.importorskip("seaborn")
    vector = make_vector(Environment(id="MinAtar/Breakout-v1", kwargs={"render_mode": "rgb_array"}), 1)
    vector.reset(seed=3)
    (picture,) = vector.render()
    assert (picture.shape, picture.dtype) == ((320, 320, 3), np.uint8)
    assert picture.max() > 100
    vector.close()
