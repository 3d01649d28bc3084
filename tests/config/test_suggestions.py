"""Keys as users of other libraries write them: each error names the key that they mean, with their value."""

import time

import pytest
from helpers.support import config, error_line

from evorl.algorithms import SETTINGS
from evorl.commands.command import run_command
from evorl.config import model_of
from evorl.config.suggestions import ALIASES, ELSEWHERE, keys_of, suggested
from evorl.runs.program import run_program

KNOWN = sorted({key for settings in SETTINGS.values() for key in keys_of(model_of(settings))})


def told(words, capsys):
    assert run_program(run_command, ["train", *words.split()]) == 2
    return error_line(capsys).removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("learning_rate=1e-3", "learning_rate: unknown key; did you mean 'algorithm.learning_rate=1e-3'?"),
        ("Learning_Rate=1e-3", "Learning_Rate: unknown key; did you mean 'algorithm.learning_rate=1e-3'?"),
        ("learning_rat=1e-3", "learning_rat: unknown key; did you mean 'algorithm.learning_rate=1e-3'?"),
        ("training.learning_rate=1", "training.learning_rate: unknown key; did you mean 'algorithm.learning_rate=1'?"),
        ("lr=1e-3", "lr: unknown key; did you mean 'algorithm.learning_rate=1e-3'?"),
        ("env=CartPole-v1", "env: unknown key; did you mean 'environment.id=CartPole-v1'?"),
        ("num_envs=8", "num_envs: unknown key; did you mean 'environment.num_envs=8'?"),
        ("total_timesteps=10_000", "total_timesteps: unknown key; did you mean 'training.max_steps=10_000'?"),
        ("ppo clip_range=0.2", "clip_range: unknown key; did you mean 'algorithm.clip=0.2'?"),
        (
            "max_steps=9",
            "max_steps: unknown key; did you mean 'evaluation.max_steps=9' or 'training.max_steps=9'?",
        ),
        (
            "name=a",
            "name: unknown key; did you mean 'run.name=a', 'algorithm.name=a', 'network.name=a' or "
            "'evolution.selection.name=a'?",
        ),
        ("device=cpu", f"device: unknown key; {ELSEWHERE['device']}"),
        ("populaton.size=3", "populaton: unknown key; did you mean 'population'?"),
        ("PPO", "'PPO' is neither a file nor a shipped configuration; did you mean 'ppo'?"),
        ("algorithm=PPO", "algorithm.name: there is no algorithm 'PPO'; did you mean 'ppo'?"),
        (
            "ppo own.games:Maze",
            "'own.games:Maze' is neither an algorithm nor a file; the environment is environment=own.games:Maze",
        ),
        ("ppo Pong-v5", "'Pong-v5' is neither an algorithm nor a file; the environment is environment=Pong-v5"),
    ],
)
def test_the_key_that_is_meant_is_named_with_the_value(words, message, capsys):
    assert told(words, capsys) == message


@pytest.mark.parametrize(
    ("words", "assignment"),
    [
        ("--learning-rate 1e-3", "algorithm.learning_rate=1e-3"),
        ("ppo --env CartPole-v1 --seed 3", "environment.id=CartPole-v1"),
        ("--env=CartPole-v1", "environment.id=CartPole-v1"),
        ("--algorithm.gamma 0.9", "algorithm.gamma=0.9"),
        ("--total-timesteps --seed 3", "training.max_steps=..."),
    ],
)
def test_options_are_told_as_settings(words, assignment, capsys):
    option = next(word for word in words.split() if word.startswith("--")).partition("=")[0]
    assert told(words, capsys) == f"{option}: settings are written key.path=value; did you mean '{assignment}'?"


def test_an_option_that_stands_for_nothing_is_told_with_the_usage(capsys):
    assert told("--quantum 3", capsys).startswith("unrecognized arguments: --quantum; usage: evorl train")
    assert run_program(run_command, ["evaluate", "runs/a", "--lr", "3"]) == 2
    assert "unrecognized arguments: --lr" in error_line(capsys)


def test_each_alias_is_of_a_key_and_is_none():
    assert set(ALIASES.values()) <= set(KNOWN)
    assert not {key.rpartition(".")[2] for key in KNOWN} & {*ALIASES, *ELSEWHERE}


def test_keys_are_those_of_a_configuration():
    settings = config("replay.prioritised={}").model_dump(mode="json", by_alias=True)
    unset = set()
    for key in keys_of(model_of(SETTINGS["dqn"])):
        found, *parts = settings, *key.split(".")
        for place, part in enumerate(parts):
            if found is None:
                unset.add(".".join(parts[:place]))
                break
            found = found[part]
    assert unset <= {
        "actors",
        "algorithm.categorical",
        "algorithm.noisy",
        "algorithm.quantile",
        "league",
    }


def test_a_key_of_a_file_is_named_without_a_value():
    assert suggested("lr", KNOWN) == "; did you mean 'algorithm.learning_rate'?"


def test_long_keys_take_no_time():
    began = time.perf_counter()
    assert suggested("learning_rate" * 100_000, KNOWN) == ""
    assert time.perf_counter() - began < 2
