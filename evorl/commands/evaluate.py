"""`evorl evaluate`: the return of a run's best agent on fresh episodes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from evorl.algorithms import make_algorithm
from evorl.config import AnyConfig, validate
from evorl.config.fields import BENCHMARK, RETURN
from evorl.envs import make_environments
from evorl.envs.games import is_game
from evorl.envs.tensor.sources import device_of, reserve
from evorl.envs.vector import for_evaluation
from evorl.population import Policy, check_agents
from evorl.population.evaluation import MAX_COPIES, EpisodeResults, evaluate, reported_keys
from evorl.runs.agents.elite import Score
from evorl.runs.launch import check, use_threads
from evorl.runs.reading.hub import local_run, warn_of_excluded
from evorl.runs.reading.opponents import benchmark_of, opponent_of
from evorl.runs.storage.directory import load_elite
from evorl.runs.storage.trust import refuse_code
from evorl.seeding import numpy_generator, torch_generator
from evorl.system.console import digits
from evorl.types.agents import Agent
from evorl.types.messages import on_one_line

PURPOSE = "evaluation of the elite"
"""A separate purpose makes these episodes differ from all episodes of the run, even with the run's seed."""


def evaluate_run(parsed: argparse.Namespace) -> None:
    result = evaluate_elite(parsed.run, parsed.episodes, parsed.seed, parsed.allow_code)
    if parsed.json:
        print(json.dumps(result))
        return
    ends = f"min {digits(result['min'])}, max {digits(result['max'])}"
    spread = "" if result["std"] is None else f" (standard deviation {digits(result['std'])}, {ends})"
    score = Score(result["episodes"], result["mean"], result["std"])
    described = score.described(repeats=result["episodes_repeat"])
    print(
        f"agent {result['agent']} of {on_one_line(str(result['run']))}: mean return {described}{spread}"
        + "".join(f"; mean {name} {mean:.3g}" for name, mean in result.get("terms", {}).items() if name != RETURN)
    )


def evaluate_elite(run: Path, episodes: int, seed: int, allow_code: bool = False) -> dict[str, Any]:
    """Evaluate a run's best agent on fresh episodes, without exploration. Raises UserError.

    In the result, `returns` are in the order of `seeds_of`, and `std` is their sample standard deviation; it and the
    standard error are None for one episode. `episodes_repeat` is True if episodes that began together in several copies
    were identical; those of the result were then played one after another in one copy. If fitness is more than the
    return, `terms` has the mean of the return and of each other term.
    """
    with local_run(run) as path:
        data, agent = load_elite(path)
        config = validate(data)
        refuse_code(config, allow_code)
        warn_of_excluded(run, data, config)
        reserve(config.evaluation_environment, min(episodes, MAX_COPIES), device_of(config.evaluation_environment))
        check(config, trains=False)
        results = _played(path, config, agent, episodes, seed, allow_code)
        repeats = bool(results.repeat_each_other(MAX_COPIES))
        if repeats:
            # Copies that repeat each other would count one episode many times.
            results = _played(path, config, agent, episodes, seed, allow_code, copies=1)
    returns = results.returns[0]
    means = {name: float(values.mean()) for name, values in results.terms().items()}
    score = Score.of(returns)
    return {
        "run": str(run),
        "agent": agent.id,
        "episodes": episodes,
        "seed": seed,
        "mean": score.mean,
        "std": score.std,
        "standard_error": score.standard_error,
        "min": float(np.min(returns)),
        "max": float(np.max(returns)),
        "returns": [float(value) for value in returns],
        "episodes_repeat": repeats,
        **({"terms": means} if results.reports else {}),
    }


def _played(
    run: Path, config: AnyConfig, agent: Agent, episodes: int, seed: int, allow_code: bool, copies: int = MAX_COPIES
) -> EpisodeResults:
    """The results of fresh episodes of an agent, in at most this many copies of its environment."""
    width, device = min(episodes, copies), device_of(config.evaluation_environment)
    with make_environments(
        for_evaluation(config.evaluation_environment), 1, width, device, whole_games=True
    ) as environments:
        if is_game(config.environment.id):
            interface = environments.interface
            benchmark = opponent_of(benchmark_of(config), BENCHMARK, config.environment, interface, allow_code)
            environments.set_opponents(benchmark.seat(environments.num_envs))
        algorithm = make_algorithm(config, environments.interface)
        check_agents([agent], algorithm, str(run / "elite"))
        use_threads(config, environments.interface.parts, 1, device)
        policy = Policy([agent], algorithm, torch_generator(seed, generation=0, rank=0, purpose=PURPOSE, device=device))
        keys = reported_keys(config.evolution.fitness)
        return evaluate(policy, environments, seeds_of(seed, episodes), config.evaluation.max_steps, keys)


def seeds_of(seed: int, episodes: int) -> list[int]:
    """Derive the episodes' environment seeds from `seed`."""
    rng = numpy_generator(seed, generation=0, rank=0, purpose=PURPOSE)
    return [int(number) for number in rng.integers(2**31, size=episodes)]
