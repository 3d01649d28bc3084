"""`evorl.train` and callbacks: the same training as from the command line, seen and stopped by functions."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from helpers.support import ROOT, SMALL, config, error_line, free_port, lines
from helpers.support import train as train_demo
from robustness.comparison import differences, metrics

import evorl
from evorl.commands.command import run_command
from evorl.config import read_yaml
from evorl.runs.output.callbacks import Generation, call_each
from evorl.runs.output.metrics import record_of
from evorl.runs.program import run_program
from evorl.runs.train import assignments
from evorl.types.outcomes import UserError

SHORT = {"max_steps": 70}


class FiveSteps(gym.Env):
    """An environment that is registered nowhere."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.observation_space.low.copy(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.high.copy(), 1.0, not self.left, False, {}


def make_five_steps(bonus=0.0):
    return gym.wrappers.TransformReward(FiveSteps(), lambda reward: reward + bonus)


def test_evorl_train_trains_what_the_demo_trains(in_directory):
    run = evorl.train(SMALL, training=SHORT, run={"name": "a"}, seed=3)
    assert run.path == in_directory / "runs" / "a"
    assert run.summary == json.loads((run.path / "summary.json").read_text())
    assert train_demo("run.name=b", "training.max_steps=70", "seed=3") == 0
    assert differences(run.path, run.path.parent / "b") == []
    assert len(run.read().metrics) == run.summary["generations"]
    action, _ = run.load().predict(np.zeros(4, dtype=np.float32))
    assert action in (0, 1)


def test_settings_may_be_a_mapping_or_a_configuration(in_directory):
    data = read_yaml(SMALL)
    first = evorl.train(data, training={"max_steps": 40}, run={"name": "a"}, seed=2)
    config = first.load().config
    again = evorl.train(config, run={"name": "b"})
    assert differences(first.path, again.path) == []


def test_sections_are_merged_and_dotted_keys_replace():
    given = {
        "population": {"size": np.int64(2)}, "algorithm": {"exploration": {"end": 0.1}, "name": "dqn"}, "seed": 1,
        "replay": {"prioritised": {}}, "evolution.hyperparameters": {"gamma": {"min": 0.9, "max": 0.99}},
    }  # fmt: skip
    assert assignments(given) == [
        "population.size=2", "algorithm.exploration.end=0.1", 'algorithm.name="dqn"', "seed=1",
        "replay.prioritised={}", 'evolution.hyperparameters={"gamma": {"min": 0.9, "max": 0.99}}',
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"seed: <object object at .*> cannot be written in a configuration"):
        assignments({"seed": object()})


def test_a_function_is_written_by_its_name():
    words = assignments({"network": {"name": "module", "factory": make_five_steps}})
    assert words == ['network.name="module"', f'network.factory="{__name__}:make_five_steps"']
    with pytest.raises(UserError, match=r"network\.factory: <function .* is not defined at the top level"):
        assignments({"network": {"factory": lambda inputs, outputs: None}})


@pytest.mark.parametrize("environment", [FiveSteps, {"id": make_five_steps, "kwargs": {"bonus": 1.0}}])
def test_an_environment_may_be_a_class_or_a_function(environment, in_directory):
    run = evorl.train(SMALL, environment=environment, training={"max_steps": 40}, run={"name": "a"})
    name = "FiveSteps" if environment is FiveSteps else "make_five_steps"
    assert run.read().config["environment"]["id"] == f"{__name__}:{name}"
    best = 10 if isinstance(environment, dict) else 5
    assert run.summary["elite_fitness"] == best
    assert f"best fitness {best}" in repr(run)
    assert train_demo("run.name=a", "run.resume=auto", configuration=run.path / "config.yaml") == 0


def test_an_environment_of_which_no_copies_can_be_made_is_refused():
    for environment in (FiveSteps(), gym.make("CartPole-v1"), {"id": 3}):
        with pytest.raises(UserError, match="is not a class, a function or an id, of which copies can be made"):
            evorl.train(SMALL, environment=environment)


