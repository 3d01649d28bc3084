"""Search with Ray Tune the settings that evolution does not change; each trial is a run of `evorl.train`.

    pip install "ray[tune]" && python demos/tune_search.py --trials 20

All trials have the same number of environment steps, over all their agents, in five generations. A trial's value is the
best fitness of a generation, averaged over the generations: the area under its learning curve. As many trials run at
once as there are cores, and asynchronous successive halving (ASHA, arXiv 1810.05934) stops the worse ones early.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

import evorl

GENERATIONS = 5
BATCH = 256  # transitions of an agent in each of its rollouts, however many environments they come from
SPACE = {
    "size": tune.choice([2, 4, 8]),
    "num_envs": tune.choice([4, 8, 16]),
    "width": tune.choice([16, 32, 64, 128]),
    "depth": tune.randint(1, 4),
}


def trial(chosen: Mapping[str, Any], environment: str, steps: int, directory: str) -> None:
    """Train with a trial's settings; `steps` are those of all agents together.

    `tune.report` raises SystemExit to stop a trial, and the run ends with that.
    """
    best: list[float] = []

    def report(generation: evorl.Generation) -> None:
        reached = generation.row["best_fitness"]
        best.append(-math.inf if reached is None else reached)
        tune.report({"fitness": fmean(best), "generation": generation.number})

    evorl.train(
        "ppo",
        algorithm=evorl.PPOSettings(rollout_steps=BATCH // chosen["num_envs"], batch_size=64),
        environment=evorl.Environment(id=environment, num_envs=chosen["num_envs"]),
        network=evorl.Network(hidden_sizes=(chosen["width"],) * chosen["depth"]),
        population=evorl.PopulationSettings(size=chosen["size"]),
        evolution=evorl.Evolution(steps=steps // chosen["size"] // GENERATIONS),
        training=evorl.Training(max_steps=steps // chosen["size"], target_fitness=None),
        tracking=evorl.Tracking(backends=()),
        run=evorl.RunSettings(name=tune.get_context().get_trial_name(), directory=Path(directory)),
        callbacks=[report],
    )


def search(trials: int, environment: str, steps: int) -> tune.ResultGrid:
    """Run so many trials, each in a process with one core."""
    function = tune.with_parameters(trial, environment=environment, steps=steps, directory=str(Path("runs").resolve()))
    longest = GENERATIONS + 1  # Tune also stops a trial that reaches this, before its last generation is saved.
    halving = AsyncHyperBandScheduler(time_attr="generation", max_t=longest, grace_period=1, reduction_factor=3)
    config = tune.TuneConfig(metric="fitness", mode="max", num_samples=trials, scheduler=halving)
    return tune.Tuner(tune.with_resources(function, {"cpu": 1}), param_space=SPACE, tune_config=config).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of a trial, over all agents")
    options = parser.parse_args()
    results = search(options.trials, options.environment, options.steps)
    reports = [each.metrics for each in results if each.metrics and "generation" in each.metrics]
    if not reports:
        sys.exit(f"no trial has ended a generation: {results.errors[0] if results.errors else 'all were stopped'}")
    stopped = sum(each["generation"] < GENERATIONS for each in reports)
    print(f"{len(results)} trials, {stopped} of them stopped early")
    print(f"best: {max(each['fitness'] for each in reports):.1f} by {results.get_best_result().config}")


if __name__ == "__main__":
    main()
