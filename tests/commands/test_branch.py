"""`evorl branch`: new runs that go on from a checkpoint of another."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.support import OUTSIDE, ROOT, config, contents, demo, error_line, lines, saved_agents, train
from robustness.comparison import differences
from robustness.systems import CASES

from evorl.commands.command import run_command
from evorl.config.yaml import read_yaml
from evorl.report import data
from evorl.report.page import compared, run_facts
from evorl.report.statistics import groups
from evorl.runs.program import run_program
from evorl.runs.storage.checkpoint_files import AGENTS, ARCHIVE, ELITE, STATE, Checkpoints
from evorl.runs.storage.directory import differences as settings_that_differ
from evorl.runs.storage.directory import may_change_in_branch
from evorl.system.files import Lock, json_bytes
from evorl.system.formats import encode_agents
from evorl.types.agents import Mutation
from evorl.types.outcomes import EvorlWarning


@pytest.fixture
def branch(in_directory, monkeypatch):
    """A function that branches `runs/a` as the command does; it does not train the branch if told not to."""

    def run(*words, trains=True):
        with monkeypatch.context() as patch:
            if not trains:
                patch.setattr("evorl.commands.branch.start", lambda program, arguments, processes: None)
            return run_program(run_command, ["branch", "runs/a", *words])

    return run


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.parametrize("case", ["dqn-prioritised", "ppo-recurrent", "dqn-recurrent-running"])
def test_a_branch_without_changes_ends_as_the_run_that_went_on(case, branch):
    assert run_program(demo(), [*CASES[case], "run.name=a", "checkpoint.keep=9"]) == 0
    before = contents(Path("runs/a"))
    assert branch("b", "--generation", "2") == 0
    assert contents(Path("runs/a")) == before
    earlier = re.compile(r"checkpoints/generation-000001/")
    assert [name for name in differences(Path("runs/a"), Path("runs/b")) if not earlier.match(name)] == []
    assert read_yaml(Path("runs/b/config.yaml"))["run"]["branch_of"] == "a, generation 2"


@pytest.mark.two_process
def test_a_branch_of_two_ranks_ends_as_the_run_that_went_on(tmp_path, forked_launch):
    settings = (*CASES["dqn-prioritised"], "checkpoint.keep=9", "run.name=a")
    forked_launch.well(tmp_path, *settings)
    command = [sys.executable, "-m", "evorl", "branch", "runs/a", "b", "--generation", "2"]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, timeout=240, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = differences(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    assert [name for name in files if not name.startswith("checkpoints/generation-000001")] == []
    assert {row["ranks"] for row in lines(tmp_path / "runs" / "b" / "metrics.jsonl")} == {2}


def test_a_named_hyperparameter_is_set_in_every_agent_also_where_evolution_changed_it(run, branch, capsys):
    checkpoints = Checkpoints(run / "checkpoints")
    files = {name: checkpoints.read(2, name) for name in checkpoints.files(2)}
    evolved = saved_agents(run, 2)
    evolved[1].hyperparameters["gamma"] = 0.9
    files[AGENTS] = files[ARCHIVE] = encode_agents(evolved)
    checkpoints.complete(2, {name: checkpoints.write(2, name, payload) for name, payload in files.items()})
    words = ("--generation", "2", "algorithm.learning_rate=1e-4", "algorithm.gamma=0.99", "algorithm.max_grad_norm=5")
    assert branch("b", *words, "evolution.selection.name=none", "training.max_steps=160", trains=False) == 0
    assert capsys.readouterr().err.splitlines() == [
        "runs/b: branch of runs/a, generation 2",
        "evolution.hyperparameters.learning_rate.min: is now 0.0001, and was 0.0002",
        "evolution.selection.name: is now none, and was tournament",
        "training.max_steps: is now 160, and was 116",
        "algorithm.learning_rate: is now 0.0001 in every agent, and was 0.001",
        "algorithm.gamma: is now 0.99 in every agent, and was 0.99, 0.9, as evolution had changed it",
        "algorithm.max_grad_norm: is now 5 in every agent, and was null",
    ]
    values = {"learning_rate": 1e-4, "gamma": 0.99, "max_grad_norm": 5.0}
    for file in (AGENTS, ELITE, ARCHIVE):
        for before, after in zip(saved_agents(run, 2, file), saved_agents(Path("runs/b"), 2, file), strict=True):
            assert after.hyperparameters == before.hyperparameters | values
            before.hyperparameters, after.hyperparameters = {}, {}
            assert encode_agents([before]) == encode_agents([after])
    assert run_program(demo(), ["--config", "runs/b/config.yaml"]) == 0
    after = [row for row in lines(Path("runs/b/lineage.jsonl")) if row["generation"] > 2]
    assert {row["generation"] for row in after} >= {3, 4}
    assert all(row["hyperparameters"].items() >= values.items() for row in after)


def test_a_mutation_that_a_setting_takes_back_is_not_told_as_one(run, branch):
    checkpoints = Checkpoints(run / "checkpoints")
    files = {name: checkpoints.read(2, name) for name in checkpoints.files(2)}
    evolved = saved_agents(run, 2)[:3]
    child = evolved[0].child(90, 2)
    child.hyperparameters["learning_rate"] *= 2
    child.mutation = Mutation("hyperparameters", "learning_rate", 0.001, 0.002)
    files[AGENTS] = encode_agents([*evolved, child])
    checkpoints.complete(2, {name: checkpoints.write(2, name, payload) for name, payload in files.items()})
    assert branch("b", "--generation", "2", "algorithm.learning_rate=1e-4", "training.max_steps=160", trains=False) == 0
    child = saved_agents(Path("runs/b"), 2)[3]
    assert (child.hyperparameters["learning_rate"], child.mutation.kind) == (1e-4, "none")


def test_more_steps_under_annealing_make_a_branch_and_not_a_resumed_run(branch, capsys):
    settings = ("algorithm={name: ppo, rollout_steps: 10, batch_size: 10, annealing: true}", "run.name=a")
    assert train(*settings, "training.max_steps=80") == 0
    rates = [each.state.acting["steps"] for each in saved_agents(Path("runs/a"), 2)]
    capsys.readouterr()
    assert run_program(run_command, ["resume", "runs/a", "training.max_steps=160"]) == 2
    advised = re.search(r"`evorl branch (runs/a) NEW (training\.max_steps=160)` goes on", error_line(capsys))
    assert branch("b", advised[2]) == 0
    steps = [each.state.acting["steps"] for each in saved_agents(Path("runs/b"), 4)]
    assert min(rates) > 40
    assert min(steps) > max(rates), "the schedule goes on and does not begin anew"
    assert lines(Path("runs/b/metrics.jsonl"))[-1]["agent_steps"] > 120


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["b", "environment.num_envs=4"], r"environment.num_envs: was 2 and is now 4, .* population.from=runs/a --n"),
        (["b", "population.size=5"], r"population.size: was 4 and is now 5, .* population.from=runs/a --name NEW`"),
        (["b", "algorithm=ppo"], r"algorithm.name: was dqn .* `evorl train runs/a/config.yaml \S+ --name NEW` begins"),
        (["b", "algorithm.dueling=true"], r"algorithm.dueling: was False .*config.yaml algorithm.dueling=true --name"),
        (["b", "network.hidden_sizes=[32]"], r"network.hidden_sizes: .*config.yaml 'network.hidden_sizes=\[32\]' --n"),
        (["b", "replay.capacity=400"], r"replay.capacity: was 500 and is now 400, .* population.from=runs/a --name"),
        (["b", "evolution.fitness=info.x"], r"evolution.fitness"),
        (["b", "algorithm.learning_rate=7"], r"algorithm.learning_rate: 7 is out of range"),
        (["b", "run.name=c"], r"run.name: NEW says where the new run is; leave it out"),
        (["seed=2"], r"NEW: seed=2 is a setting; first name the new run, as in `evorl branch runs/a NEW seed=2`"),
        (["a"], r"NEW: runs/a exists already; choose another name, or go on with it by `evorl resume runs/a`"),
        (["runs/a/b"], r"NEW: runs/a/b would lie in the directory of the run runs/a"),
        (["b"], r"training.max_steps: runs/a has trained 114 of 116 .*; raise it, or take an earlier --g"),
        (["b", "training.max_steps=200", "--generation", "9"], r"no checkpoint of generation 9; its .* 2, 3"),
        (["b", "training.max_steps=200", "--program", "no.py"], r"--program: there is no file no.py"),
    ],
)  # fmt: skip
def test_what_agents_cannot_go_on_with_is_refused_and_nothing_written(words, reason, run, branch, capsys):
    before = contents(Path("runs"))
    assert branch(*words) == 2
    assert re.search(reason, error_line(capsys))
    assert contents(Path("runs")) == before
    assert names("runs") == ["a"]


def test_a_setting_that_changes_nothing_is_told(run, branch):
    exploration = "algorithm.exploration={schedule: linear, steps: 100, decay: 0.9}"
    with pytest.warns(
        EvorlWarning, match=r"^algorithm.exploration.decay: changes nothing, because `schedule` is linear"
    ):
        assert branch("b", exploration, "training.max_steps=160", trains=False) == 0


def test_the_best_agent_is_measured_anew_in_another_environment_of_evaluation(run, branch):
    """CartPole with Sutton and Barto's reward: -1 in the last step, where the run has had 1 in each step."""
    words = ("evaluation.environment.kwargs={sutton_barto_reward: true}", "training.max_steps=160")
    with pytest.warns(EvorlWarning, match="evaluation.environment changed from null to"):
        assert branch("b", *words) == 0
    before, *after = lines(Path("runs/b/metrics.jsonl"))[2:]
    assert before["elite_fitness"] > 0
    assert all(-1 <= row["elite_fitness"] <= 0 for row in after)


