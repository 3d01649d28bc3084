"""Time of one evolution: select, mutate, write the checkpoint with a full replay, reload. Prints one JSON line.

OMP_NUM_THREADS=1 python benchmarks/experiments/evolution.py population.size=16
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from evorl.algorithms import make_algorithm
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.runs.launch import load_config
from evorl.runs.program import run_program
from evorl.runs.run import Run
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import PolicyOutput, Transition

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "training" / "dqn.yaml"
GENERATIONS = 20


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = load_config([*arguments, f"run.directory={directory}", "tracking.backends=[]"], DEFAULT_CONFIG)
        placement = Placement(Ranks(), config.population.placement, config.population.agents)
        environments = Environments(config.environment, 1, 1)
        algorithm = make_algorithm(config, environments.interface)
        experience = algorithm.experience(placement, environments.always_valid, Stopwatch())
        streams = (config.population.agents, config.environment.num_envs)
        flags = torch.zeros(streams, dtype=torch.bool)
        seen = {"observation": torch.randn(*streams, *environments.interface.parts["observation"].shape)}
        transition = Transition(seen, flags, torch.randn(streams), seen, flags, flags, ~flags)
        none = torch.zeros(*streams, 0, 0)
        for _ in range(config.replay.capacity // (streams[0] * streams[1])):
            experience.add(transition, PolicyOutput(torch.zeros(streams, dtype=torch.int64), {}, none, none))

        run = Run(config, placement, algorithm, experience, environments, Stopwatch())
        rng, seconds = np.random.default_rng(0), []
        for generation in range(1, GENERATIONS + 1):
            for agent in run.agents:
                agent.fitness = float(rng.normal())
            started = time.perf_counter()
            run.generation = run.progress.generation = generation
            run.agents = run.checkpoint(run.evolve(run.agents))
            seconds.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in next((run.path / "checkpoints").iterdir()).iterdir())
    line = {
        "agents": config.population.agents,
        "replay": config.replay.capacity,
        "checkpoint_mb": round(size / 2**20, 2),
        "median_s": round(statistics.median(seconds), 4),
        "max_s": round(max(seconds), 4),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
