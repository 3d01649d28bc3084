"""Environments of users' modules: which of what a module defines is registered under its name, and when again."""

import sys
from types import ModuleType

import gymnasium as gym
import pytest

from evorl.config import Environment
from evorl.envs.vector import for_evaluation, make_vector
from evorl.types.outcomes import UserError


class Still(gym.Env):
    """An environment in which nothing happens."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Other(Still):
    """Another one of the same name in another module."""


@pytest.fixture
def module(monkeypatch):
    """Makes modules; they and what they register are gone after the test."""
    before = dict(gym.registry)

    def make(name, **contents):
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    yield make
    gym.registry.clear()
    gym.registry.update(before)


def entry(id):
    """The entry point under which an environment comes to be registered."""
    for_evaluation(Environment(id=id))
    return gym.registry[id.rpartition(":")[2]].entry_point


def made(id):
    """The class of the environments that are made under this name."""
    vector = make_vector(Environment(id=id, vectorization="sync"), 1)
    try:
        return type(vector.envs[0].unwrapped)
    finally:
        vector.close()


def test_a_class_is_registered_by_its_name(module):
    module("still_life", Still=Still)
    assert entry("still_life:Still") == "still_life:Still"
    assert made("still_life:Still") is Still


@pytest.mark.parametrize(("home", "registered"), [("still_life", True), ("imported_from", False)])
def test_of_functions_those_that_the_module_defines_are_registered(home, registered, module):
    def factory(**settings):
        return Still()

    factory.__module__ = home
    module("still_life", factory=factory)
    if registered:
        assert made("still_life:factory") is Still
    else:
        with pytest.raises(UserError, match="cannot make 'still_life:factory'"):
            for_evaluation(Environment(id="still_life:factory"))


def test_a_name_that_another_module_had_is_that_of_the_module_that_is_asked_for(module):
    module("still_life", Still=Still)
    module("other_life", Still=Other)
    assert made("still_life:Still") is Still
    assert made("other_life:Still") is Other
    assert made("still_life:Still") is Still
