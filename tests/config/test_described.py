"""The keys of a configuration, explained from its models."""

import re

import pytest
import yaml
from helpers.support import ROOT, error_line

from evorl.commands.command import run_command
from evorl.config import model_of, override, read_yaml, validate
from evorl.config.algorithms import SETTINGS
from evorl.config.docs import commented, settings_of
from evorl.config.yaml import TRAINING, shipped_names
from evorl.runs.program import run_program


@pytest.mark.parametrize("name", SETTINGS)
def test_each_key_has_a_sentence(name):
    settings = settings_of(model_of(SETTINGS[name]))
    assert [each.path for each in settings if len(each.sentence) < 10 or each.sentence[-1] not in ".:"] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_each_key_has_the_default_that_a_run_would_have(name):
    algorithm = validate({"algorithm": {"name": name}}).algorithm
    for each in settings_of(type(algorithm)):
        value = algorithm.model_dump(mode="json")
        for key in each.path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if each.default and value is not None:
            assert override({}, [f"shown={each.default}"])["shown"] == value, each.path


@pytest.mark.parametrize("name", shipped_names())
def test_a_whole_configuration_reads_as_what_it_shows(name, tmp_path):
    config = validate(read_yaml(TRAINING / f"{name}.yaml"))
    text = commented(config.model_dump(mode="json"), settings_of(model_of(SETTINGS[config.algorithm.name])))
    (tmp_path / "a.yaml").write_text(text)
    assert validate(read_yaml(tmp_path / "a.yaml")) == config
    assert yaml.safe_load(text) == config.model_dump(mode="json"), "for other readers of YAML, too"
    assert max(map(len, text.splitlines())) <= 200
    assert "# Passes over each rollout.\n  epochs:" in text or config.algorithm.name != "ppo"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("population.size", ["population.size: whole number, at least 1 and at most 1000 (default: 4)"]),
        ("run.threads", ["run.threads: whole number, at least 1 and at most 1024; or null (default: null)"]),
        ("replay.prioritised", ["section; or null (default: null)", "replay.prioritised.importance_exponent.end:"]),
        ("evolution.hyperparameters", ["sections by name; or null", "evolution.hyperparameters.NAME.min: number"]),
        ("evolution.hyperparameters.learning_rate", ["evolution.hyperparameters.NAME.min: number"]),
        ("algorithm.exploration", ["algorithm.exploration: section\n    With `noisy`, epsilon is 0"]),
        (
            "algorithm.target",
            ["algorithm.target: polyak or periodic (default: polyak)", "`polyak`: each update moves the target"],
        ),
    ],
)
def test_a_key_is_explained(key, told, capsys):
    run_command(["config", "--explain", key])
    shown = capsys.readouterr().out
    for words in told:
        assert words in shown
    keys = key, key.replace("learning_rate", "NAME")
    assert all(line.startswith((*keys, "    ")) for line in shown.splitlines())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["ppo", "--explain", "learning_rate"],
            ["(default: 0.0003); here: 0.002", "Evolution changes it between 0.0001"],
        ),
        (["ppo", "--explain", "algorithm.gamma"], ["; here: 0.995", "Evolution does not change it here; it could, by"]),
        (
            ["ppo", "evolution=false", "--explain", "learning_rate"],
            ["Evolution does not change it here: it replaces no"],
        ),
        (["ppo", "population.size=1", "--explain", "learning_rate"], ["not change it here: it replaces no agent."]),
        (
            ["ppo", "evolution.mutation.hyperparameters=0", "--explain", "learning_rate"],
            ["Evolution does not change it here: evolution.mutation.hyperparameters is 0."],
        ),
        (["--explain", "bfloat16"], ["network.bf16: true or false"]),
    ],
)
def test_a_key_is_explained_with_its_value_its_range_and_by_a_word_of_its_description(words, told, capsys):
    run_command(["config", *words])
    shown = capsys.readouterr().out
    assert all(text in shown for text in told)


def test_the_command_shows_what_a_command_line_stands_for(capsys):
    run_command(["config", "ppo", "population.size=2", "training.max_steps=7"])
    shown = yaml.safe_load(capsys.readouterr().out)
    data = override(read_yaml(TRAINING / "ppo.yaml"), ["population.size=2", "training.max_steps=7"])
    assert shown == validate(data).model_dump(mode="json")


def test_a_key_that_is_not_there_is_a_mistake(capsys):
    assert run_program(run_command, ["config", "--explain", "algorithm.gama"]) == 2
    assert "there is no key 'algorithm.gama'; did you mean 'algorithm.gamma'?" in error_line(capsys)
    assert run_program(run_command, ["config", "--explain", "evolution.hyperparameters.gama"]) == 2
    assert "there is no key 'evolution.hyperparameters.gama'" in error_line(capsys)
    assert run_program(run_command, ["config", "--explain", "algorithm.clip"]) == 2
    assert "dqn has no algorithm.clip, which is a setting of appo, ppo: evorl config appo --explain" in error_line(
        capsys
    )
    assert run_program(run_command, ["config", "--explain", "name"]) == 2
    assert "--explain: 'name' is one of run.name, algorithm.name, " in error_line(capsys)
    assert run_program(run_command, ["config", "ppo", "algorithm.clip=-1"]) == 2
    assert "algorithm.clip: -1 is out of range" in error_line(capsys)


def test_files_that_the_shipped_configurations_name_exist():
    named = re.compile(r"[\w./-]*\w\.(?:py|yaml|md)\b")
    for path in (ROOT / "configs").rglob("*.yaml"):
        comments = " ".join(line.partition("#")[2] for line in path.read_text().splitlines())
        for name in {*named.findall(comments)} - {"accelerate.yaml", "my.yaml"}:
            assert (ROOT / name).exists() or (path.parent / name).exists(), f"{path.name} names {name}"
