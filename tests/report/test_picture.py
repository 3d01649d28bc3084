"""Pictures of runs: every kind is drawn, and what cannot be is said."""

import json

import pytest
from helpers.drawn import CONFIG, LIVES, write_run

from evorl.commands.command import run_command
from evorl.types.outcomes import UserError

pytest.importorskip("matplotlib")


def test_a_run_is_drawn_with_its_mutations_and_its_winner(tmp_path):
    lives = [(*life[:4], "$x^{", *life[5:]) if life[4] == "architecture" else life for life in LIVES]
    path = write_run(tmp_path / "a", {**CONFIG, "environment": {"id": "$\\frac{"}}, lives)
    run_command(["plot", str(path), "--hyperparameter", "learning_rate", "-o", str(tmp_path / "a.svg")])
    picture = (tmp_path / "a.svg").read_text()
    for colour in ("#0072b2", "#98a2ad", "#56b4e9", "#009e73", "#000000"):
        assert colour in picture, "hyperparameters, none, a kind of the user's own, the target, the winner"


def test_several_runs_are_drawn_with_their_mean(tmp_path):
    paths = [str(write_run(tmp_path / str(seed), {**CONFIG, "seed": seed}, gain=5.0 * seed)) for seed in (1, 2, 3)]
    run_command(["plot", *paths, "-o", str(tmp_path / "several.svg")])
    assert "best agent so far" in (tmp_path / "several.svg").read_text()


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch):
    path = str(write_run(tmp_path / "a"))
    with pytest.raises(UserError, match=r"x\.gif: a plot is written as one of \.png, \.svg, \.pdf"):
        run_command(["plot", path, "-o", "x.gif"])
    lineage = tmp_path / "a" / "lineage.jsonl"
    rows = [json.loads(line) for line in lineage.read_text().splitlines()]
    rows[-1]["hyperparameters"]["max_grad_norm"] = 5.0
    lineage.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="have no 'lr'; they have learning_rate, gamma, max_grad_norm"):
        run_command(["plot", path, "--hyperparameter", "lr", "-o", str(tmp_path / "x.png")])
    other = str(write_run(tmp_path / "b"))
    with pytest.raises(UserError, match=r"^--hyperparameter: applies to one run only, but 2 were given$"):
        run_command(["plot", path, other, "--hyperparameter", "gamma", "-o", str(tmp_path / "x.png")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a plot needs matplotlib; install it with `pip install -e '\.\[plot\]'`"):
        run_command(["plot", str(tmp_path / "nothing")])


def test_agents_that_failed_are_cut_off_and_counted(tmp_path):
    def comments(worst):
        lives = [(*life[:-1], worst if place == 0 else life[-1]) for place, life in enumerate(LIVES)]
        run_command(["plot", str(write_run(tmp_path / f"{worst}", lives=lives)), "-o", str(tmp_path / "x.svg")])
        return [line for line in (tmp_path / "x.svg").read_text().splitlines() if "values, down to" in line]

    assert comments(5.0) == []
    assert comments(-3000.0) == [f"    <!-- 1 of {len(LIVES)} values, down to -3000, are below -->"]
