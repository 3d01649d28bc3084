"""What a file says of its own environment does not hold for another one."""

import pytest
import yaml
from helpers.support import ROOT, SMALL, config

import evorl
from evorl.commands import train
from evorl.commands.command import run_command
from evorl.commands.train import program_arguments
from evorl.config.schema import Environment, Evaluation, Training
from evorl.config.task import OF_ENVIRONMENT, OF_SHIPPED, OF_SUITE, environment_of, paths_in
from evorl.config.yaml import configuration_file, read_settings, shipped_names
from evorl.runs import launch
from evorl.runs import train as in_python
from evorl.runs.launch import load_config, read_config
from evorl.runs.program import run_program

SAC = configuration_file("sac")
GYMNASIUM = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "Pendulum-v1": None}


def numbers(settings):
    return (settings.training.target_fitness, settings.training.max_steps, settings.evolution.steps)


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("id", GYMNASIUM)
def test_no_number_of_a_shipped_task_survives_in_another_one(name, id):
    own = read_settings(configuration_file(name), [])
    there = {"training.target_fitness", "training.max_steps", "evolution.steps"}
    assert there <= set(paths_in(own)), "each names its task's"
    settings = read_config(configuration_file(name), [f"environment={id}"])
    if environment_of(own) == id:
        assert settings == read_config(configuration_file(name), [])
        assert not settings.origins.left_out
        return
    read = read_settings(configuration_file(name), [f"environment={id}"])
    assert not set(paths_in(read)) & {*OF_SHIPPED, *OF_ENVIRONMENT, *OF_SUITE}
    assert numbers(settings) == (GYMNASIUM[id], 1_000_000, 10_000)
    assert settings.evaluation == Evaluation()
    assert settings.algorithm.reward_clip is None
    assert settings.environment == Environment(id=id, num_envs=settings.environment.num_envs)
    assert "training.target_fitness" in settings.origins.left_out


@pytest.mark.parametrize(
    ("id", "fitness"),
    [("openspiel:leduc_poker", "rating"), ("benchmarks.connect_four:ConnectFour", "rating"), ("CartPole-v1", "return")],
)
def test_another_game_is_rated_too_and_what_is_no_game_is_not(id, fitness):
    file = configuration_file("ppo_connect_four")
    assert read_config(file, [f"environment={id}"]).evolution.fitness == {fitness: 1.0}
    own = read_config(file, [f"environment={id}", "evolution.fitness=info.score"])
    assert own.evolution.fitness == {"info.score": 1.0}


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.endswith(("atari", "ram"))])
def test_other_games_of_a_suite_take_all_but_the_target(name):
    pong = read_config(configuration_file(name), [])
    other = read_config(configuration_file(name), ["environment.id=ALE/Breakout-v5"])
    assert numbers(other) == (None, *numbers(pong)[1:])
    assert (other.environment.kwargs, other.evaluation) == (pong.environment.kwargs, pong.evaluation)
    assert other.algorithm.reward_clip == 1.0
    assert other.origins.of("training.target_fitness") == "ALE/Breakout-v5 has no reward threshold"


@pytest.mark.parametrize(
    "words",
    [["environment=CartPole-v1"], ["environment.id=CartPole-v1"], ["environment={id: CartPole-v1, num_envs: 2}"],
     ["--environment=CartPole-v1"], ["--environment.id=CartPole-v1"]],
)  # fmt: skip
def test_every_way_of_naming_the_environment_is_the_same(words):
    settings = load_config(["--config", str(SAC), *words], SMALL)
    assert numbers(settings) == (475.0, 1_000_000, 10_000)
    assert settings.origins.of("training.target_fitness") == "reward threshold of CartPole-v1"
    assert settings.origins.of("training.max_steps") == "default"


def test_what_is_given_explicitly_wins_in_any_order():
    given = ["training.target_fitness=300", "environment=CartPole-v1", "training.max_steps=7000", "evolution.steps=500"]
    for words in (given, given[::-1], ["environment=CartPole-v1", "training={target_fitness: 300, max_steps: 7000}",
                                       "evolution.steps=500"]):  # fmt: skip
        settings = read_config(SAC, words)
        assert numbers(settings) == (300.0, 7000, 500)
        assert settings.origins.of("training.target_fitness") == "your setting"
        assert not settings.origins.left_out
    assert numbers(read_config(SAC, ["environment=CartPole-v1", "training.target_fitness=null"]))[0] is None


