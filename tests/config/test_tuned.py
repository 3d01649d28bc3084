"""An algorithm's name with a task takes the shipped settings for that task, and says so."""

import pytest
from helpers.support import needs_extra_of

from evorl.commands.command import file_and_assignments, run_command
from evorl.config import override, validate
from evorl.config.task import environment_of
from evorl.config.yaml import TRAINING, configuration_file, read_settings, read_yaml, shipped_names, tuned_files
from evorl.runs.program import run_program

ENTRIES = [(name, task) for name, tuned in tuned_files().items() for task in tuned.tasks]


@pytest.mark.parametrize(("name", "task"), ENTRIES)
def test_each_entry_of_the_table_leads_to_its_file(name, task):
    tuned = tuned_files()[name]
    data = read_yaml(TRAINING / f"{name}.yaml")
    assert data["algorithm"]["name"] == tuned.algorithm, "the table says what the file is of"
    assert tuned.settings_for(environment_of(data)) is not None, "a file is for its own task"
    id = task.replace("*", "Some-v1")
    assert configuration_file(tuned.algorithm, [f"environment={id}"]) == TRAINING / f"{name}.yaml"
    settings = read_settings(TRAINING / f"{name}.yaml", [f"environment={id}"])
    added = {f"{section}.{key}" for section, values in settings.items() if isinstance(values, dict) for key in values}
    assert set(tuned.tasks[task]) <= added
    validate(settings)


@pytest.mark.parametrize("name", ["ppo", "sac", "td3"])
def test_a_robot_keeps_the_lengths_but_not_the_target(name):
    needs_extra_of("Hopper-v5")
    own, hopper = (read_settings(configuration_file(name, words), words) for words in
                   (["environment=HalfCheetah-v5"], ["environment.id=Hopper-v5"]))  # fmt: skip
    assert own["training"].pop("target_fitness") == 4800
    others = {"environment.id": "Hopper-v5"}  # What configs/tasks.yaml sets for PPO on the robots that fall.
    if name == "ppo":
        others |= {"environment.num_envs": 4, "algorithm.rollout_steps": 512}
        others |= {"algorithm.value_coefficient": 0.5, "algorithm.initial_log_std": 0}
    assert override(own, [f"{key}={value}" for key, value in others.items()]) == hopper


@pytest.mark.parametrize(
    "words",
    [["ppo", "environment=Hopper-v5"], ["environment.id=Hopper-v5", "algorithm=ppo"],
     ["dqn", "algorithm.name=ppo", "environment={id: Hopper-v5, num_envs: 1}"]],
)  # fmt: skip
def test_an_algorithm_and_a_task_take_the_file_for_both(words):
    file, given = file_and_assignments(words)
    assert (file.name, set(given)) == ("ppo_mujoco.yaml", {word for word in words if "=" in word})


@pytest.mark.parametrize(
    ("words", "name"),
    [(["ppo.yaml", "environment=Hopper-v5"], "ppo.yaml"), (["ppo", "environment=CartPole-v1"], "ppo.yaml"),
     (["ppo"], "ppo.yaml"), (["ppo_mujoco", "environment=Hopper-v5"], "ppo_mujoco.yaml"),
     (["dqn", "environment=Hopper-v5"], "dqn.yaml"), ([str(TRAINING / "sac.yaml"), "environment=Ant-v5"], "sac.yaml")],
)  # fmt: skip
def test_what_is_named_exactly_is_taken(words, name):
    assert file_and_assignments(words)[0] == TRAINING / name


def test_a_file_of_the_user_s_own_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configuration_file("mine.yaml").name == "mine.yaml", "for the error that it is missing"
    assert configuration_file("ppo.yaml") == TRAINING / "ppo.yaml"
    (tmp_path / "ppo.yaml").write_text("{}")
    assert configuration_file("ppo.yaml", ["environment=Hopper-v5"]).absolute() == tmp_path / "ppo.yaml"


def test_the_user_s_settings_win_over_those_of_the_task():
    words = ["environment=ALE/Breakout-v5", "environment.life_loss_ends=false", "training.max_steps=7"]
    settings = read_settings(configuration_file("dqn", words), words)
    assert (settings["environment"]["life_loss_ends"], settings["training"]["max_steps"]) == (False, 7)
    words[1:] = []
    assert read_settings(configuration_file("dqn", words), words)["environment"]["life_loss_ends"] is True
    assert "life_loss_ends" not in read_settings(configuration_file("dqn"), ["environment=ALE/Pong-v5"])["environment"]


def test_the_tasks_are_listed_with_commands_that_take_their_files(capsys):
    assert run_program(run_command, ["config", "--tasks"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["task", "algorithm", "file", "command"]
    assert {line.split()[2] for line in lines} == {f"{name}.yaml" for name in shipped_names()}
    poker = {"openspiel:kuhn_poker", "openspiel:leduc_poker"}
    assert {line.split()[0] for line in lines if "poker" in line} == poker, "names that can be made"
    for task, algorithm, file, *command in map(str.split, lines):
        words = [word.replace("*", "Some-v1") for word in command[2:]]
        assert command[:2] == ["evorl", "train"]
        assert file_and_assignments(words)[0] == TRAINING / file
        settings = read_settings(TRAINING / file, words[1:])
        assert settings["algorithm"]["name"] == algorithm
        assert environment_of(settings) == task.replace("*", "Some-v1")
