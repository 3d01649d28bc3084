"""Environments that do not follow Gymnasium's interface: one line names the environment and what is wrong."""

import sys
import warnings
from types import ModuleType
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import error_line

from evorl.commands.command import run_command
from evorl.config import Environment
from evorl.config.yaml import configuration_file
from evorl.envs import Environments
from evorl.runs.configuration import read_config
from evorl.runs.launch import check
from evorl.runs.program import run_program
from evorl.types.outcomes import EvorlWarning, UserError

pytestmark = pytest.mark.usefixtures("forgotten_names")


class Good(gym.Env):
    """Follows the interface; what it returns can be replaced."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)
    shown = (0.0, 0.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action):
        return self.observation(), 0.0, False, False, {}

    def observation(self):
        return np.array(self.shown, dtype=np.float32)


class OldStep(Good):
    def step(self, action):
        return self.observation(), 0.0, False, {}


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return self.observation()


class Wide(Good):
    shown = (0.0, 0.0, 0.0)


class Real(Good):
    observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)


class OtherKeys(Good):
    observation_space = gym.spaces.Dict(arm=Good.observation_space, hand=Good.observation_space)

    def observation(self):
        return {"arm": np.zeros(2, np.float32), "head": np.zeros(2, np.float32)}


class InnerShape(Good):
    observation_space = gym.spaces.Dict(arm=gym.spaces.Tuple([Good.observation_space] * 2))

    def observation(self):
        return {"arm": (np.zeros(2, np.float32), np.zeros(3, np.float32))}


class ArrayReward(Good):
    def step(self, action):
        return self.observation(), np.zeros(1), False, False, {}


class Shorter(Good):
    """In step `bad` its observation is shorter than in all others; step 3 ends the episode."""

    parts = False

    def __init__(self, bad=3):
        self.bad = bad
        if self.parts:
            self.observation_space = gym.spaces.Dict(arm=Good.observation_space)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return self.observation(), 0.0, self.steps == 3, False, {}

    def observation(self):
        shown = np.zeros(1 if self.steps == self.bad else 2, np.float32)
        return {"arm": shown} if self.parts else shown


class ShorterPart(Shorter):
    parts = True


class NoActions(Good):
    action_space = None


class NoNumbers(Good):
    action_space = gym.spaces.Box(-1.0, 1.0, (0,))


class EmptyPart(Good):
    observation_space = gym.spaces.Dict(a=gym.spaces.MultiDiscrete(np.ones((2, 0), int)), b=gym.spaces.Discrete(2))

    def observation(self):
        return {"a": np.ones((2, 0), int), "b": 0}


class EmptySpace(Good):
    observation_space = gym.spaces.Dict()


class Buffered(Good):
    """Writes all of its observations into one array; each episode has one step."""

    def __init__(self):
        self.buffer, self.count = np.zeros(2, np.float32), 0

    def observation(self):
        self.count += 1
        self.buffer[:] = self.count / 100
        return self.buffer

    def step(self, action):
        return self.observation(), 0.0, False, True, {}


class Turns:
    """Like PettingZoo's AECEnv."""

    def __init__(self):
        self.possible_agents = ["a", "b"]

    def agent_iter(self):
        yield from self.possible_agents


class Plain:
    pass


def make_turns():
    return Turns()


@pytest.fixture
def module(monkeypatch):
    """A module `own` with this file's classes and functions; what it registers is gone after the test."""
    before = dict(gym.registry)
    made = ModuleType("own")
    vars(made).update({name: value for name, value in globals().items() if not name.startswith("__")})
    monkeypatch.setattr(made.make_turns, "__module__", "own")
    monkeypatch.setitem(sys.modules, "own", made)
    yield made
    gym.registry.clear()
    gym.registry.update(before)


def mistake(name, vectorization="sync", **kwargs):
    settings = Environment(id=name, kwargs=kwargs, vectorization=vectorization)
    with warnings.catch_warnings():
        # Gymnasium's own ones, in colour and without the environment's name.
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error" if vectorization == "sync" else "ignore", UserWarning)
        with pytest.raises(UserError) as raised, Environments(settings, 2, 2) as made:
            made.try_step()
    assert "\n" not in str(raised.value)
    return str(raised.value)


