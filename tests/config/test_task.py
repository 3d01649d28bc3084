"""A file, then overrides; a shipped file of another task gives its algorithm's settings alone."""

from contextlib import nullcontext

import pytest
import yaml
from helpers.support import SMALL

import evorl
from evorl.config.run import Environment, Evaluation
from evorl.config.task import environment_of
from evorl.config.yaml import configuration_file, read_settings, shipped_names, source
from evorl.runs import train as in_python
from evorl.runs.configuration import read_config
from evorl.runs.launch import load_config
from evorl.types.outcomes import EvorlWarning

SAC = configuration_file("sac")
GYMNASIUM = {"CartPole-v1": 475.0, "Pendulum-v1": None}


def numbers(settings):
    return (settings.training.target_fitness, settings.training.max_steps, settings.evolution.steps)


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("id", GYMNASIUM)
def test_a_shipped_file_of_another_task_gives_its_algorithms_settings_alone(name, id):
    file, words = configuration_file(name), [f"environment={id}"]
    own, read = read_settings(file, []), read_settings(file, words)
    assert {"target_fitness", "max_steps"} <= own["training"].keys(), "each file names its task's"
    assert "steps" in own["evolution"]
    settings = read_config(file, words)
    if environment_of(own) == id:
        assert settings == read_config(file, [])
        assert source(file, words) == f"configs/training/{name}.yaml"
        return
    for section in ("algorithm", "network", "replay", "population"):
        assert read.get(section) == own.get(section)
    assert numbers(settings) == (GYMNASIUM[id], 1_000_000, 10_000)
    assert settings.evaluation == Evaluation()
    assert settings.evolution.fitness == {"return": 1.0}
    assert settings.environment == Environment(id=id, num_envs=settings.environment.num_envs)
    assert source(file, words).startswith(f"configs/training/{name}.yaml, without the target, lengths and ")


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.endswith(("atari", "ram"))])
def test_other_games_of_a_suite_take_all_but_the_target(name):
    file, words = configuration_file(name), ["environment.id=ALE/Asterix-v5"]
    pong, other = read_config(file, []), read_config(file, words)
    assert numbers(other) == (None, *numbers(pong)[1:])
    assert (other.environment.kwargs, other.evaluation) == (pong.environment.kwargs, pong.evaluation)
    assert source(file, words) == f"configs/training/{name}.yaml, without the target of ALE/Pong-v5"


@pytest.mark.parametrize(
    "words",
    [["environment=CartPole-v1"], ["environment={id: CartPole-v1, num_envs: 2}"], ["--environment.id=CartPole-v1"]],
)
def test_every_way_of_naming_the_environment_is_the_same(words, capsys):
    assert numbers(load_config(["--config", str(SAC), *words], SMALL)) == (475.0, 1_000_000, 10_000)
    assert capsys.readouterr().err.splitlines()[0] == (
        "settings: configs/training/sac.yaml, without the target, lengths and environment settings of Pendulum-v1"
    )


def test_what_is_given_explicitly_wins_in_any_order():
    given = ["training.target_fitness=300", "environment=CartPole-v1", "training.max_steps=7000", "evolution.steps=500"]
    sections = ["environment=CartPole-v1", "training={target_fitness: 300, max_steps: 7000}", "evolution.steps=500"]
    for words in (given, given[::-1], sections):
        assert numbers(read_config(SAC, words)) == (300.0, 7000, 500)
    assert numbers(read_config(SAC, ["environment=CartPole-v1", "training.target_fitness=null"]))[0] is None


def test_a_file_of_ones_own_is_taken_as_it_is_written(tmp_path):
    path = tmp_path / "own.yaml"
    data = {
        "environment": {"id": "LunarLander-v3", "num_envs": 3, "kwargs": {"gravity": -9.0}},
        "evolution": {"steps": 300}, "training": {"target_fitness": 100, "max_steps": 900},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(data))
    by_override = read_settings(path, ["environment.id=CartPole-v1"])
    data["environment"]["id"] = "CartPole-v1"
    assert by_override == data, "the same as editing the file"
    assert source(path, ["environment.id=CartPole-v1"]) == "own.yaml, as written"


@pytest.mark.parametrize("name", ["a3c_atari", "a3c_atari.yaml"])
def test_another_algorithm_keeps_the_task_and_the_network_of_a_file(name):
    file, words = configuration_file(name, ["algorithm=impala"]), ["algorithm=impala", "algorithm.gamma=0.9"]
    assert source(file, words) == (
        "configs/training/a3c_atari.yaml, without the algorithm, replay, actors and ranges of a3c"
    )
    own, other = read_settings(file, []), read_settings(file, words)
    assert other.pop("algorithm") == {"name": "impala", "gamma": 0.9}
    del own["algorithm"], own["actors"], own["evolution"]["hyperparameters"]
    assert other == own
    assert read_config(file, words).training.target_fitness == 20, "the environment is the same"
    both = source(file, ["algorithm=impala", "environment=CartPole-v1"])
    assert both.endswith(" of a3c and the target, lengths and environment settings of ALE/Pong-v5")


def test_a_file_that_names_no_algorithm_keeps_what_is_for_any(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algorithm: {gamma: 0.9}\nactors: {count: 3}\n")
    settings = read_settings(path, ["algorithm=a3c"])
    assert (settings["algorithm"], settings["actors"]) == ({"name": "a3c", "gamma": 0.9}, {"count": 3})


def test_a_target_far_above_the_threshold_of_the_environment_is_doubted(tmp_path):
    """A shipped file was copied, and only its environment was changed."""
    path = tmp_path / "own.yaml"
    line = "training.target_fitness: 210, but Acrobot-v1 counts as solved at -100; .*=-100, or null"
    for id, warns in (("Acrobot-v1", pytest.warns(EvorlWarning, match=line)), ("LunarLander-v3", nullcontext())):
        path.write_text(yaml.safe_dump({**read_settings(configuration_file("ppo"), []), "environment": {"id": id}}))
        with warns:
            load_config(["--config", str(path)], SMALL)


def test_the_target_is_that_of_the_environment_whose_returns_are_fitness():
    words = ["environment=CartPole-v0", "evaluation.environment=CartPole-v1", "evaluation.environment.kwargs={}"]
    assert read_config(SAC, words).training.target_fitness == 475


def test_a_threshold_is_none_of_another_fitness():
    words = ["environment=CartPole-v1", "evolution.fitness={return: 1, info.success: 2}"]
    assert read_config(SAC, words).training.target_fitness is None


def test_a_resumed_run_keeps_what_its_configuration_says(in_directory):
    begun = read_config(SAC, ["environment=CartPole-v1", "training.max_steps=7000"])
    (in_directory / "config.yaml").write_text(begun.to_yaml())
    for words in ([], ["environment.id=CartPole-v1", "run.resume=auto"]):
        resumed = read_config(in_directory / "config.yaml", words)
        assert resumed.model_copy(update={"run": begun.run}) == begun


def test_training_in_python_takes_the_settings_of_the_task(in_directory, monkeypatch):
    class Asked(Exception):
        pass

    def ask(arguments, callbacks=()):
        raise Asked(load_config(arguments, SMALL))

    monkeypatch.setattr(in_python, "main_of", lambda program: ask)
    for given in ("Acrobot-v1", {"id": "Acrobot-v1"}):
        with pytest.raises(Asked) as asked:
            evorl.train("dqn", environment=given)
        assert numbers(asked.value.args[0]) == (-100.0, 1_000_000, 10_000)
