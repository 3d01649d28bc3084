"""Sections of the configuration as objects of `evorl`: typed, complete, and only what they were given counts."""

import inspect
import re
import typing
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from helpers.support import SMALL, probe_network

import evorl
from evorl.config import validate
from evorl.config.algorithms import SETTINGS
from evorl.config.errors import section_in
from evorl.config.fields import AlgorithmSettings
from evorl.config.schema import Config
from evorl.config.yaml import configuration_file, read_settings
from evorl.runs import train
from evorl.types.outcomes import UserError


def sections(model):
    """All section classes that a model's fields have, at any depth."""
    for field in model.model_fields.values():
        if inner := section_in(field.annotation):
            yield from [inner, *sections(inner)]


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """The configuration with which `evorl.train` would train, given its arguments."""
    seen = []

    def main(arguments, callbacks):
        _, path, *given = arguments
        seen.append(validate(read_settings(train.Path(path), given)))
        return SimpleNamespace(path=tmp_path, summary={})

    monkeypatch.setattr(train, "main_of", lambda program: main)

    def call(*arguments, **keywords):
        evorl.train(*arguments, **keywords)
        return seen[-1]

    return call


def test_each_section_is_offered():
    everything = {*SETTINGS.values(), *sections(Config[AlgorithmSettings])}
    everything |= {inner for each in SETTINGS.values() for inner in sections(each)}
    missing = {each.__name__ for each in everything if getattr(evorl, each.__name__, None) is not each}
    assert missing == {AlgorithmSettings.__name__}


def test_each_section_of_a_configuration_is_a_typed_parameter():
    hints = typing.get_type_hints(evorl.train)
    for name, field in Config.model_fields.items():
        (model,) = {section_in(field.annotation)} if name != "algorithm" else {AlgorithmSettings}
        assert (model or int) in typing.get_args(hints[name]), name
        assert inspect.signature(evorl.train).parameters[name].default is None
    assert typing.get_type_hints(evorl.PPOSettings)["epochs"] is int
    assert {"learning_rate", "clip", "name"} <= {*inspect.signature(evorl.PPOSettings).parameters}


def test_only_what_was_given_changes_the_file(configured):
    sections = {
        "algorithm": evorl.DQNSettings(learning_rate=2e-3, exploration=evorl.EpsilonGreedy(start=0.5)),
        "environment": evorl.Environment(num_envs=3),
        "evolution": evorl.Evolution(steps=60, selection=evorl.Selection(), mutation=evorl.Mutation(none=1.0)),
        "training": evorl.Training(max_steps=60),
    }
    as_keys = {"algorithm.learning_rate": 2e-3, "algorithm.exploration.start": 0.5, "environment.num_envs": 3,
               "evolution.steps": 60, "evolution.mutation.none": 1.0, "training.max_steps": 60}  # fmt: skip
    assert configured(SMALL, **sections) == configured(SMALL, **as_keys)
    found = configured(SMALL, **sections, **{"environment.num_envs": 5})
    assert (found.algorithm.batch_size, found.algorithm.exploration.end) == (8, 0.1), "the file's"
    assert found.environment.num_envs == 5, "a single key comes last"
    nothing = {"evolution": evorl.Evolution(mutation=evorl.Mutation()), "environment": evorl.Environment()}
    assert configured(SMALL, **nothing, training=evorl.Training()) == configured(SMALL)
    assert configured(SMALL, training={}, environment={}) == configured(SMALL)
    changed = {"evolution": {"mutation": {"none": 0.7}}, "algorithm": {"exploration": {"end": 0.3}}}
    nothing = {"evolution": {"mutation": {}}, "algorithm": {"exploration": evorl.EpsilonGreedy()}}
    file = read_settings(SMALL, train.assignments(changed))
    assert configured(file, **nothing) == configured(file)
    kept = configured(file, evolution={"hyperparameters": {}}, replay={"prioritised": {}})
    assert kept.evolution.hyperparameters == {}, "a setting that is a mapping"
    assert kept.replay.prioritised == evorl.Prioritised(), "null before"
    inner = evorl.Prioritised(importance_exponent=evorl.ImportanceExponent())
    assert configured(file, replay=evorl.Replay(prioritised=inner)).replay.prioritised == evorl.Prioritised()


