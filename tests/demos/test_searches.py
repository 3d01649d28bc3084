"""demos/optuna_search.py: a bad trial stops early, and the best one's settings come back."""

import runpy
from statistics import fmean
from types import SimpleNamespace

import pytest
from helpers.support import ROOT, SMALL

import evorl
from evorl.runs.output.callbacks import Generation

TASK = "CartPole-v1"


def of_demo(name):
    return runpy.run_path(str(ROOT / "demos" / "optuna_search.py"))[name]


@pytest.fixture
def really(monkeypatch, in_directory):
    """Let a demo train small.yaml's three short generations, with the network and callbacks of its trial."""
    train = evorl.train

    def small(config, *, network, callbacks, run=None, **others):
        assert others["environment"].id == TASK
        return train(SMALL, network=network, callbacks=callbacks, run=run or {"name": "trial"}, seed=others.get("seed"))

    monkeypatch.setattr(evorl, "train", small)


def pretended(seen):
    """An `evorl.train` that does not train: wider networks of fewer agents are fitter, in each of five generations."""

    def train(config, *, network, population, callbacks, evolution, training, **others):
        assert training.max_steps // evolution.steps == 5, "all trials have as many generations"
        fitness = network.hidden_sizes[0] / population.size
        seen.append((population.size, network.hidden_sizes, training.max_steps * population.size))
        for number in range(1, 6):
            row = {"generation": number, "best_fitness": fitness * number}
            if any(callback(Generation(row, [])) for callback in callbacks):
                return SimpleNamespace(path="runs/a", summary={"because": "pruned", "generations": number})
        return SimpleNamespace(path="runs/a", summary={"because": None, "generations": 5})

    return train


@pytest.fixture
def optuna():
    found = pytest.importorskip("optuna")
    before = found.logging.get_verbosity()
    found.logging.set_verbosity(found.logging.ERROR)
    yield found
    found.logging.set_verbosity(before)


@pytest.mark.usefixtures("really")
def test_a_pruned_trial_stops_its_run(optuna, in_directory):
    class SecondReport(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step == 2

    study = optuna.create_study(direction="maximize", pruner=SecondReport())
    study.optimize(lambda trial: of_demo("objective")(trial, TASK, 20_000), n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.user_attrs["run"] == "runs/trial"
    run = evorl.read_run("runs/trial")
    assert (run.summary["ended"], run.summary["because"], run.summary["generations"]) == ("stopped", "pruned", 2)
    best = [max(row["fitness"]) for row in run.metrics]
    assert trial.intermediate_values == {1: best[0], 2: pytest.approx(fmean(best))}


def test_the_best_trial_comes_back_and_bad_ones_are_pruned(optuna, monkeypatch):
    seen = []
    monkeypatch.setattr(evorl, "train", pretended(seen))
    study = of_demo("search")(12, TASK, 20_000)
    states = [trial.state for trial in study.trials]
    assert optuna.trial.TrialState.PRUNED in states
    assert states[:3] == [optuna.trial.TrialState.COMPLETE] * 3, "there is no median yet"
    widths = {trial.number: trial.params["width"] / trial.params["population.size"] for trial in study.trials}
    finished = [number for number, state in enumerate(states) if state == optuna.trial.TrialState.COMPLETE]
    assert widths[study.best_trial.number] == max(widths[number] for number in finished)
    assert study.best_value == pytest.approx(3 * widths[study.best_trial.number]), "the mean of five generations"
    for (size, hidden, steps), trial in zip(seen, study.trials, strict=True):
        assert (size, hidden) == (trial.params["population.size"], (trial.params["width"],) * trial.params["depth"])
        assert steps == 20_000
