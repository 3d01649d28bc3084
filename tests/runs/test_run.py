"""A run in one process, as its user sees it: files, seeds, resuming, exit codes."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers.support import (
    EVERY_MUTATION,
    ROOT,
    config,
    contents,
    error_line,
    lines,
    needs_its_extra,
    steps_until,
    train,
)
from robustness.comparison import differences

from evorl.commands.command import run_command
from evorl.commands.evaluate import evaluate_elite
from evorl.config import read_yaml
from evorl.config.algorithms import SETTINGS
from evorl.runs.program import run_program
from evorl.runs.run import Run
from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.runs.storage.directory import NOT_SET, way_to_change
from evorl.system.signals import Interrupted
from evorl.types.outcomes import EvorlWarning, UserError

SHIPPED = [
    pytest.param(path, id=path.name, marks=[pytest.mark.slow] if "atari" in path.name else [])
    for path in sorted((ROOT / "configs" / "training").glob("*.yaml"))
    if ("atari" not in path.name and "pong" not in path.name) or path.stem in ("rainbow_atari", "impala_atari")
]


def test_a_run_leaves_what_the_readme_promises(in_directory):
    # 108: steps that native CartPole spends on resets are no steps, so a generation has some fewer than 40.
    assert train("run.name=a", "training.max_steps=108", *EVERY_MUTATION) == 0
    run = in_directory / "runs" / "a"
    metrics, lineage = lines(run / "metrics.jsonl"), lines(run / "lineage.jsonl")
    assert [row["generation"] for row in metrics] == [1, 2, 3]
    expected = {
        "generation", "global_steps", "agent_steps", "fitness", "best_fitness", "mean_fitness", "train_return",
        "train_episodes",
        "metrics",
        "env_steps_per_second", "updates_per_second", "parents", "mutations", "hyperparameters", "architectures",
    }  # fmt: skip
    for row in metrics:
        assert expected <= row.keys()
        assert np.isfinite(row["fitness"]).all()
        assert row["best_fitness"] == max(row["fitness"])
        assert row["global_steps"] == pytest.approx(4 * row["agent_steps"], abs=4 * row["generation"])
        for key in ("fitness", "parents", "mutations", "hyperparameters", "architectures", "train_return"):
            assert len(row[key]) == 4
        assert {name: len(values) for name, values in row["metrics"].items()} == {
            "loss": 4,
            "gradient_norm": 4,
            "td_error": 4,
            "q_values": 4,
        }
    assert len(lineage) == 12
    ids = {row["id"] for row in lineage}
    assert all(row["parent"] is None or row["parent"] in ids for row in lineage)
    elite = json.loads((run / "elite" / "agent.json").read_text())
    assert elite["id"] in metrics[metrics[-1]["elite_generation"] - 1]["agents"]
    summary = json.loads((run / "summary.json").read_text())
    assert {"solved", "elite_fitness", "generations", "global_steps", "wall_clock_seconds"} <= summary.keys()
    assert summary["elite_fitness"] == metrics[-1]["elite_fitness"]
    best = metrics[-1]["elite_generation"]
    kept = {int(path.name.removeprefix("generation-")) for path in (run / "checkpoints").iterdir()}
    assert kept == {2, 3, best}
    assert not list(run.rglob(".*partial*"))


def test_the_resolved_configuration_reproduces_the_run_and_another_seed_gives_another(in_directory, mutated_run):
    runs, resolved = in_directory / "runs", mutated_run / "config.yaml"
    assert train("run.name=b", f"run.directory={runs}", configuration=resolved) == 0
    assert differences(runs / "b", mutated_run) == []
    other = ("seed=6", "training.max_steps=40")
    assert train("run.name=c", f"run.directory={runs}", *other, configuration=resolved) == 0
    other, one = (lines(run / "metrics.jsonl")[0]["fitness"] for run in (runs / "c", mutated_run))
    assert other != one


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.parametrize(
    "world",
    [[], ["environment.carry_over=true"]],
    ids=["new episodes", "running"],
)
def test_resumed_run_ends_as_undisturbed(in_directory, mutated_run, world):
    settings = [*EVERY_MUTATION, *world]
    whole, stopped = in_directory / "runs" / "whole", in_directory / "runs" / "stopped"
    if world:
        assert train("run.name=whole", *settings, "training.max_steps=200") == 0
    else:
        whole = mutated_run
    assert train("run.name=stopped", *settings, f"training.max_steps={steps_until(whole, 2)}") == 0
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"generation": 3, "cut sho')  # As a kill in the middle of a write would leave it.
    assert train("run.name=stopped", *settings, "training.max_steps=200", "run.resume=auto") == 0
    assert differences(stopped, whole) == []


def test_a_run_that_goes_on_after_a_generation_that_was_cut_short_says_so(in_directory):
    """A generation has 40 steps, and the run begins with the steps for two and a half."""
    assert train("run.name=a", *EVERY_MUTATION, "training.max_steps=100") == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert [row["shortened_by"] for row in rows] == [None, None, 100]
    with pytest.warns(EvorlWarning, match="not bit-exact: generation 3 was cut short by training.max_steps=100"):
        assert train("run.name=a", *EVERY_MUTATION, "training.max_steps=200", "run.resume=auto") == 0
    again = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert again[:3] == rows
    assert again[-1]["agent_steps"] >= 180


def test_run_stops_at_the_target_once_fresh_episodes_confirm_it(in_directory):
    target = ["training.target_fitness=5", "training.max_steps=100000"]
    assert train("run.name=a", *target, "evaluation.confirmation_episodes=3") == 0
    summary = json.loads((in_directory / "runs" / "a" / "summary.json").read_text())
    assert summary["solved"]
    assert summary["generations"] == 1
    assert train("run.name=b", "training.target_fitness=475", "training.max_steps=80") == 0
    assert not json.loads((in_directory / "runs" / "b" / "summary.json").read_text())["solved"]


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.filterwarnings("ignore:actors.count")  # Of a machine with one core.
@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_configuration_runs(path, in_directory):
    """In small: two generations of two, few environments, and a replay of thousands of steps instead of gigabytes.

    Of Atari one generation, without a confirmation: evaluation is most of their time.
    """
    needs_its_extra(path.stem)
    short = [
        "population.size=2", "evolution.steps=40", "training.max_steps=80", "environment.num_envs=2",
        "evaluation.episodes=1", "evaluation.max_steps=20", "evaluation.confirmation_episodes=1",
    ]  # fmt: skip
    if "atari" in path.name:
        short.append("network.hidden_sizes=[16]")  # Files of megabytes would be most of the time.
    if "atari" in path.name or "pong_ram" in path.name:
        short += ["training.max_steps=40", "evaluation.confirmation_episodes=0"]
    if path.stem in ("ppo_minatar", "ppo_connect_four", "ppo_pong_ram"):
        short.append("environment.num_envs=8")  # A rollout has at least as many steps as a minibatch.
    if path.stem == "ppo_leduc":
        short.append("environment.num_envs=64")
    if SETTINGS[read_yaml(path)["algorithm"]["name"]].replayed:
        short += ["replay.learning_starts=50", "replay.capacity=2000"]
    assert train("run.name=a", "tracking.backends=[]", *short, configuration=path) == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    losses = [values for name, values in rows[-1]["metrics"].items() if name.endswith("loss")]
    assert losses
    assert all(values[0] is not None for values in losses), "it is meant to have learned"


def test_no_command_is_advised_for_a_setting_that_is_left_out():
    advice = way_to_change(Path("runs/a"), "environment.kwargs.x", NOT_SET, config("environment.kwargs={y: 1}"))
    assert advice == "only a new run can leave it out"


def test_agents_are_advised_for_another_environment_of_the_same_spaces(trained_run):
    advice = way_to_change(trained_run, "environment.id", "Acrobot-v1", config())
    assert advice.endswith("if the spaces are the same (otherwise leave population.from out)")


def test_another_setting_for_a_run_without_agents_is_advised_without_them(in_directory, capsys):
    once, fails = ("run.name=a", "training.max_steps=40"), "evolution.fitness=info.nothing"
    assert train(*once, fails) == 2
    capsys.readouterr()
    assert train(*once, "run.resume=auto", fails, "algorithm.learning_rate=0.5") == 2
    assert "`evorl train runs/a/config.yaml algorithm.learning_rate=0.5 --name NEW`" in error_line(capsys)
    assert train(*once, "run.resume=auto") == 2
    assert error_line(capsys).endswith(" is now not set; only a new run can leave it out\n")


LOST = "has been trained, but none of its checkpoints can be used; nothing was changed"


def test_a_refused_resume_leaves_the_run_as_it_was(run, capsys):
    for agents in run.glob("checkpoints/generation-*/agents.safetensors"):
        agents.write_bytes(agents.read_bytes() + b"x")
    before = contents(run)
    with pytest.warns(EvorlWarning, match="damaged"):
        assert train("run.name=a", "run.resume=auto", "training.max_steps=200") == 2
    assert LOST in error_line(capsys)
    assert contents(run) == before
    # Its summary still says that the run has finished, so that it does not begin anew.
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    assert train("run.name=a", "run.resume=auto", "training.max_steps=200") == 2
    assert LOST in error_line(capsys)
    assert contents(run) == before


def test_a_run_that_was_killed_in_its_second_generation_does_not_begin_anew_if_its_checkpoint_is_damaged(
    in_directory, capsys
):
    assert train("run.name=a", "training.max_steps=40") == 0
    run = in_directory / "runs" / "a"
    capsys.readouterr()
    (run / "summary.json").unlink()
    (agents,) = run.glob("checkpoints/generation-*/agents.safetensors")
    agents.write_bytes(agents.read_bytes() + b"x")
    with pytest.warns(EvorlWarning, match="damaged"):
        assert train("run.name=a", "run.resume=auto", "training.max_steps=80") == 2
    assert LOST in error_line(capsys)


def test_a_resume_of_a_finished_run_changes_nothing_even_if_it_is_interrupted(trained_run, in_directory, monkeypatch):
    run = in_directory / "runs" / "a"
    shutil.copytree(trained_run, run)
    again = ("run.name=a", "run.resume=auto", "training.max_steps=116")
    before = {path.name for path in run.iterdir()}, (run / "summary.json").read_bytes()

    def interrupted(self):
        raise Interrupted(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_open_logger", interrupted)
        assert train(*again) == 130
    assert ({path.name for path in run.iterdir()}, (run / "summary.json").read_bytes()) == before
    assert train(*again) == 0
    assert (run / "summary.json").read_bytes() == before[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.name=a"], "already holds a run; choose another name, or go on with run.resume=auto"),
        (["run.name=a", "run.resume=auto", "seed=2"], "seed was 1 and is now 2"),
        (["run.resume=auto"], "resuming needs the name of the run"),
        (["run.name=other"], "is not empty and holds no run"),
        (["run.name=a/config.yaml/x"], "runs/a; choose another name"),
        (["algorithm={name: ppo, batch_size: 60}"], "into minibatches of 60; use a divisor of 512"),
        (["--config", "none.yaml"], "none.yaml: cannot read the configuration: No such file"),
    ],
)
def test_wrong_run_settings_end_with_one_line_and_code_2(overrides, message, run, capsys):
    (run.parent / "other").mkdir()
    (run.parent / "other" / "thesis.txt").write_text("mine")
    capsys.readouterr()
    assert train(*overrides) == 2
    assert message in error_line(capsys)


def test_evaluate_plays_fresh_episodes(in_directory, capsys):
    assert train("run.name=a", "evaluation.max_steps=60", "evolution.steps=120") == 0
    run = in_directory / "runs" / "a"
    first, again, other = (evaluate_elite(run, 7, seed) for seed in (0, 0, 1))
    assert first == again
    assert first["mean"] != other["mean"]
    assert first["min"] <= first["mean"] <= first["max"] <= 60
    capsys.readouterr()
    run_command(["evaluate", str(run), "--episodes", "7", "--json"])
    assert json.loads(capsys.readouterr().out) == first
    for name, hint in (("nothing", ""), (run.name, f"; did you mean runs/{run.name}?")):
        assert run_program(run_command, ["evaluate", name]) == 2
        assert f"{name}: there is no run here (no config.yaml){hint}\n" in capsys.readouterr().err


def test_a_generation_has_whole_rollouts(in_directory):
    ppo = "algorithm={name: ppo, rollout_steps: 8, batch_size: 8, epochs: 1}"
    shown = "environment={id: 'helpers.spaces:Shown-v0', kwargs: {kind: flags}, num_envs: 2}"
    assert train("run.name=a", "evolution.steps=40", "training.max_steps=90", ppo, shown) == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert [row["agent_steps"] for row in rows] == [48, 96]
    assert [row["updates"] for row in rows] == [[6.0] * 4] * 2
    names = {"policy_loss", "value_loss", "entropy", "explained_variance", "approx_kl", "clip_fraction"}
    assert rows[0]["metrics"].keys() == {"loss", "gradient_norm"} | names


def test_selection_waits_for_ranks_that_can_be_trusted_and_says_when_it_begins(in_directory, capsys):
    """At the latest after a third of the steps; a resumed run goes on with the ranks that its agents had."""
    overrides = ["evolution.burn_in=auto", "evolution.selection.replace=0.25", "population.size=4"]
    assert train("run.name=a", *overrides) == 0
    said = "".join(capsys.readouterr())
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    began = [row["selection_began"] for row in rows]
    first = next(number for number in began if number)
    assert began == [None] * (first - 1) + [first] * (len(rows) - first + 1)
    assert rows[0]["rank_correlation"] is None
    assert said.count("selection begins (") == 1
    lineage = lines(in_directory / "runs" / "a" / "lineage.jsonl")
    born = {row["generation"] for row in lineage if row["parent"] is not None}
    assert min(born) == first + 1


def test_only_fresh_episodes_make_an_elite_and_stop_a_run(in_directory, monkeypatch):
    """An agent seems to reach the target in every generation, and none does on fresh episodes."""

    def fails(self, agents, generation, purpose, first, episodes):
        return np.full((len(agents), episodes), 6.0 if purpose == "generation" else 1.0)

    monkeypatch.setattr("evorl.population.evaluation.Evaluator.remeasure", fails)
    overrides = ["training.target_fitness=5", "evaluation.confirmation_episodes=3", "training.max_steps=40"]
    assert train("run.name=a", *overrides) == 0
    row = lines(in_directory / "runs" / "a" / "metrics.jsonl")[0]
    assert max(row["fitness"]) > 5
    assert (row["elite_fitness"], row["elite_episodes"], row["solved"]) == (1.0, 3, False)


def test_without_fresh_episodes_a_mean_above_the_target_ends_a_run(in_directory, capsys):
    overrides = ["training.target_fitness=5", "evaluation.confirmation_episodes=0"]
    assert train("run.name=a", *overrides, "training.max_steps=40") == 0
    (row,) = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert row["elite_fitness"] >= 5
    assert row["solved"]
    assert row["elite_lower_bound"] is None
    assert "solved: the mean return is above 5; best" in capsys.readouterr().err


def test_lines_count_the_steps_of_evaluations(in_directory):
    """CartPole returns one for each step; from the second generation on the elite plays its episodes too."""
    assert train("run.name=a", "evaluation.confirmation_episodes=0") == 0
    first, second, *_ = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert first["evaluation_steps"] == sum(first["fitness"]) * 2
    assert second["evaluation_steps"] > sum(second["fitness"]) * 2


def test_checkpoints_appear_whole_and_old_ones_are_pruned(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for generation in (1, 2, 3, 4, 5):
        entry = checkpoints.write(generation, "state.json", b"payload")
        assert generation not in checkpoints.generations()
        checkpoints.complete(generation, {"state.json": entry})
        checkpoints.prune(keep=2, best=2)
    assert checkpoints.generations() == [2, 4, 5]
    assert checkpoints.read(5, "state.json") == b"payload"
    shutil.copytree(checkpoints.path(4), tmp_path / "generation-000009")
    with pytest.raises(UserError, match="damaged, or of another generation"):
        checkpoints.read(9, "state.json")


def test_resume_prunes_old_checkpoints(in_directory):
    assert train("run.name=a", "checkpoint.keep=9") == 0
    checkpoints = Checkpoints(in_directory / "runs" / "a" / "checkpoints")
    there = checkpoints.generations()
    assert train("run.name=a", "run.resume=auto", "checkpoint.keep=1") == 0
    left = checkpoints.generations()
    assert left[-1] == there[-1]
    assert len(left) <= 2 < len(there)


def test_the_limit_on_replays_does_not_count_rollouts(in_directory, capsys):
    settings = ("algorithm={name: a2c, normalize_rewards: true}", "checkpoint.max_replay_mb=0")
    assert train("run.name=a", *settings) == 0
    assert "bit-exact" not in capsys.readouterr().err