def test_an_algorithm_s_section_names_the_algorithm(configured):
    found = configured(algorithm=evorl.A2CSettings(gamma=0.9), environment="CartPole-v1")
    assert (found.algorithm.name, found.algorithm.gamma) == ("a2c", 0.9)
    shipped = read_settings(configuration_file("a2c"), [])["algorithm"]["learning_rate"]
    assert found.algorithm.learning_rate == shipped != evorl.A2CSettings().learning_rate
    assert configured("dqn", algorithm=evorl.SACSettings()) == configured("sac")
    # Settings that are shipped for a task are found, too.
    found = configured("sac", environment=evorl.Environment(id="Hopper-v5"))
    assert found == configured("sac", environment="Hopper-v5") != configured("sac.yaml", environment="Hopper-v5")


def test_sections_name_a_class_or_function_that_they_are_given(configured):
    network = evorl.Network(name="module", factory=probe_network)
    found = configured(SMALL, environment=evorl.Environment(id=CartPoleEnv), network=network)
    assert found.environment.id == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    assert found.network.factory == "helpers.support:probe_network"
    with pytest.raises(UserError, match=r"^id: <class .* is not defined at the top level"):
        evorl.Environment(id=type("Inner", (CartPoleEnv,), {}))


KWARGS = (
    {"x": np.inf, "y": [-np.inf, {"z": np.float32(np.inf)}]},
    {"m": {"a.b": 1, "n": {"a=b": 1}, "": 1, "x y": "1e-3", "é": None}},
)


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("in_config", [False, True])
def test_keyword_arguments_of_the_environment_are_kept(configured, kwargs, in_config):
    environment = {"id": "CartPole-v1", "kwargs": kwargs}
    settings = configured({"environment": environment}) if in_config else configured(environment=environment)
    assert settings.environment.kwargs == kwargs
    settings = configured(evaluation={"environment": {"kwargs": kwargs}})
    assert settings.evaluation_environment.kwargs == kwargs
    nan = configured(environment={"kwargs": {"x": np.nan}}).environment.kwargs["x"]
    assert isinstance(nan, float), "it differs from itself"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: evorl.PPOSettings(gama=0.9), "PPOSettings: gama: unknown key; did you mean 'gamma'?"),
        (lambda: evorl.Evolution(selection={"sise": 3}), "Evolution: selection.sise: unknown key; did you mean"),
        (lambda: evorl.Evolution(burn_in="late"), "burn_in: 'late' does not fit: it must be a whole number, or 'auto'"),
        (lambda: evorl.train(training=evorl.Network(bf16=True)), "training.bf16: unknown key; did you mean 'network"),
        (lambda: evorl.train("ppo", algorithm=evorl.PPOSettings(name="a2c", clip=0.1)), "algorithm.clip: unknown key"),
        (lambda: evorl.train(["ppo"]), "config: ['ppo'] is not a configuration; give a name such as 'ppo', a file or"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_key(mistake, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        mistake()
    assert "\n" not in str(error.value)


def test_a_run_trains_with_sections(in_directory):
    short = evorl.Training(max_steps=40)
    run = evorl.train(
        SMALL, training=short, run=evorl.RunSettings(name="a"), population=evorl.PopulationSettings(size=2)
    )
    config = run.load().config
    assert (run.path.name, config.population.size, config.algorithm.batch_size) == ("a", 2, 8)


def test_fitness_of_python_replaces_terms_of_a_file(configured):
    """Terms of a file or of another section would otherwise be added to it."""
    fitness = evorl.Evolution(fitness="info.success")
    for before in ({"return": 1.0}, "rating"):
        file = {"algorithm": "dqn", "evolution": {"fitness": before}}
        assert configured(file, evolution=fitness).evolution.fitness == {"info.success": 1.0}


def test_a_class_has_its_own_keyword_arguments_alone(configured):
    file = {"environment": {"id": "LunarLander-v3", "kwargs": {"gravity": -5.0}}}
    own = {"id": CartPoleEnv, "kwargs": {"sutton_barto_reward": True}}
    assert configured(file, environment=own).environment.kwargs == {"sutton_barto_reward": True}