def test_evaluate_refuses_an_environment_of_the_training_script(in_directory, monkeypatch, capsys):
    walk = type("Walk", (FiveSteps,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Walk", walk, raising=False)
    run = evorl.train(SMALL, environment=walk, training={"max_steps": 40}, run={"name": "a"})
    assert 'next: `evorl.load("runs/a")`, the same call with run={"name": "a"' in capsys.readouterr().err
    assert run.load().predict(np.zeros(2, dtype=np.float32))[0] in (0, 1)
    gym.registry.pop("Walk")
    monkeypatch.delattr(sys.modules["__main__"], "Walk")
    assert run_program(run_command, ["evaluate", "runs/a", "--allow-code"]) == 2
    assert "cannot make '__main__:Walk': it is defined in the training script" in error_line(capsys)


def test_actors_do_not_run_the_script():
    with pytest.raises(UserError, match="environment: Walk is defined in the script or notebook itself, which the"):
        evorl.train("impala", environment="__main__:Walk")


def test_callbacks_see_each_generation_and_change_nothing(in_directory):
    seen = []

    def note(generation):
        seen.append((generation.number, generation.row["fitness"], [agent.fitness for agent in generation.agents]))
        generation.log("half", np.float32(generation.number / 2))
        generation.log("none", float("nan"))

    def meddle(generation):
        generation.row["fitness"].clear()
        for agent in generation.agents:
            agent.hyperparameters.clear()
            for roles in agent.tensors.values():
                for tensor in roles["parameters"].values():
                    tensor.zero_()

    run = evorl.train(SMALL, callbacks=[meddle, note], run={"name": "a"}, training=SHORT)
    assert [number for number, *_ in seen] == [1, 2]
    assert all(row == own for _, row, own in seen)
    rows = metrics(run.path)
    assert [row.pop("logged") for row in rows] == [{"half": 0.5, "none": None}, {"half": 1.0, "none": None}]
    alone = evorl.train(SMALL, run={"name": "b"}, training=SHORT)
    assert rows == metrics(alone.path)
    record = record_of(lines(run.path / "metrics.jsonl")[1], config())
    assert record.points["callbacks/half"] == 1.0
    assert "callbacks/none" not in record.points


def test_a_callback_stops_the_run_in_order(in_directory, capsys):
    """Also in the middle of a run that can be resumed, and ends as if nobody had stopped it."""

    def stop(generation):
        return evorl.Stop("enough\nof it") if generation.number == 2 else None

    run = evorl.train(SMALL, callbacks=[stop], run={"name": "a"})
    assert (run.summary["ended"], run.summary["because"], run.summary["generations"]) == ("stopped", "enough\nof it", 2)
    assert run.summary["solved"] is None
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("stopped (enough\\nof it) after generation 2; best: a mean return of")
    assert said[-1] == "next: `evorl evaluate runs/a`, `evorl resume runs/a` to go on"
    resumed = evorl.train(SMALL, run={"name": "a", "resume": "auto"})
    assert resumed.summary["ended"] == "finished"
    stopped_late = [lambda generation: evorl.Stop("late") if generation.number == 4 else None]
    whole = evorl.train(SMALL, callbacks=stopped_late, run={"name": "b"})
    assert whole.summary["ended"] == "finished", "its steps were used up"
    assert differences(resumed.path, whole.path) == []


def test_callbacks_that_could_not_be_called_are_refused_before_training(in_directory):
    with pytest.raises(UserError, match=r"^callbacks: give a list of functions, such as \[watch\]$"):
        evorl.train(SMALL, training=SHORT, callbacks=[None])
    assert not list(in_directory.iterdir())


def test_callbacks_with_wrong_results_are_refused(in_directory):
    def yes(generation):
        return True

    with pytest.raises(UserError, match=r"callbacks: yes returned True; return evorl\.Stop"):
        evorl.train(SMALL, callbacks=[yes], run={"name": "a"})
    with pytest.raises(UserError, match="x is logged as 'much', which is not a number"):
        Generation({"generation": 1}, []).log("x", "much")

    def fails(generation):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        evorl.train(SMALL, callbacks=[fails], run={"name": "b"})
    because = json.loads(Path("runs/b/summary.json").read_text())["because"]
    line = r"test_train_in_python.py:\d+ in fails: raise ZeroDivisionError\(\"mine\"\)\)"
    assert re.fullmatch(rf"ZeroDivisionError: mine \(\S*{line}", because)


@pytest.fixture
def _ctrl_c():
    """Ctrl-C as at a terminal: what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_start_that_fails_leaves_its_name_free_and_its_lock_open(in_directory, monkeypatch):
    with pytest.raises(UserError, match="there is no run here") as kept:
        evorl.train(SMALL, run={"name": "a"}, population={"from": "runs/none"})
    assert not (in_directory / "runs" / "a" / "config.yaml").exists()
    monkeypatch.setattr("evorl.runs.storage.directory.LOCK_PATIENCE", 0.0)
    evorl.train(SMALL, run={"name": "a"}, training=SHORT)
    assert kept.tb, "an interactive session keeps the error, and all that its frames refer to"


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_ends_in_order_and_is_pythons_own(in_directory, capsys):
    generations = []

    def interrupt(generation):
        generations.append(generation)
        if len(generations) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        evorl.train(SMALL, callbacks=[interrupt], run={"name": "a"})
    assert json.loads(Path("runs/a/summary.json").read_text())["ended"] == "SIGINT"
    told = capsys.readouterr().err
    assert "ended by SIGINT after generation 2" in told
    assert "a resumed run goes on after generation 2\n" in told, "the generation is saved before the run ends"
    assert Path("runs/a/checkpoints/generation-000002").is_dir()


SCRIPT = """
import accelerate
import evorl
from runs.test_train_in_python import FiveSteps


class Mine(FiveSteps):
    pass


def stop(generation):
    return evorl.Stop("enough") if generation.number == 2 else None


def train():
    for _ in range(2):
        run = evorl.train({small!r}, environment=Mine, callbacks=[stop])
        assert (run.summary["because"], run.summary["ranks"], run.summary["generations"]) == ("enough", 2, 2)
        assert [row["ranks"] for row in run.read().metrics] == [2, 2]


evorl.train({small!r}, environment=Mine, training={{"max_steps": 40}})
accelerate.notebook_launcher(train, num_processes=2, use_port={port!r})
evorl.train(
    "impala", environment="CartPole-v1", evolution={{"steps": 512}}, training={{"max_steps": 512}},
    evaluation={{"episodes": 1, "confirmation_episodes": 1}}, tracking={{"backends": []}}, population={{"size": 1}},
)
"""


@pytest.mark.two_process
def test_a_script_without_a_guard_trains_alone_on_two_ranks_and_with_actors(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(small=str(SMALL), port=str(free_port())))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=170, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs = sorted(re.sub(r"-\d{8}-\d{6}.*", "", path.name) for path in (tmp_path / "runs").iterdir())
    assert runs == ["dqn-Mine", "dqn-Mine", "dqn-Mine", "impala-CartPole-v1"]
    assert 'next: `evorl.load("runs/dqn-Mine-' in done.stderr


def test_a_callback_stops_with_a_reason_in_words():
    with pytest.raises(UserError, match="stops because of 5, which is not a string"):
        call_each([lambda generation: evorl.Stop(5)], {"generation": 1}, [])
