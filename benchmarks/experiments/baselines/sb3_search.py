"""Time until PPO of Stable-Baselines3 lands on the moon, with settings searched by Optuna or Ray Tune, or given.

Prints one JSON line. `optuna`: TPE and a median pruner, two workers. `tune`: population-based training of eight agents,
two at a time. Both search the four ranges of benchmarks/experiments/search_cost.py; the other settings are rl-baselines3-zoo's.
`tuned` has all of the zoo's settings for LunarLander, `evorl` those of configs/training/ppo.yaml; one agent each.
After every 16,384 steps an agent plays 10 episodes; where their mean is 200 it plays 20 more, and where these confirm
it, the 100 of landing.py, which end the run. With Optuna an agent trains for at most 500,000 steps. The steps of `tune`
are those in the lineages of the last agents. `tuned` and `evorl` use one core.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 "gymnasium[box2d]" \
              optuna "ray[tune]"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/sb3_search.py optuna --seed 1 --seconds 1200
"""

import time

STARTED = time.time()

import argparse
import json
import multiprocessing
import queue
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import landing
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

ENVS = 16
ZOO = {
    "n_steps": 1024, "n_epochs": 4, "batch_size": 64, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01,
}  # fmt: skip
EVORL = {
    "n_steps": 256, "n_epochs": 4, "batch_size": 256, "gamma": 0.995, "gae_lambda": 0.98, "ent_coef": 0.01,
    "learning_rate": 2e-3, "clip_range": 0.2, "policy_kwargs": {"activation_fn": torch.nn.ReLU, "ortho_init": False},
}  # fmt: skip
"""As two processes of ppo.yaml share them."""
RANGES = {"learning_rate": (1e-4, 1e-2), "ent_coef": (1e-3, 3e-2), "clip_range": (0.1, 0.4), "batch_size": (128, 512)}
"""Searched evenly on logarithmic scales."""
LONGEST = 500_000
POPULATION, PERTURBED_EVERY = 8, 4
WORKERS = 2


class Pupil:
    """An agent with its environments."""

    def __init__(self, settings: Mapping[str, Any], seed: int, number: int = 0) -> None:
        torch.set_num_threads(1)
        self.seed = seed
        first = seed * 10_000 + 100 * number
        self.envs, self.fresh = (make_vec_env(landing.ENVIRONMENT, n_envs=ENVS, seed=first + at) for at in (0, 50))
        self.model = PPO("MlpPolicy", self.envs, seed=first, device="cpu", **settings)

    def learn(self) -> None:
        """Train for 16,384 steps, in whole rollouts."""
        self.model.learn(16_384, reset_num_timesteps=False)

    def mean_return(self, episodes: int = 10) -> float:
        return float(evaluate_policy(self.model, self.fresh, n_eval_episodes=episodes)[0])

    def landed(self, mean: float) -> float | None:
        """The mean over the episodes of landing.py if an agent whose last `mean` is this one lands there."""
        if mean < landing.TARGET or self.mean_return(20) < landing.TARGET:
            return None
        score = landing.mean_return(lambda seen: self.model.predict(seen, deterministic=True)[0], self.seed)
        return score if score >= landing.TARGET else None


def one_agent(settings: Mapping[str, Any], seed: int, seconds: float) -> dict[str, Any]:
    pupil, score = Pupil(settings, seed), None
    while score is None and time.time() - STARTED < seconds:
        pupil.learn()
        score = pupil.landed(pupil.mean_return())
    return {"reached": score is not None, "score": score, "steps": pupil.model.num_timesteps}