@pytest.mark.filterwarnings("ignore::evorl.types.outcomes.EvorlWarning")
def test_a_solved_run_has_branches_in_another_environment_of_evaluation(branch, capsys):
    assert train("run.name=a", "training.max_steps=80", "training.target_fitness=1") == 0
    assert branch("b", "training.max_steps=160", trains=False) == 2
    assert "has reached 1 there" in capsys.readouterr().err
    assert branch("b", "evaluation.environment.kwargs={sutton_barto_reward: true}", "training.max_steps=160") == 0
    summary = json.loads(Path("runs/b/summary.json").read_bytes())
    assert summary["solved"] is False
    assert summary["elite_fitness"] <= 0


@pytest.mark.filterwarnings("ignore::evorl.types.outcomes.EvorlWarning")
def test_the_worst_return_of_another_environment_of_evaluation_does_not_count(branch):
    """It would make the lower bound of a mean far too low."""
    shaped = "evaluation.environment.kwargs={sutton_barto_reward: true}"
    assert train("run.name=a", "training.max_steps=80", shaped) == 0
    assert branch("b", "evaluation.environment=null", "training.max_steps=160") == 0
    before, after = (
        json.loads(max(Path("runs", name, "checkpoints").glob("*/state.json")).read_text())["elite"]["worst"]
        for name in ("a", "b")
    )
    assert before <= 0
    assert after > 0


