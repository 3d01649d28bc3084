"""The table of docs/design.md that says what each algorithm takes, held against the algorithms."""

import gymnasium as gym
import numpy as np
import pytest
from helpers.kinds import CONVOLUTIONS, OBSERVATIONS
from helpers.support import ROOT, algorithm

from evorl.algorithms import ALGORITHMS
from evorl.config.algorithms import SETTINGS
from evorl.types.outcomes import UserError

BOUNDED = gym.spaces.Box(-1.0, 1.0, (2,))
TRIED = {
    "`Discrete`": {"actions": gym.spaces.Discrete(3), "masked": True},
    "`MultiDiscrete`": {"actions": gym.spaces.MultiDiscrete([3, 2]), "masked": True},
    "`Box` between bounds": {"actions": BOUNDED},
    "other `Box`": {"actions": gym.spaces.Box(-np.inf, np.inf, (2,))},
}
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "design.md").read_text().split("| algorithm |", 1)[1].split("\n\n")[0].splitlines()
]
ROWS = {row[0].strip("`"): dict(zip(TABLE[0], row[1:], strict=True)) for row in TABLE[2:]}


def takes(name, *overrides, **spaces):
    prioritised = ["replay.prioritised={}"] if SETTINGS[name].replayed else []
    try:
        algorithm(f"algorithm={{name: {name}}}", *prioritised, CONVOLUTIONS, *overrides, **spaces)
    except UserError:
        return "no"
    return "yes"


def test_settings_and_registry_agree_on_names():
    assert {name: each.model_fields["name"].default for name, each in SETTINGS.items()} == {
        name: name for name in ALGORITHMS
    }


def test_all_algorithms_are_in_the_table():
    assert list(ROWS) == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_takes_what_the_table_says(name):
    found = {kind: takes(name, **spaces) for kind, spaces in TRIED.items()}
    choice = TRIED["`Discrete`"] if found["`Discrete`"] == "yes" else {"actions": BOUNDED}
    found["LSTM, GRU"] = takes(name, "network.recurrent=gru", **choice)
    assert ROWS[name] == found
    for observations in OBSERVATIONS.values():
        assert takes(name, observations=observations, **choice) == "yes"