def work(number: int, seed: int, storage: str, told: "multiprocessing.Queue[dict[str, Any]]") -> None:
    """Optimise the study of a storage; tell each trial's steps, and the score of one that lands."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="landing",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage)),
        sampler=optuna.samplers.TPESampler(seed=seed + 1000 * number),
        pruner=optuna.pruners.MedianPruner(),
        direction="maximize",
        load_if_exists=True,
    )

    def objective(trial: Any) -> float:
        chosen = {
            name: (trial.suggest_int if name == "batch_size" else trial.suggest_float)(name, *bounds, log=True)
            for name, bounds in RANGES.items()
        }
        pupil = Pupil({**ZOO, **chosen}, seed, trial.number)
        best = -float("inf")
        while pupil.model.num_timesteps < LONGEST:
            before = pupil.model.num_timesteps
            pupil.learn()
            mean = pupil.mean_return()
            told.put({"steps": pupil.model.num_timesteps - before, "score": pupil.landed(mean)})
            best = max(best, mean)
            trial.report(mean, pupil.model.num_timesteps)
            if trial.should_prune():
                raise optuna.TrialPruned
        return best

    study.optimize(objective)


def by_optuna(seed: int, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    steps, score = 0, None
    with tempfile.TemporaryDirectory() as folder:
        places = (seed, f"{folder}/study.log", told)
        workers = [context.Process(target=work, args=(number, *places), daemon=True) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        while score is None and (left := seconds - (time.time() - STARTED)) > 0:
            try:
                line = told.get(timeout=left)
            except queue.Empty:
                break
            steps, score = steps + line["steps"], line["score"]
        for worker in workers:
            worker.terminate()
            worker.join()
    return {"reached": score is not None, "score": score, "steps": steps}


def by_tune(seed: int, seconds: float) -> dict[str, Any]:
    import numpy as np
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    class Trained(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.pupil = Pupil({**ZOO, **config["chosen"]}, seed, config["number"])

        def step(self) -> dict[str, Any]:
            self.pupil.learn()
            mean = self.pupil.mean_return()
            return {"return": mean, "landed": self.pupil.landed(mean), "steps": self.pupil.model.num_timesteps}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.pupil.model.save(Path(checkpoint_dir) / "model")

        def load_checkpoint(self, checkpoint: Any) -> None:
            chosen = self.config["chosen"]
            self.pupil.model = PPO.load(
                Path(checkpoint) / "model",
                env=self.pupil.envs,
                device="cpu",
                custom_objects=chosen,
            )

    class Landed(tune.Stopper):
        def __init__(self) -> None:
            self.score: float | None = None

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            self.score = result["landed"] if self.score is None else self.score
            return self.score is not None

        def stop_all(self) -> bool:
            return self.score is not None or time.time() - STARTED > seconds

    def drawn(name: str) -> Any:
        low, high = RANGES[name]
        return tune.lograndint(low, high + 1) if name == "batch_size" else tune.loguniform(low, high)

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    np.random.seed(seed)  # noqa: NPY002 - Ray Tune draws by the global generator.
    chosen = {name: drawn(name) for name in RANGES}
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="return",
        mode="max",
        perturbation_interval=PERTURBED_EVERY,
        hyperparam_mutations={"chosen": chosen},
    )
    stopper = Landed()
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(Trained, {"cpu": 1}),
            param_space={"chosen": chosen, "number": tune.grid_search(list(range(POPULATION)))},
            tune_config=tune.TuneConfig(scheduler=scheduler),
            run_config=tune.RunConfig(stop=stopper, storage_path=folder, verbose=0),
        ).fit()
        steps = sum(result.metrics["steps"] for result in results if result.metrics and "steps" in result.metrics)
    return {"reached": stopper.score is not None, "score": stopper.score, "steps": steps}


WAYS = {
    "optuna": by_optuna,
    "tune": by_tune,
    "tuned": lambda seed, seconds: one_agent(ZOO, seed, seconds),
    "evorl": lambda seed, seconds: one_agent(EVORL, seed, seconds),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1200.0, help="the longest time")
    args = parser.parse_args()
    line = WAYS[args.way](args.seed, args.seconds)
    print(json.dumps({"seconds": round(time.time() - STARTED, 1), **line}))


if __name__ == "__main__":
    main()
