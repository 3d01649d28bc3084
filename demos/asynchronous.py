"""Train a population on experience from actor processes, and evolve it, on every process that Accelerate starts.

    accelerate launch --config_file configs/accelerate/accelerate.yaml demos/asynchronous.py [--config FILE]
        [key=value ...]

This is the complete training loop, written to be copied and changed. Each rank is a learner with its own actors:
processes that act with all of its agents, each in its own environments, while the rank learns. In each generation

1. this rank's agents are stacked into a policy, which its actors follow, and a learner, which trains them;
2. actors send rollouts through shared memory, tagged with the version of their parameters;
3. the learner updates all agents with each batch that is due, and publishes the new parameters to the actors;
4. agents get their fitness (`evolution.fitness`: the mean return), from evaluation episodes that all of them play or
   from those of training (`evaluation.fitness`), and the best challenges the elite;
5. the generation's metrics are written, and the main process selects and mutates agents;
6. a checkpoint is saved with the next generation's agents, which the other ranks reload.
"""

import sys
from collections.abc import Sequence

from evorl.actors.actors import Actors
from evorl.algorithms import make_algorithm
from evorl.config.yaml import TRAINING
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
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

DEFAULT_CONFIG = TRAINING / "impala.yaml"


def main(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> Run:
    config = load_config(arguments, DEFAULT_CONFIG, asynchronous=True)
    ranks = Ranks(config.run.timeout)
    announce(config, ranks)
    seed_process(config.seed, ranks.rank)
    placement = Placement(ranks, config.population.placement, config.population.agents)
    stopwatch = Stopwatch()

    with Environments(config.environment, agents=1, num_envs=1) as one:
        algorithm = make_algorithm(config, one.interface)
        experience = algorithm.experience(placement, one.always_valid, stopwatch)

    with (
        Evaluator(config, placement, algorithm) as evaluator,
        Actors(config, placement, algorithm) as actors,
        Run(config, placement, algorithm, experience, None, stopwatch, callbacks) as run,
    ):
        for generation in run.generations():
            # Agents are separate records between generations. Stacking them trains this rank's agents as one batch.
            policy = Policy(run.agents[placement.local], algorithm, run.generator("acting"))
            learner = Learner(policy, placement.average_, stopwatch)
            experience.begin(policy, generation)
            actors.begin(policy, generation, run.carries_over, run.generation_plan.steps)

            for _ in run.steps(actors.sent_steps, recent=actors.counters.recent):
                with stopwatch("waiting"):
                    message = actors.receive(policy)
                experience.extend(message)
                actors.release(message)
                for batch in experience.take_batches():
                    experience.observe(batch, learner.update(batch))
                actors.publish(policy)

            actors.end(learner)
            experience.end(policy.agents)
            counts = gather_metrics(learner, actors.counters.pop_collected(), placement)
            figures = actors.pop_metrics(placement)
            trained = run.gather_agents(learner)
            with stopwatch("evaluation"):
                fitness = run.assign_fitness(trained, policy, counts, evaluator)
            run.record(trained, fitness, counts, figures)
            with stopwatch("evolution"):
                evolved = run.evolve(trained)
            with stopwatch("checkpoint"):
                run.agents = run.checkpoint(evolved)
    return run


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