@pytest.mark.filterwarnings("ignore:this resume is not bit-exact")
def test_episodes_that_selected_the_best_agent_do_not_count_as_fresh_in_a_branch(branch):
    settings = ("run.name=a", "evaluation.episodes=5", "evaluation.confirmation_episodes=0", "checkpoint.keep=9")
    assert train(*settings, "training.max_steps=80", "evolution.selection.name=none") == 0
    assert branch("b", "evaluation.confirmation_episodes=8", "training.max_steps=160") == 0
    assert lines(Path("runs/b/metrics.jsonl"))[2]["elite_episodes"] == 5


@pytest.mark.parametrize("key", ["evolution.steps", "algorithm.rollout_steps"])
@pytest.mark.parametrize(("settings", "may_change"), [([], True), (["replay.prioritised={}"], False)])
def test_prioritised_agents_keep_the_length_by_which_past_generations_count(key, settings, may_change):
    assert may_change_in_branch(key, config(*settings)) is may_change


@pytest.mark.parametrize(("name", "may_change"), [("dqn", False), ("ppo", True)])
def test_the_clip_of_rewards_that_a_replay_holds_stays(name, may_change):
    settings = [] if name == "dqn" else ["algorithm={name: ppo}", "replay={}"]
    assert may_change_in_branch("algorithm.reward_clip", config(*settings)) is may_change


@pytest.mark.parametrize(("key", "may_change"), [("league.archive", True), ("league.benchmark", False)])
def test_a_league_goes_on_with_another_archive_but_not_with_another_measure(key, may_change):
    """A lower limit takes effect with the next archived agent; the elite's results are against the benchmark."""
    assert may_change_in_branch(key, config()) is may_change


def test_a_league_without_settings_of_its_own_has_the_defaults():
    """As in the shipped files: `league.archive` alone also sets the others, to what they were."""
    changed = settings_that_differ(config(), config("league={archive: 2}"))
    assert list(changed) == [("league.archive", 8, 2)]


def test_another_burn_in_decides_anew_when_selection_begins(run, branch):
    assert branch("b", "evolution.burn_in=0", "training.max_steps=160") == 0
    assert lines(Path("runs/b/metrics.jsonl"))[-1]["selection_began"] is not None
    shutil.rmtree("runs/a")
    Path("runs/b").rename("runs/a")
    assert branch("b", "evolution.burn_in=100", "training.max_steps=240") == 0
    assert lines(Path("runs/b/metrics.jsonl"))[-1]["selection_began"] is None


