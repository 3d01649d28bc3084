"""Opponents by name: in matches, and as the benchmark of a run, which keeps a copy of it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.support import error_line, lines, own_copy, steps_until, train, train_below

from evorl.commands.command import run_command
from evorl.commands.train import retrain_command
from evorl.envs.games import Asked, RandomPlayers, is_allowed, make_game
from evorl.export.hub import write_page
from evorl.league.exported import ExportedPlayers
from evorl.runs.directory import BENCHMARK_COPY
from evorl.runs.launch import read_config
from evorl.runs.loaded import load
from evorl.runs.opponents import Task, agent_opponent, opponent_of
from evorl.runs.program import run_program
from evorl.types import UserError

GAME = (
    "environment.id=helpers.games:ThreeMoves",
    "algorithm.name=a2c",
    "evolution.fitness=rating",
    "population.size=3",
    "training.max_steps=40",
)
FOUR = (
    "environment.id=pettingzoo:connect_four_v3",
    "algorithm={name: ppo, rollout_steps: 16, batch_size: 32}",
    "network.convolutions=[{channels: 4, kernel: 4, stride: 1}]",
    "training.max_steps=320",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has ended, to be copied and not to be changed."""
    return train_below(tmp_path_factory.mktemp("ended"), *GAME, "seed=1")


@pytest.fixture
def a(ended, in_directory):
    """The user's own run, in `runs/a` of the working directory."""
    return own_copy(ended, in_directory / "runs" / "a")


def match(capsys, opponent, *options):
    capsys.readouterr()
    run_command(["match", "runs/a", opponent, "--games", "40", "--json", *options])
    return json.loads(capsys.readouterr().out)


def test_every_kind_of_opponent_plays_a_match(a, capsys):
    pytest.importorskip("onnxruntime")
    run_command(["export", "runs/a"])
    shutil.copytree(a, "runs/b")
    Path("exported").mkdir()
    shutil.copy(a / "agent.onnx", "exported")
    agent = json.loads((a / "elite" / "agent.json").read_text())["id"]
    ids = {name: match(capsys, name)["agents"] for name in ("random", "helpers.games:right_reply")}
    assert ids == {"random": [agent, None], "helpers.games:right_reply": [agent, None]}
    assert match(capsys, "helpers.games:right_reply")["first_seat"] == 0.0, "the right reply wins"
    # A run with an exported agent in it is a run, whose agent samples.
    for name in ("runs/b", "runs/a/agent.onnx", "exported"):
        assert match(capsys, name)["agents"] == [agent, agent]
    assert match(capsys, "exported") == match(capsys, "runs/a/agent.onnx") | {"opponent": "exported"}


def test_an_opponent_that_cannot_play_is_told_in_one_line(a, capsys):
    Path("empty").mkdir()
    Path("bad.onnx").write_bytes(b"no file of ONNX")
    for opponent, told in {
        "nobody": "opponent: there is no 'nobody' to play against; name random, package.module:player, the directory",
        "x" * 5000: "opponent: there is no 'xxx",
        "empty": "empty: there is no run here",
        "no.onnx": "no.onnx: No such file or directory",
        "bad.onnx": "bad.onnx: onnxruntime cannot read the file: ",
        "nowhere:player": "opponent: cannot import 'nowhere:player'",
        "helpers.games:cheat": "opponent: helpers.games:cheat made the move 0, which is not allowed",
    }.items():
        assert run_program(run_command, ["match", "runs/a", opponent]) == 2
        assert told in error_line(capsys)


def test_an_exported_agent_of_another_game_is_refused(a, capsys):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert train(*GAME, "run.name=b", "environment.id=helpers.games:RockPaperScissors") == 0
    run_command(["export", "runs/b"])
    loaded = load("runs/a", allow_code=True)
    task = Task(loaded.config.environment, loaded.algorithm.interface)
    with pytest.raises(UserError, match=r"was exported from helpers\.games:RockPaperScissors, but the game is helpers"):
        opponent_of("runs/b/agent.onnx", "opponent", task)
    file = onnx.load("runs/b/agent.onnx")
    del file.metadata_props[:]
    onnx.save(file, "plain.onnx")
    with pytest.raises(UserError, match=r"plain\.onnx: takes no action_mask, and not every move of helpers"):
        opponent_of("plain.onnx", "opponent", task)
    without = Task(task.settings, replace(task.interface, masked=False))
    with pytest.raises(UserError, match=r"plain\.onnx: its observations are not those of helpers"):
        opponent_of("plain.onnx", "opponent", without)


