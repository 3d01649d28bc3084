"""A learner with real actors, for tests that do with them what a run may meet."""

import time

import gymnasium as gym
import psutil

from evorl.actors.actors import Actors
from evorl.algorithms import make_algorithm
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.population import Learner, Policy, initial_population
from evorl.seeding import torch_generator
from evorl.system.stopwatch import Stopwatch
from helpers.support import config

SETTINGS = (
    "algorithm={name: impala, rollout_steps: 5}", "population.size=2", "environment={id: CartPole-v1, num_envs: 2}",
    "network={hidden_sizes: [16]}",
)  # fmt: skip


class Learning:
    """A learner and its actors, in their first generation."""

    def __init__(self, *overrides, start=True):
        self.config = config(*SETTINGS, *overrides)
        placement = Placement(Ranks(), "replicated", 2)
        # Some environments are for actors alone, which fail to make them.
        known = self.config if self.config.environment.id in gym.registry else config(*SETTINGS)
        one = Environments(known.environment, 1, 1)
        self.algorithm = make_algorithm(self.config, one.interface)
        self.experience = self.algorithm.experience(placement, True, Stopwatch())
        self.agents = initial_population(self.config, self.algorithm)
        self.actors = Actors(self.config, placement, self.algorithm)
        self.placement = placement
        if start:
            self.begin(1)

    def begin(self, generation, steps=1000):
        generator = torch_generator(0, generation=generation, rank=0, purpose="test")
        self.policy = Policy(self.agents, self.algorithm, generator)
        self.learner = Learner(self.policy)
        self.experience.begin(self.policy, generation)
        self.actors.begin(self.policy, generation, False, steps)

    def learn(self, rollouts):
        for _ in range(rollouts):
            message = self.actors.receive(self.policy)
            self.experience.extend(message)
            self.actors.release(message)
            for batch in self.experience.take_batches():
                self.experience.observe(batch, self.learner.update(batch))
            self.actors.publish(self.policy)

    def learn_from(self, actor):
        """Learn until something comes from one of the actors."""
        before = self.received_from(actor)
        while self.received_from(actor) == before:
            self.learn(1)

    @property
    def processes(self):
        """The process ids of the actors."""
        return [actor.process for actor in self.actors._supervisor._actors]

    @property
    def server(self):
        """The process id of the server that forks them."""
        return self.actors._supervisor._server._process.pid

    def received_from(self, actor):
        return self.actors.counters._steps[actor]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.actors.close()


def all_gone(processes, within=5.0):
    """Whether none of these processes is there any more, after some seconds at most."""
    until = time.monotonic() + within
    while any(map(is_there, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_there, processes))


def descendants():
    """The processes below this one, by their numbers."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def is_there(process):
    """Whether a process runs; one that has ended may stay in the table until it is asked how."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
