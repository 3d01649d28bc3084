"""Opponents by name: in matches, and as the benchmark of a run."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.support import LEAGUE, error_line, lines, own_copy, steps_until, train

from evorl.commands.command import run_command
from evorl.runs.program import run_program
from evorl.runs.storage.directory import is_other_run
from evorl.types.outcomes import EvorlWarning

GAME = (*LEAGUE, "training.max_steps=40")


def match(capsys, opponent, *options):
    capsys.readouterr()
    run_command(["match", "runs/a", opponent, "--games", "40", "--json", *options])
    return json.loads(capsys.readouterr().out)


def test_every_kind_of_opponent_plays_a_match(own_league_run, capsys):
    shutil.copytree(own_league_run, "runs/b")
    agent = json.loads((own_league_run / "elite" / "agent.json").read_text())["id"]
    ids = {name: match(capsys, name)["agents"] for name in ("random", "helpers.games:right_reply")}
    assert ids == {"random": [agent, None], "helpers.games:right_reply": [agent, None]}
    assert match(capsys, "helpers.games:right_reply")["first_seat"] == 0.0, "the right reply wins"
    assert match(capsys, "runs/b")["agents"] == [agent, agent]


def test_an_opponent_that_cannot_play_is_told_in_one_line(own_league_run, capsys):
    Path("empty").mkdir()
    Path("agent.onnx").write_bytes(b"a file")
    for opponent, told in {
        "nobody": "opponent: there is no 'nobody' to play against; name random, package.module:player, or the",
        "x" * 5000: "opponent: there is no 'xxx",
        "empty": "empty: there is no run here",
        "agent.onnx": "opponent: there is no 'agent.onnx' to play against; name random, package.module:player, or the",
        "hf:me/x": "opponent: there is no 'hf:me/x' to play against",
        "nowhere:player": "opponent: cannot import 'nowhere:player'",
        "helpers.games:cheat": "opponent: helpers.games:cheat made the move 0, which is not allowed",
    }.items():
        assert run_program(run_command, ["match", "runs/a", opponent]) == 2
        assert told in error_line(capsys)


AGAINST = (*GAME, "training.max_steps=120", "evaluation.confirmation_episodes=40", "evaluation.episodes=6")


def scores(run):
    return [(row["elite_fitness"], row["fitness"]) for row in lines(run / "metrics.jsonl")]


def test_a_run_that_goes_on_reads_its_benchmark_where_it_lies(
    own_league_run, in_directory, tmp_path, monkeypatch, capsys
):
    """From any directory; it ends as a run that was not stopped if the benchmark has not changed."""
    # Agents are evaluated against it in every generation.
    settings = (*AGAINST, "league.benchmark=runs/a", "evolution.fitness=return", "evaluation.episodes=12")
    runs = in_directory / "runs"
    assert train(*settings, "run.name=whole") == 0
    steps = steps_until(runs / "whole", 2)
    assert len(scores(runs / "whole")) == 3
    assert train(*settings, "run.name=stopped", f"training.max_steps={steps}") == 0
    shutil.copytree(runs / "stopped", runs / "changed")
    capsys.readouterr()
    assert train(*settings, "run.name=stopped", "run.resume=auto") == 0
    assert "another best agent" not in capsys.readouterr().err
    assert scores(runs / "stopped") == scores(runs / "whole")
    elites = [(runs / name / "elite" / "agent.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert elites[0] == elites[1]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_program(run_command, ["evaluate", str(runs / "whole"), "--episodes", "4", "--allow-code"]) == 0
    monkeypatch.chdir(in_directory)
    # A run with another best agent, and then no run.
    shutil.rmtree(own_league_run)
    assert train(*GAME, "run.name=a", "seed=2") == 0
    capsys.readouterr()
    forgotten = []
    monkeypatch.setattr("evorl.runs.agents.elite.Elite.forget", lambda elite: forgotten.append(elite))
    with pytest.warns(EvorlWarning, match=r"^league\.benchmark: runs/a has another best agent than when this run was"):
        assert train(*settings, "run.name=changed", "run.resume=auto") == 0
    assert len(forgotten) == 1, "the elite is measured again"
    own_league_run.rename(runs / "moved")
    monkeypatch.undo()
    monkeypatch.chdir(in_directory)
    for name in ("whole", "new"):
        capsys.readouterr()
        assert train(*settings, f"run.name={name}", "run.resume=auto", "training.max_steps=400") == 2
        # A long path is cut.
        assert f"league.benchmark: there is no '{str(own_league_run)[:40]}" in error_line(capsys)
    assert not (runs / "new").exists(), "a mistake is found before there is a directory"
    moved = "league.benchmark=runs/moved", "training.max_steps=160"
    with pytest.warns(EvorlWarning, match=r"^league\.benchmark: runs/moved has another best agent than"):
        assert train(*settings, "run.name=whole", "run.resume=auto", *moved) == 0
    (runs / "moved").rename(own_league_run)
    monkeypatch.setattr("evorl.commands.branch.start", lambda *arguments: None)
    assert (
        run_program(
            run_command, ["branch", "runs/whole", "branched", "league.benchmark=runs/a", "training.max_steps=200"]
        )
        == 0
    )
    assert train(*settings, "run.name=whole", "run.resume=auto", "league.benchmark=random") == 2
    assert "league.benchmark was" in capsys.readouterr().err
    assert not is_other_run("league.benchmark", "random", "runs/a")


def test_a_run_faces_its_benchmark_in_evaluation(in_directory, capsys):
    assert train(*AGAINST, "run.name=b", "league.benchmark=helpers.games:cheat", "evaluation.episodes=12") == 2
    assert "league.benchmark: helpers.games:cheat made the move 0, which is not allowed" in capsys.readouterr().err


def test_a_benchmark_with_code_of_its_own_must_be_the_users(in_directory, tmp_path, monkeypatch, capsys):
    runs = in_directory / "runs"
    assert train(*GAME, "network={name: module, factory: 'helpers.support:probe_network'}", "run.name=strange") == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert train(*GAME, "run.name=a") == 0
    capsys.readouterr()
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/strange") == 2
    assert "names custom code to execute" in error_line(capsys)
    assert run_program(run_command, ["match", "runs/a", "runs/strange"]) == 2
    assert run_program(run_command, ["match", "runs/a", "runs/strange", "--allow-code", "--games", "4"]) == 0
    own_copy(runs / "strange", runs / "own")
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/own") == 0
    more = "league.benchmark=runs/own", "training.max_steps=160", "run.resume=auto"
    assert train(*AGAINST, *more, "run.name=b") == 0
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "4"]) == 0


@pytest.mark.two_process
def test_two_ranks_face_the_same_benchmark(own_league_run, in_directory, forked_launch):
    settings = (*AGAINST, "population.size=4", "league.benchmark=runs/a")
    for name in ("b", "c"):
        forked_launch.well(in_directory, f"run.name={name}", *settings)
    assert scores(in_directory / "runs" / "b") == scores(in_directory / "runs" / "c")
    assert not any(row["drifts"] for row in lines(in_directory / "runs" / "b" / "metrics.jsonl"))