@pytest.mark.parametrize("kind", ["ppo", "recurrent"])
def test_an_exported_agent_plays_the_moves_of_its_own_greedy_policy(kind, in_directory, capsys):
    """Over whole games from both seats, with columns that are full."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("pettingzoo")
    more = ("network.recurrent=gru",) if kind == "recurrent" else ()
    assert train(*FOUR, *more, "run.name=four", "population.size=2", "evolution.fitness=rating") == 0
    run_command(["export", "runs/four"])
    loaded = load("runs/four")
    task = Task(loaded.config.environment, loaded.algorithm.interface)
    greedy = agent_opponent(loaded, "itself", deterministic=True).seat(1)
    exported = opponent_of("runs/four/agent.onnx", "opponent", task).seat(1)
    assert isinstance(exported, ExportedPlayers)
    other = RandomPlayers(loaded.action_space, np.random.default_rng(3))
    game, forbidden, moves = make_game(task.settings), 0, []
    for number in range(30):
        game.reset(number)
        first = True
        while game.acting:
            (seat,) = game.acting
            turn = game.seen[seat]
            asked = Asked(turn.observation[None], turn.mask[None], np.zeros(1, np.intp), np.array([first]))
            move = other(asked)[0]
            if seat == number % 2:
                move, first = exported(asked)[0], False
                assert move == greedy(asked)[0]
                moves.append(int(move))
                forbidden += not turn.mask.all()
            game.step({seat: int(move)})
    assert forbidden > 10
    assert len(set(moves)) > 1, "an agent that always plays alike would show nothing"


def test_a_forbidden_move_of_an_exported_agent_is_not_played(a):
    pytest.importorskip("onnxruntime")
    run_command(["export", "runs/a"])
    loaded = load("runs/a", allow_code=True)
    task = Task(loaded.config.environment, loaded.algorithm.interface)
    players = opponent_of("runs/a/agent.onnx", "opponent", task).seat(2)
    players._agent.act = lambda observation, mask, state: (np.array([1]), state)
    seen = np.zeros((1, 4), np.float32)
    with pytest.raises(UserError, match=r"agent\.onnx: made the move 1, which is not allowed"):
        players(Asked(seen, np.array([[True, False, True]]), np.zeros(1, np.intp), np.ones(1, bool)))


def test_moves_of_several_choices_are_held_against_the_mask_of_each():
    import gymnasium as gym

    space = gym.spaces.MultiDiscrete([2, 3], start=[0, 4])
    mask = np.array([True, True, False, True, True])
    assert is_allowed(np.array([1, 5]), mask, space)
    assert not is_allowed(np.array([1, 4]), mask, space)
    assert not is_allowed(np.array([1, 3]), mask, space)


AGAINST = (*GAME, "training.max_steps=120", "evaluation.confirmation_episodes=40", "evaluation.episodes=6")


def scores(run):
    return [(row["elite_fitness"], row["fitness"]) for row in lines(run / "metrics.jsonl")]


@pytest.mark.parametrize("kind", ["run", "file"])
def test_a_benchmark_stays_as_it_was_when_the_run_began(kind, a, in_directory, capsys):
    """A run that was stopped ends as one that was not, whatever has become of its benchmark."""
    benchmark = "runs/a"
    if kind == "file":
        pytest.importorskip("onnxruntime")
        run_command(["export", "runs/a", "--output", "a.onnx"])
        benchmark = "a.onnx"
    # Agents are evaluated against it in every generation.
    settings = (*AGAINST, f"league.benchmark={benchmark}", "evolution.fitness=return", "evaluation.episodes=12")
    runs = in_directory / "runs"
    assert train(*settings, "run.name=whole") == 0
    capsys.readouterr()
    steps = steps_until(runs / "whole", 2)
    assert train(*settings, "run.name=stopped", f"training.max_steps={steps}") == 0
    run_command(["evaluate", "runs/whole", "--json", "--episodes", "40"])
    before = json.loads(capsys.readouterr().out)
    # Now it is trained on, and then gone.
    if kind == "run":
        assert train(*GAME, "run.name=a", "seed=1", "training.max_steps=200", "run.resume=auto") == 0
        shutil.rmtree(a)
    else:
        Path("a.onnx").unlink()
    assert train(*settings, "run.name=stopped", "run.resume=auto") == 0
    assert scores(runs / "stopped") == scores(runs / "whole")
    elites = [(runs / name / "elite" / "agent.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert elites[0] == elites[1]
    capsys.readouterr()
    run_command(["evaluate", "runs/whole", "--json", "--episodes", "40"])
    assert json.loads(capsys.readouterr().out) == before
    assert train(*settings, "run.name=new") == 2
    assert {"run": "there is no 'runs/a'", "file": "a.onnx: No such file"}[kind] in error_line(capsys)
    assert not (runs / "new").exists(), "a mistake is found before there is a directory"


def test_a_run_faces_its_benchmark_in_evaluation(in_directory, capsys):
    assert train(*AGAINST, "run.name=b", "league.benchmark=helpers.games:cheat", "evaluation.episodes=12") == 2
    assert "league.benchmark: helpers.games:cheat made the move 0, which is not allowed" in capsys.readouterr().err


def test_the_score_is_against_the_runs_agent(a, in_directory, capsys):
    """Not against random moves: seats alternate, and the same agent gets about as much as it gives."""
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/a") == 0
    capsys.readouterr()
    results = {}
    for benchmark in ("runs/a", "random"):
        path = in_directory / "runs" / "b" / "config.yaml"
        path.write_text(re.sub(r"benchmark: .*", f"benchmark: {benchmark}", path.read_text()))
        run_command(["evaluate", "runs/b", "--json", "--episodes", "200"])
        results[benchmark] = json.loads(capsys.readouterr().out)["returns"]
    assert results["runs/a"] != results["random"]


def test_a_page_of_the_run_is_evaluated_against_the_same_opponent(a, in_directory, monkeypatch, capsys):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/a", "tracking.exclude=[run.origin]") == 0
    page = in_directory / "page"
    page.mkdir()
    write_page(in_directory / "runs" / "b", page, "me/b", None)
    assert "origin" not in (page / "benchmark" / "config.yaml").read_text(), "what the run keeps its copy keeps"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(page))
    capsys.readouterr()
    returns = []
    for run in ("runs/b", "hf:me/b"):
        run_command(["evaluate", run, "--json", "--episodes", "40", "--allow-code"])
        returns.append(json.loads(capsys.readouterr().out)["returns"])
        shutil.rmtree(a, ignore_errors=True)
    assert returns[0] == returns[1]


def test_a_retrained_run_faces_the_copy_from_any_directory(a, in_directory, tmp_path, monkeypatch):
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/a") == 0
    run = in_directory / "runs" / "b"
    monkeypatch.chdir(tmp_path)
    retrain_command(run, (), None, 1, constant=False)
    assert read_config(run / "retrain.yaml", ()).league.benchmark == str(run / BENCHMARK_COPY)


def test_a_damaged_copy_is_refused_in_one_line(a, in_directory, capsys):
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/a") == 0
    (in_directory / "runs" / "b" / BENCHMARK_COPY / "elite" / "agent.safetensors").write_bytes(b"broken")
    capsys.readouterr()
    assert train(*AGAINST, "training.max_steps=160", "league.benchmark=runs/a", "run.name=b", "run.resume=auto") == 2
    assert "runs/b/benchmark/elite" in error_line(capsys)
    assert run_program(run_command, ["evaluate", "runs/b"]) == 2
    assert "runs/b/benchmark/elite" in error_line(capsys)


def test_a_function_that_another_hand_wrote_into_a_run_is_refused(in_directory, capsys):
    assert train(*AGAINST, "run.name=b", "league.benchmark=helpers.games:right_reply") == 0
    path = in_directory / "runs" / "b" / "config.yaml"
    capsys.readouterr()
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "4"]) == 0
    path.write_text(path.read_text().replace("helpers.games:right_reply", "helpers.games:cheat"))
    capsys.readouterr()
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "4"]) == 2
    assert "names custom code to execute; add --allow-code" in error_line(capsys)


def test_a_benchmark_with_code_of_its_own_must_be_the_users(in_directory, capsys):
    """Also as a copy, when the original is gone."""
    runs = in_directory / "runs"
    code = "network={name: module, factory: 'helpers.support:probe_network'}"
    assert train(*GAME, code, "run.name=own") == 0
    shutil.copytree(runs / "own", runs / "strange")
    capsys.readouterr()
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/strange") == 2
    assert "names custom code to execute" in error_line(capsys)
    assert run_program(run_command, ["match", "runs/own", "runs/strange"]) == 2
    assert run_program(run_command, ["match", "runs/own", "runs/strange", "--allow-code", "--games", "4"]) == 0
    assert train(*AGAINST, "run.name=b", "league.benchmark=runs/own") == 0
    shutil.rmtree(runs / "own")
    more = "league.benchmark=runs/own", "training.max_steps=160", "run.resume=auto"
    assert train(*AGAINST, *more, "run.name=b") == 0
    assert run_program(run_command, ["evaluate", "runs/b", "--episodes", "4"]) == 0
    shutil.copytree(runs / "b", runs / "c")
    capsys.readouterr()
    assert run_program(run_command, ["evaluate", "runs/c", "--episodes", "4"]) == 2
    assert run_program(run_command, ["evaluate", "runs/c", "--episodes", "4", "--allow-code"]) == 0


@pytest.mark.two_process
def test_two_ranks_face_the_same_benchmark(a, in_directory, forked_launch):
    settings = (*AGAINST, "population.size=4", "league.benchmark=runs/a")
    for name in ("b", "c"):
        done = forked_launch(in_directory, f"run.name={name}", *settings)
        assert done.returncode == 0, done.stderr[-3000:]
    assert scores(in_directory / "runs" / "b") == scores(in_directory / "runs" / "c")
    assert not any(row["drifts"] for row in lines(in_directory / "runs" / "b" / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("player", "told"),
    [("raises", "raised ValueError: invalid literal"), ("between", "made the move 0.5, which is not")],
)
def test_a_mistake_of_a_player_is_told_as_its_own(player, told, a, in_directory, capsys):
    assert run_program(run_command, ["match", "runs/a", f"helpers.games:{player}"]) == 2
    assert f"opponent: helpers.games:{player} {told}" in error_line(capsys)
    assert train(*AGAINST, "run.name=b", f"league.benchmark=helpers.games:{player}", "evaluation.episodes=12") == 2
    assert f"league.benchmark: helpers.games:{player} {told}" in capsys.readouterr().err
