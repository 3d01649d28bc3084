"""`evorl check` of simulators of tensors: mistakes are named where they show."""

import re

import pytest

from evorl.commands.command import run_command
from evorl.runs.program import run_program

CARTPOLE = "tensor:helpers.torch_cartpole:make"


def checked(capsys, *words, code=0):
    assert run_program(run_command, ["check", CARTPOLE, *words, "--steps", "60"]) == code
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[1]: " ".join(line.split()) for line in lines}


def test_a_good_simulator_passes(capsys):
    rows = checked(capsys)
    assert rows["spaces"].endswith("Discrete(2); for a2c, dqn, ppo, sac")
    assert rows["resets"].startswith("pass resets true last observations in all")
    assert rows["determinism"].startswith("pass determinism episodes are the same from one seed")
    assert rows["device"].startswith("pass device tensors on cpu: observation float32, reward float32, terminated bool")
    assert rows["resuming"].startswith("warn resuming running episodes cannot be saved")
    assert re.search(r"steps/s with 64 copies \(a simulator\)", rows["speed"])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ("final=", "warn resets no last observations in"),
        ("fake=true", "fail resets in [0-9]+ of [0-9]+ ends of episodes the last observation is the next one's first"),
        ("alike=true", "warn determinism all copies begin alike"),
        ("unseeded=true", "warn determinism episodes from one seed differ"),
    ],
)
def test_mistakes(capsys, kwargs, words):
    rows = checked(capsys, kwargs, code=int(words.startswith("fail")))
    assert re.match(words, rows[words.split()[1]])


def test_a_simulator_that_does_not_say_when_it_resets_is_told_how(capsys):
    rows = checked(capsys, "mode=null", code=1)
    assert "does not say when it resets; declare it where the environment is made" in rows["interface"]
