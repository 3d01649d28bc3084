"""`evorl evaluate`: the return of a run's best agent on fresh episodes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from evorl.algorithms import make_algorithm
from evorl.config.errors import on_one_line
from evorl.config.fields import RETURN
from evorl.envs import Environments
from evorl.envs.games import is_game
from evorl.envs.vector import for_evaluation
from evorl.population import Policy, check_agents
from evorl.population.evaluation import MAX_COPIES, evaluate, reported_keys
from evorl.runs.champion import Score
from evorl.runs.directory import load_elite, saved_config
from evorl.runs.hub import local_run
from evorl.runs.launch import check, use_threads
from evorl.runs.opponents import Task, kept_benchmark
from evorl.runs.trust import is_own, refuse_code
from evorl.seeding import numpy_generator, torch_generator
from evorl.system.console import digits

PURPOSE = "evaluation of the elite"
"""A separate purpose makes these episodes differ from all episodes of the run, even with the run's seed."""


def evaluate_run(parsed: argparse.Namespace) -> None:
    """`evorl evaluate`."""
    result = evaluate_elite(parsed.run, parsed.episodes, parsed.seed, parsed.allow_code)
    if parsed.json:
        print(json.dumps(result))
        return
    ends = f"min {digits(result['min'])}, max {digits(result['max'])}"
    spread = "" if result["std"] is None else f" (standard deviation {digits(result['std'])}, {ends})"
    score = Score(result["episodes"], result["mean"], result["std"])
    print(
        f"agent {result['agent']} of {on_one_line(str(result['run']))}: mean return {score.described()}{spread}"
        + "".join(f"; mean {name} {mean:.3g}" for name, mean in result.get("terms", {}).items() if name != RETURN)
    )


def evaluate_elite(run: Path, episodes: int, seed: int, allow_code: bool = False) -> dict[str, Any]:
    """Evaluate a run's best agent on fresh episodes, without exploration. Raises UserError.

    In the result, `returns` are in the order of `seeds_of`, and `std` is their sample standard deviation; it and the
    standard error are None for one episode. If fitness is more than the return, `terms` has the mean of the return and
    of each other term.
    """
    with local_run(run) as path:
        return {"run": str(run), **_evaluated(path, episodes, seed, allow_code)}


def _evaluated(run: Path, episodes: int, seed: int, allow_code: bool) -> dict[str, Any]:
    """Evaluate the best agent of the run in a directory."""
    data, agent = load_elite(run)
    config = saved_config(data)
    refuse_code(config, allow_code or is_own(run, config))
    check(config, trains=False)
    with Environments(
        for_evaluation(config.environment), 1, min(episodes, MAX_COPIES), whole_games=True
    ) as environments:
        if is_game(config.environment.id):
            benchmark = kept_benchmark(config, run, Task(config.environment, environments.interface), allow_code)
            environments.invite(benchmark.seat(environments.num_envs))
        algorithm = make_algorithm(config, environments.interface)
        check_agents([agent], algorithm, str(run / "elite"))
        use_threads(config.run.threads, environments.interface.parts, ranks=1)
        policy = Policy([agent], algorithm, torch_generator(seed, generation=0, rank=0, purpose=PURPOSE))
        keys = reported_keys(config.evolution.fitness)
        results = evaluate(policy, environments, seeds_of(seed, episodes), config.evaluation.max_steps, keys)
    returns = results.returns[0]
    score = Score.of(returns)
    return {
        "agent": agent.id,
        "episodes": episodes,
        "seed": seed,
        "mean": score.mean,
        "std": score.std,
        "standard_error": score.standard_error,
        "min": float(np.min(returns)),
        "max": float(np.max(returns)),
        "returns": [float(value) for value in returns],
        **({"terms": {name: float(values.mean()) for name, values in results.terms().items()}} if keys else {}),
    }


def seeds_of(seed: int, episodes: int) -> list[int]:
    """Derive the episodes' environment seeds from `seed`."""
    rng = numpy_generator(seed, generation=0, rank=0, purpose=PURPOSE)
    return [int(number) for number in rng.integers(2**31, size=episodes)]
