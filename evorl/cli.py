"""`evorl`: look at what a run has left behind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evorl.algorithms import SETTINGS, make_algorithm
from evorl.config import validate
from evorl.envs import Environments
from evorl.evaluation import MOST_COPIES, evaluate, whole_games
from evorl.launch import check, run_program
from evorl.population import Population, check_agents
from evorl.randomness import derive_seed, torch_generator
from evorl.run import load_elite


def evaluate_elite(run: Path, episodes: int, seed: int) -> dict[str, float | int | str]:
    """Returns of a run's best agent on fresh episodes, without exploration. Raises UserError."""
    data, agent = load_elite(run)
    config = check(validate(data, SETTINGS))
    environments = Environments(whole_games(config.environment), 1, min(episodes, MOST_COPIES))
    algorithm = make_algorithm(config, environments.interface)
    check_agents([agent], algorithm, str(run / "elite"))
    generator = torch_generator(seed, generation=0, rank=0, purpose="evaluation of the elite")
    population = Population([agent], algorithm, generator=generator)
    # A purpose of its own keeps these episodes apart from all that the run has seen, also with the run's seed.
    first = derive_seed(seed, generation=0, rank=0, purpose="evaluation of the elite")
    returns = evaluate(population, environments, episodes, first, config.evaluation.max_steps)[0]
    environments.close()
    return {
        "run": str(run),
        "agent": agent.id,
        "episodes": episodes,
        "seed": seed,
        "mean": float(np.mean(returns)),
        "std": float(np.std(returns)),
        "min": float(np.min(returns)),
        "max": float(np.max(returns)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evorl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("evaluate", help="the best agent's return on fresh episodes")
    command.add_argument("run", type=Path, help="the run's directory")
    command.add_argument("--episodes", type=_count, default=100)
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is out of range; it must be at least 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is out of range; it must be at least 1")
    return value


def run_command(arguments: Sequence[str]) -> None:
    """What the command line asks for. Raises UserError."""
    parsed = _parser().parse_args(arguments)
    result = evaluate_elite(parsed.run, parsed.episodes, parsed.seed)
    if parsed.json:
        print(json.dumps(result))
        return
    print(
        f"agent {result['agent']} of {result['run']}: mean return {result['mean']:.1f} ± {result['std']:.1f} "
        f"(min {result['min']:.1f}, max {result['max']:.1f}) over {result['episodes']} fresh episodes"
    )


def main() -> int:
    """The console script."""
    return run_program(run_command, sys.argv[1:])