def test_settings_of_the_file_s_environment_do_not_reach_another_one(tmp_path):
    path = tmp_path / "own.yaml"
    ranges = {
        "learning_rate": {"min": 1e-4, "max": 1e-2},
        "environment.kwargs.gravity": {"min": -11, "max": -5, "scale": "linear"},
    }
    data = {
        "environment": {"id": "LunarLander-v3", "num_envs": 3, "kwargs": {"gravity": -9.0},
                        "observation_indices": [0, 1], "image_channels": "last"},
        "evolution": {"steps": 300, "hyperparameters": ranges},
        "training": {"target_fitness": 100, "max_steps": 900}, "evaluation": {"episodes": 4},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(data))
    settings = load_config(["environment=CartPole-v1"], path)
    assert settings.environment == Environment(id="CartPole-v1", num_envs=3)
    assert list(settings.evolution.hyperparameters) == ["learning_rate"]
    assert numbers(settings) == (475.0, 900, 300), "a person's own file says how long the person wants to train"
    assert settings.evaluation.episodes == 4
    line = settings.origins.omissions()
    assert line.startswith("left out of own.yaml, since it is for LunarLander-v3: training.target_fitness 100, ")
    assert "environment.kwargs {'gravity': -9.0}" in line
    assert "evolution.hyperparameters.environment.kwargs.gravity" in line
    varied = read_config(path, ["environment.kwargs.gravity=-7"])
    assert numbers(varied) == (100.0, 900, 300), "the same task, varied"
    del data["environment"]["id"]
    path.write_text(yaml.safe_dump(data))
    assert read_settings(path, ["environment=CartPole-v1"])["training"] == data["training"], "it names no task"


def test_a_threshold_is_none_of_another_fitness():
    words = ["environment=CartPole-v1", "evolution.fitness={return: 1, info.success: 2}"]
    settings = read_config(SAC, words)
    assert settings.training.target_fitness is None
    assert settings.origins.of("training.target_fitness") == "fitness is not the return alone"


def test_a_resumed_run_keeps_what_its_configuration_says(in_directory):
    begun = load_config(["environment=CartPole-v1", "training.max_steps=7000"], SAC)
    (in_directory / "config.yaml").write_text(begun.to_yaml())
    for words in ([], ["environment=CartPole-v1"], ["environment.id=CartPole-v1", "run.resume=auto"]):
        resumed = load_config(words, in_directory / "config.yaml")
        assert resumed.model_copy(update={"run": begun.run}) == begun
        assert resumed.origins.of("training.target_fitness") == "config.yaml"


def test_training_in_python_and_tuning_are_the_same(in_directory, monkeypatch):
    class Asked(Exception):
        pass

    def ask(arguments, callbacks=()):
        raise Asked(load_config(arguments, SMALL))

    monkeypatch.setattr(in_python, "main_of", lambda program: ask)
    for given in ("Acrobot-v1", {"id": "Acrobot-v1"}):
        with pytest.raises(Asked) as asked:
            evorl.train("sac", environment=given)
        assert numbers(asked.value.args[0]) == (-100.0, 1_000_000, 10_000)
    with pytest.raises(Asked) as asked:
        evorl.train({"algorithm": {"name": "sac"}, "environment": {"id": "Pendulum-v1"}}, environment="CartPole-v1")
    assert asked.value.args[0].origins.of("algorithm.name") == "your settings"
    begun = []
    monkeypatch.setattr(train, "train_each", lambda commands, jobs, devices: begun.extend(commands) or {})
    assert run_program(run_command, ["train", "sac", "environment=Acrobot-v1", "--seeds", "5"]) == 0
    ((_, command),) = begun
    _, file, *words = program_arguments(command[command.index("train") + 1 :], None, None)
    assert numbers(read_config(launch.Path(file), words)) == (-100.0, 1_000_000, 10_000)


def test_origins_are_no_part_of_a_configuration():
    assert read_config(SAC, []).with_origins(config().origins) == read_config(SAC, [])
    assert "origins" not in read_config(SAC, []).to_yaml()
    assert Training() == read_config(SMALL, ["training={}"]).training
    assert read_config(ROOT / "configs" / "training" / "sac.yaml", []).origins.of("seed") == "configs/training/sac.yaml"
