"""Search with Optuna the settings that evolution does not change; each trial is a run of `evorl.train`.

    pip install optuna && python demos/optuna_search.py --trials 20

All trials have the same number of environment steps, over all their agents, in five generations. A trial's value is the
best fitness of a generation, averaged over the generations: the area under its learning curve. A run is stopped after a
generation if its best average so far is below the median of the earlier trials' averages at that generation.
"""

import argparse
import math
import os
from statistics import fmean

import optuna

import evorl

GENERATIONS = 5
BATCH = 256  # transitions of an agent in each of its rollouts, however many environments they come from


def objective(trial: optuna.Trial, environment: str, steps: int) -> float:
    """Train with a trial's settings; `steps` are those of all agents together. Raises TrialPruned if it is stopped."""
    size = trial.suggest_categorical("population.size", [2, 4, 8])
    num_envs = trial.suggest_categorical("environment.num_envs", [4, 8, 16])
    width = trial.suggest_categorical("width", [16, 32, 64, 128])
    depth = trial.suggest_int("depth", 1, 3)

    best: list[float] = []

    def report(generation: evorl.Generation) -> evorl.Stop | None:
        reached = generation.row["best_fitness"]
        best.append(-math.inf if reached is None else reached)
        trial.report(fmean(best), step=generation.number)
        return evorl.Stop("pruned") if trial.should_prune() else None

    run = evorl.train(
        "ppo",
        algorithm=evorl.PPOSettings(rollout_steps=BATCH // num_envs, batch_size=64),
        environment=evorl.Environment(id=environment, num_envs=num_envs),
        network=evorl.Network(hidden_sizes=(width,) * depth),
        population=evorl.PopulationSettings(size=size),
        evolution=evorl.Evolution(steps=steps // size // GENERATIONS),
        training=evorl.Training(max_steps=steps // size, target_fitness=None),
        tracking=evorl.Tracking(backends=()),
        callbacks=[report],
    )
    trial.set_user_attr("run", os.path.relpath(run.path))
    if run.summary["because"] == "pruned":
        raise optuna.TrialPruned
    return fmean(best)


def search(trials: int, environment: str, steps: int, seed: int = 0) -> optuna.Study:
    """Run so many trials, one after the other."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.optimize(lambda trial: objective(trial, environment, steps), n_trials=trials)
    return study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of a trial, over all agents")
    options = parser.parse_args()
    study = search(options.trials, options.environment, options.steps)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} of them pruned")
    print(f"best: {study.best_value:.1f} by {study.best_params}, in {study.best_trial.user_attrs['run']}")


if __name__ == "__main__":
    main()
