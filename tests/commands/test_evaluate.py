"""`evorl evaluate`, beside what tests/runs/ tries of it."""

import pytest

from evorl.commands import evaluate
from evorl.commands.command import run_command
from evorl.config import Environment
from evorl.envs.vector import for_evaluation
from evorl.types.outcomes import UserError


def test_returns_below_one_are_shown_by_their_digits(trained_run, monkeypatch, capsys):
    result = {"run": "a", "agent": 3, "episodes": 5, "mean": 0.9421, "std": 0.04, "min": -0.5, "max": 12.3456}
    monkeypatch.setattr(evaluate, "evaluate_elite", lambda *_: result | {"episodes_repeat": False})
    run_command(["evaluate", str(trained_run)])
    # ± is the standard error of the mean: 0.04 / sqrt(5).
    told = (
        "agent 3 of a: mean return 0.942 ± 0.0179 over 5 fresh episodes (standard deviation 0.04, min -0.5, max 12.3)\n"
    )
    assert capsys.readouterr().out == told


def test_a_class_of_the_users_is_known_to_what_only_evaluates(in_directory):
    (in_directory / "door_of_mine.py").write_text("import gymnasium as gym\nclass Door(gym.Env):\n    pass\n")
    assert for_evaluation(Environment(id="door_of_mine:Door")).vectorization == "auto"
    with pytest.raises(UserError, match=r"environment\.id: cannot make 'no_such_module:Door': No module named .*; run"):
        for_evaluation(Environment(id="no_such_module:Door"))
    (in_directory / "door_that_needs.py").write_text("import not_installed\n")
    with pytest.raises(UserError, match=r"No module named 'not_installed'(?!; run)"):
        for_evaluation(Environment(id="door_that_needs:Door"))