@pytest.mark.filterwarnings("ignore::evorl.types.outcomes.EvorlWarning")
def test_steps_too_few_for_a_rollout_are_refused(branch, capsys):
    """Generations are rollouts of 32 steps, and a tenth of one is not trained."""
    settings = (*CASES["ppo-recurrent"], "evolution.steps=8", "training.max_steps=64", "run.name=a")
    assert run_program(demo(), [*settings]) == 0
    assert branch("b", "training.max_steps=67") == 2
    assert "has trained 64 of 67 steps of each agent, so that too few are left" in capsys.readouterr().err
    assert branch("b", "training.max_steps=70") == 0
    assert lines(Path("runs/b/metrics.jsonl"))[-1]["generation"] == 3


def test_a_run_that_trains_is_copied_and_a_path_may_lie_elsewhere(run, branch):
    (run / "tracking.json").write_text('{"wandb": "abc"}')
    lock, before = Lock(run, wait=0.0), contents(run)
    try:
        assert branch("elsewhere/b", "training.max_steps=160") == 0
    finally:
        lock.release()
    assert contents(run) == before
    new = Path("elsewhere/b")
    assert [row["generation"] for row in lines(new / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert not (new / "tracking.json").exists(), "a tracker's run is not continued by another"


def test_damaged_checkpoints_are_passed_over(run, branch):
    (run / "checkpoints" / "generation-000003" / AGENTS).write_bytes(b"")
    with pytest.warns(EvorlWarning, match=r"generation-000003.* damaged.*; looking at the other checkpoints"):
        assert branch("b", "training.max_steps=160", trains=False) == 0
    assert saved_agents(Path("runs/b"), 2)


def test_a_branch_has_as_many_ranks_as_trained_its_generation(run, branch, monkeypatch):
    begun = []
    monkeypatch.setattr("evorl.commands.branch.start", lambda program, arguments, processes: begun.append(processes))
    monkeypatch.setattr("evorl.commands.train.usable_cores", lambda: 2)
    checkpoints = Checkpoints(run / "checkpoints")
    files = {name: checkpoints.read(3, name) for name in checkpoints.files(3)}
    files[STATE] = json_bytes(json.loads(files[STATE]) | {"ranks": 2})
    checkpoints.complete(3, {name: checkpoints.write(3, name, payload) for name, payload in files.items()})
    assert branch("b", "--generation", "2", "training.max_steps=160") == 0
    assert branch("c", "--generation", "3", "training.max_steps=160", OUTSIDE) == 0, "the run itself warns of it"
    assert begun == [1, 2]


def test_a_failing_copy_leaves_nothing(run, branch, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "complete", fail)
        assert branch("b", "training.max_steps=160") == 2
    assert "NEW: cannot write to runs/b: No space left" in error_line(capsys).replace(f"{Path.cwd()}/", "")
    assert names("runs") == ["a"]
    assert branch("b", "training.max_steps=160", trains=False) == 0
    assert names("runs") == ["a", "b"]
    assert names("runs/b") == ["checkpoints", "config.yaml", "elite", "lineage.jsonl", "metrics.jsonl"]


def test_list_lineage_and_reports_say_where_a_branch_began(run, branch, capsys):
    assert branch("b", "training.max_steps=160", "seed=7") == 0
    capsys.readouterr()
    assert run_program(run_command, ["list"]) == 0
    assert re.search(r"\nb .*  branch of a, generation 3\n", capsys.readouterr().out)
    assert run_program(run_command, ["lineage", "runs/b"]) == 0
    assert capsys.readouterr().out.startswith("branch of a, generation 3\n")
    runs = [data.load(run), data.load(Path("runs/b"))]
    assert ("branch of", "a, generation 3") in run_facts(runs[1])
    assert "branch of" not in dict(run_facts(runs[0]))
    assert [row["names"] for row in compared(groups(runs))] == ["a", "b (branch of a, generation 3)"]
    shutil.rmtree("runs/a")
    Path("runs/b").rename("runs/a")
    assert branch("c", "training.max_steps=200", trains=False) == 0
    begun = read_yaml(Path("runs/c/config.yaml"))["run"]["branch_of"]
    assert re.fullmatch(r"a, generation 3, then a, generation \d+", begun)


def test_a_new_run_with_the_settings_of_a_branch_is_none(run, branch):
    assert branch("b", "training.max_steps=160", trains=False) == 0
    assert run_program(demo(), ["--config", "runs/b/config.yaml", "run.name=c", "training.max_steps=40"]) == 0
    assert read_yaml(Path("runs/c/config.yaml"))["run"]["branch_of"] is None