WANTED = "name a class or a function that makes a gymnasium.Env"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make_turns", f"{WANTED}, or a registered id; of a game of two seats, a class with `possible_agents`"),
        ("Plain", WANTED),
        ("OldStap", "the module 'own' neither defines nor registers 'OldStap'; did you mean 'OldStep'?"),
    ],
)
def test_what_is_no_environment_is_refused(name, message, module):
    error = mistake(f"own:{name}")
    assert error.startswith(f"environment.id: cannot make 'own:{name}': ")
    assert message in error


def test_names_of_a_module_are_offered_without_pythons_own(monkeypatch):
    few = ModuleType("few")
    few.Mine = Good
    monkeypatch.setitem(sys.modules, "few", few)
    assert mistake("few:Zzz").endswith("neither defines nor registers 'Zzz'; known: Mine")


def test_an_id_that_nobody_registered_says_how_to_name_the_module():
    for wrong, right in (("OwnLander-v0", "module:OwnLander-v0"), ("own.envs.Lander", "own.envs:Lander")):
        assert mistake(wrong).endswith(f"Name an environment of your own together with its module, as {right}")
    assert mistake("CartPole-v9").endswith("It provides versioned environments: [ `v0`, `v1` ].")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OldStep", "the step of own:OldStep returns (ndarray, float, bool, dict); it must return 5 values"),
        ("OldReset", "the reset of own:OldReset returns an array of shape [2]; it must return a pair"),
        ("Wide", "the reset of own:Wide returns the observation of shape [3]; its observation_space has shape [2]"),
    ],
)
def test_results_of_other_lengths_and_shapes_are_refused(name, message, vectorization, module):
    told = mistake(f"own:{name}", vectorization)
    assert told.startswith("environment.id: ")
    assert message in told


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Real", "the observation in float32, which does not fit its observation_space of uint8"),
        ("OtherKeys", "returns no part 'hand' of the observation, which its observation_space has"),
        (
            "ArrayReward",
            "the step of own:ArrayReward returns an array of shape [1] as its reward; it must return a num",
        ),
        ("InnerShape", "returns part 'arm.1' of the observation of shape [3]; its observation_space has shape [2]"),
        ("NoActions", "own:NoActions has no action_space; set it to a space"),
        ("NoNumbers", "the action_space of own:NoNumbers is Box([], [], (0,), float32), which holds no numbers"),
        ("EmptyPart", "an observation of shape [2, 0] holds no numbers"),
        ("EmptySpace", "the observation_space of own:EmptySpace: An empty Dict"),
    ],
)
def test_results_that_do_not_fit_the_spaces_are_refused(name, message, module):
    told = mistake(f"own:{name}")
    assert told.startswith("environment.id: ")
    assert message in told


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("name", "bad", "part"), [("Shorter", 2, ""), ("ShorterPart", 3, "part 'arm' of ")])
def test_an_observation_of_another_shape_is_refused_in_any_step(name, bad, part, vectorization, module):
    settings = Environment(id=f"own:{name}", vectorization=vectorization, kwargs={"bad": bad})
    told = (
        rf"the step of own:{name} returns {part}the observation of shape \[1\]; its observation_space has shape \[2\]"
    )
    with Environments(settings, 1, 2) as made:
        made.reset(1)
        for _ in range(bad - 1):
            made.step(torch.zeros(1, 2, dtype=torch.int64))
        with pytest.raises(UserError, match=told):
            made.step(torch.zeros(1, 2, dtype=torch.int64))


class OwnVector(gym.vector.VectorEnv):
    """A native vector environment that resets within the step, and says nothing of the last observations."""

    num_envs = 2
    single_observation_space, single_action_space = Good.observation_space, Good.action_space
    observation_space = gym.vector.utils.batch_space(Good.observation_space, 2)
    action_space = gym.vector.utils.batch_space(Good.action_space, 2)
    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, num_envs, reward=(0.0, 0.0), mask=False):
        self.reward = np.array(reward)
        self.info = {"action_mask": np.ones((2, 2), bool), "_action_mask": np.ones(2, bool)} if mask else {}

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.float32), self.info

    def step(self, actions):
        return np.zeros((2, 2), np.float32), self.reward, np.ones(2, bool), np.zeros(2, bool), self.info


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({}, r"resets within the step \(autoreset mode SAME_STEP\), but gives no info\['final_obs'\]"),
        ({"reward": [[0.0], [0.0]]}, r"rewards of shape \[2, 1\]; a vector environment of 2 copies gives \[2\]"),
    ],
)
def test_what_a_native_vector_environment_lacks_is_named(kwargs, told, module):
    gym.register("Own-v0", vector_entry_point=OwnVector)
    with (
        Environments(Environment(id="Own-v0", kwargs=kwargs), 1, 2) as made,
        pytest.raises(UserError, match=f"environment.id: Own-v0 .*{told}"),
    ):
        made.step(torch.zeros(1, 2, dtype=torch.int64))


