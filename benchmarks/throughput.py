"""Training throughput, learning included, as one JSON line.

    OMP_NUM_THREADS=1 python benchmarks/throughput.py --config configs/training/dqn.yaml --seconds 20 [key=value ...]
    accelerate launch --config_file configs/accelerate/accelerate.yaml benchmarks/throughput.py --seconds 20

Counting starts with the first updates. The loop is that of `demos/online.py` without evaluation and evolution. For
comparison, the line includes the throughput of the environments alone, with random actions, in this process.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from evorl.algorithms import make_algorithm
from evorl.config import AnyConfig
from evorl.distributed import Placement, Ranks
from evorl.envs import SteppedEnvironments, make_environments
from evorl.population import Learner, Policy, initial_population
from evorl.runs.launch import load_config, use_threads
from evorl.runs.output.metrics import gather_metrics
from evorl.runs.program import run_program
from evorl.seeding import derive_seed, torch_generator
from evorl.system.stopwatch import Stopwatch

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "training" / "dqn.yaml"


class Trainer:
    """A population and its environments, trained without generations."""

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self.ranks = Ranks(config.run.timeout)
        self.placement = Placement(self.ranks, config.population.placement, config.population.agents)
        self.stopwatch = Stopwatch()
        self.environments = make_environments(
            config.environment, self.placement.local_size, config.environment.num_envs, self.ranks.device
        )
        use_threads(config, self.environments.interface.parts, self.ranks.on_host)
        algorithm = make_algorithm(config, self.environments.interface)
        self.experience = algorithm.experience(self.placement, self.environments.always_valid, self.stopwatch)
        generator = torch_generator(
            config.seed, generation=1, rank=self.ranks.rank, purpose="acting", device=self.ranks.device
        )
        self.policy = Policy(initial_population(config, algorithm)[self.placement.local], algorithm, generator)
        self.learner = Learner(self.policy, self.placement.average_, self.stopwatch)
        self.experience.begin(self.policy, 1)

    def begin(self) -> None:
        """Start all episodes."""
        self.state = self.policy.initial_state(self.environments.num_envs)
        self.environments.reset(
            derive_seed(self.config.seed, generation=1, rank=self.ranks.rank, purpose="environments")
        )

    def step(self) -> int:
        """Step every environment, apply the updates that are due, and return their number."""
        with self.stopwatch("acting"):
            output, self.state = self.policy.act(self.environments.observation, self.environments.started, self.state)
        with self.stopwatch("environments"):
            transition = self.environments.step(output.action)
        with self.stopwatch("sampling"):
            self.experience.add(transition, output)
        updates = 0
        for batch in self.experience.take_batches():
            self.experience.observe(batch, self.learner.update(batch))
            updates += 1
        return updates

    def run(self, seconds: float) -> None:
        """Train for `seconds` of the main process's clock, checked every 16 steps or after each rollout."""
        end = time.perf_counter() + seconds
        running = True
        while running:
            for _ in range(max(16, self.experience.period)):
                self.step()
            running = bool(self.ranks.gather(np.array([float(time.perf_counter() < end)]))[0, 0])


def environments_alone(environments: SteppedEnvironments, seconds: float) -> float:
    """Return the steps per second of all environments together with random actions."""
    space, copies = environments.interface.action, environments.agents * environments.num_envs
    space.seed(0)
    first = getattr(space, "start", 0)
    drawn = [np.stack([space.sample() - first for _ in range(copies)]) for _ in range(64)]
    shape = environments.agents, environments.num_envs
    actions = [torch.from_numpy(values).view(*shape, *values.shape[1:]) for values in drawn]
    environments.reset(0)
    environments.step(actions[-1])  # A simulator compiles its first step.
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        environments.step(actions[steps % len(actions)])
        steps += 1
    environments.pop_collected()
    return steps * copies / (time.perf_counter() - started)


def measure(config: AnyConfig, seconds: float) -> dict[str, object] | None:
    """Return the line to print on the main process, and None on other ranks."""
    trainer = Trainer(config)
    alone = environments_alone(trainer.environments, 2.0)
    trainer.begin()
    while trainer.step() == 0:
        pass
    trainer.run(min(2.0, seconds / 4))
    before = gather_metrics(trainer.learner, trainer.environments.pop_collected(), trainer.placement)
    trainer.stopwatch.seconds.clear()
    started, cpu = time.perf_counter(), time.process_time()
    trainer.run(seconds)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    counts = gather_metrics(trainer.learner, trainer.environments.pop_collected(), trainer.placement)
    rates = trainer.ranks.gather(np.array([alone]))
    cpus = trainer.ranks.gather(np.array([cpu]))
    peak = trainer.ranks.gather(np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
    if not trainer.ranks.is_main:
        return None
    return {
        "system": "evorl",
        "population": config.population.agents,
        "processes": trainer.ranks.size,
        "placement": config.population.placement,
        "agent_env_steps_per_s": round(float(counts.steps.sum()) / elapsed, 1),
        "agent_env_steps_per_cpu_s": round(float(counts.steps.sum()) / float(cpus.sum()), 1),
        "agent_updates_per_s": round(float((counts.updates - before.updates).sum()) / elapsed, 1),
        "environments_alone_per_s": round(float(rates.sum()), 1),
        "peak_rss_mb": round(float(peak.max()), 1),
        "shares": {name: round(seconds / elapsed, 3) for name, seconds in trainer.stopwatch.seconds.items()},
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=20.0)
    parsed, rest = parser.parse_known_args(arguments)
    line = measure(load_config(rest, DEFAULT_CONFIG), parsed.seconds)
    if line is not None:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
