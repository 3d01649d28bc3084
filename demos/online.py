"""Train a population online and evolve it, on every process that Accelerate starts.

    accelerate launch --config_file configs/accelerate/accelerate.yaml demos/online.py [--config FILE] [key=value ...]

This is the complete training loop, written to be copied and changed. In each generation

1. this rank's agents are stacked into a policy, which acts, and a learner, which trains them;
2. all environments step together, and every transition is stored;
3. the learner updates all agents with each batch that is due, and the experience observes the result;
4. agents get their fitness (`evolution.fitness`: the mean return), from evaluation episodes that all of them play or
   from those of training (`evaluation.fitness`), and the best challenges the elite;
5. the generation's metrics are written, and the main process selects and mutates agents;
6. a checkpoint is saved with the next generation's agents, which the other ranks reload.
"""

import sys
from collections.abc import Sequence

from evorl.algorithms import make_algorithm
from evorl.config.yaml import TRAINING
from evorl.distributed import Placement, Ranks
from evorl.envs import make_environments
from evorl.population import Learner, Policy
from evorl.population.evaluation import Evaluator
from evorl.runs.launch import load_config
from evorl.runs.output.callbacks import Callback
from evorl.runs.output.console import announce
from evorl.runs.output.metrics import gather_metrics
from evorl.runs.program import run_program
from evorl.runs.run import Run
from evorl.seeding import seed_process
from evorl.system.stopwatch import Stopwatch

DEFAULT_CONFIG = TRAINING / "dqn.yaml"


def main(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> Run:
    config = load_config(arguments, DEFAULT_CONFIG, asynchronous=False)
    ranks = Ranks(config.run.timeout)
    announce(config, ranks)
    seed_process(config.seed, ranks.rank)
    placement = Placement(ranks, config.population.placement, config.population.agents)
    stopwatch = Stopwatch()

    with make_environments(config.environment, 1, 1, ranks.device) as one:
        algorithm = make_algorithm(config, one.interface)
        experience = algorithm.experience(placement, one.always_valid, stopwatch)

    with (
        make_environments(
            config.environment, placement.local_size, config.environment.num_envs, ranks.device
        ) as environments,
        Evaluator(config, placement, algorithm) as evaluator,
        Run(config, placement, algorithm, experience, environments, stopwatch, callbacks) as run,
    ):
        for generation in run.generations():
            # Agents are separate records between generations. Stacking them trains this rank's agents as one batch.
            policy = Policy(run.agents[placement.local], algorithm, run.generator("acting"))
            learner = Learner(policy, placement.average_, stopwatch)
            experience.begin(policy, generation)
            run.set_opponents(environments)  # In a game, the league fills the other seats.
            environments.begin(run.seed("environments"), policy.agents, run.carries_over)

            # Between two of these steps, a run can be saved and resumed.
            for _ in run.steps(recent=environments.recent, parts=(policy, learner, experience)):
                with stopwatch("acting"):
                    output = policy.explore(environments.observation, environments.started)
                with stopwatch("environments"):
                    transition = environments.step(output.action)
                with stopwatch("sampling"):
                    experience.add(transition, output)
                for batch in experience.take_batches():
                    experience.observe(batch, learner.update(batch))

            experience.end(policy.agents)
            counts = gather_metrics(learner, environments.pop_collected(), placement)
            trained = run.gather_agents(learner)
            with stopwatch("evaluation"):
                fitness = run.assign_fitness(trained, policy, counts, evaluator)
            run.record(trained, fitness, counts)
            with stopwatch("evolution"):
                evolved = run.evolve(trained)
            with stopwatch("checkpoint"):
                run.agents = run.checkpoint(evolved)
    return run


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