def test_a_native_vector_environment_must_say_when_it_resets(module):
    class Undeclared(OwnVector):
        metadata: ClassVar = {}

    gym.register("Own-v0", vector_entry_point=Undeclared)
    with pytest.raises(UserError, match=r"environment.id: Own-v0 does not say when it resets; declare it"):
        Environments(Environment(id="Own-v0"), 1, 2)


def test_a_native_vector_environment_may_give_last_observations_as_one_dictionary(module):
    class DictVector(OwnVector):
        single_observation_space = gym.spaces.Dict(position=Good.observation_space)
        observation_space = gym.vector.utils.batch_space(single_observation_space, 2)

        def reset(self, *, seed=None, options=None):
            return {"position": np.zeros((2, 2), np.float32)}, {}

        def step(self, actions):
            observation, *outcome, _ = super().step(actions)
            return {"position": observation}, *outcome, {"final_obs": {"position": np.eye(2, dtype=np.float32)}}

    gym.register("Own-v0", vector_entry_point=DictVector)
    with Environments(Environment(id="Own-v0"), 1, 2) as made:
        made.reset(1)
        last = made.step(torch.zeros(1, 2, dtype=torch.int64)).next_observation["position"]
    assert last.tolist() == [[[1, 0], [0, 1]]]


def test_only_given_keyword_arguments_are_blamed(module):
    class Missing(Good):
        def __init__(self):
            raise ValueError("no such map: north.txt")

    class Needing(Good):
        def __init__(self, size):
            pass

    module.Missing, module.Needing = Missing, Needing
    assert mistake("own:Missing").startswith("environment.id: cannot make 'own:Missing': ValueError: no such map")
    assert mistake("own:Needing").startswith("environment.kwargs: 'own:Needing' needs arguments: ")
    assert mistake("own:Needing", width=3).startswith(
        "environment.kwargs: 'own:Needing' cannot be made with these arguments: "
    )


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_reset_does_not_overwrite_the_last_observation_of_the_episode_before(vectorization, module):
    with Environments(Environment(id="own:Buffered", vectorization=vectorization), 1, 1) as made:
        made.reset(0)
        before = float(made.observation["observation"][0, 0, 0])
        last = made.step(torch.zeros(1, 1, dtype=torch.int64)).next_observation["observation"]
        assert float(last[0, 0, 0]) == pytest.approx(before + 0.01)
        assert float(made.observation["observation"][0, 0, 0]) == pytest.approx(before + 0.02)


def test_the_first_step_takes_an_allowed_action(module):
    class Strict(Good):
        action_space = gym.spaces.MultiDiscrete([2, 3], start=[1, 1])

        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {"action_mask": np.array([0, 1, 0, 0, 1])}

        def step(self, action):
            assert action.tolist() == [2, 3]
            return *super().step(action)[:4], {"action_mask": np.array([0, 1, 0, 0, 1])}

    module.Strict = Strict
    with Environments(Environment(id="own:Strict"), 1, 2) as made:
        made.try_step()


@pytest.mark.parametrize(("rank", "count"), [("0", 1), ("1", 0)])
def test_a_run_warns_of_actions_without_bounds_on_one_rank(rank, count, module, in_directory, monkeypatch):
    class Unbounded(Good):
        action_space = gym.spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (2,))

    module.Unbounded = Unbounded
    config = read_config(configuration_file("a2c"), ["environment=own:Unbounded"])
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(config)
    messages = [str(warning.message) for warning in caught if warning.category is EvorlWarning]
    assert sum("actions are scaled to these bounds" in message for message in messages) == count


def test_a_command_reports_the_mistake_on_one_line(module, in_directory, capsys):
    assert run_program(run_command, ["train", "a2c", "environment=own:make_turns"]) == 2
    assert WANTED in error_line(capsys)
