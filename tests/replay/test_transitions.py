"""A replay that is filled by rollouts: what is stored, and with which first priorities."""

import numpy as np
import pytest
import torch
from helpers.prioritised import SETTINGS as PRIORITIES
from helpers.prioritised import sampler_of
from helpers.support import algorithm, config, kept, population, replay_experience, replay_of, vector

from evorl.actors.collectors import Acting, TransitionCollector
from evorl.algorithms import make_algorithm
from evorl.algorithms.apex import exploration_rates
from evorl.config.off_policy import EpsilonLadder
from evorl.envs import Environments
from evorl.population import Policy, initial_population
from evorl.replay.prioritised import EPSILON
from evorl.seeding import torch_generator

T, P, E = 8, 2, 2
SETTINGS = (
    "algorithm={name: apex_dqn, rollout_steps: 8, double: true}", "population.size=2", "replay.prioritised={}",
    "environment={id: CartPole-v1, num_envs: 2, vectorization: sync, kwargs: {max_episode_steps: 5}}",
)  # fmt: skip


@pytest.fixture
def collecting():
    """A collector of two agents, its message, and their policy."""
    settings = config(*SETTINGS)
    environments = Environments(settings.environment, P, E)
    chosen = make_algorithm(settings, environments.interface)
    generator = torch_generator(0, generation=1, rank=0, purpose="test")
    policy = Policy(initial_population(settings, chosen), chosen, generator)
    environments.begin(3, policy.agents, False)
    message = TransitionCollector.layout(policy, settings)(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    acting = Acting(settings, environments, None, policy, policy.flat, None, 1, 0)
    return TransitionCollector(acting), message, policy


def test_an_actor_gives_the_errors_of_its_own_parameters(collecting):
    collector, message, policy = collecting
    beats = []
    for _ in range(3):
        collector.collect(message, lambda: beats.append(1))
    assert len(beats) == 3 * T
    columns, seen = message.columns(["action", "reward", "terminated", "truncated", "error"]), message.observation()
    assert columns["truncated"].any(), "ends of episodes are meant to be among them"
    (stack,) = policy.stacks
    with torch.no_grad():
        for step in range(T):
            network = stack.networks["q"]
            q = network({"observation": seen["observation"][:, step]})["q_values"]
            after = network(message.next_observation(step))["q_values"].amax(-1)
            follows = after.masked_fill(columns["terminated"][:, step], 0.0)
            taken = q.gather(-1, columns["action"][:, step].unsqueeze(-1)).squeeze(-1)
            error = columns["reward"][:, step] + 0.99 * follows - taken
            torch.testing.assert_close(columns["error"][:, step].abs(), error.abs(), rtol=1e-4, atol=1e-5)


def receiving(rows):
    """A replay for the lanes of an actor, and the sampler of its priorities."""
    storage = replay_of(rows, P * E, vector(4))
    sampler = sampler_of(storage, settings=PRIORITIES)
    return replay_experience(storage, sampler=sampler, learning_starts=1, lockstep=False, period=T), sampler


def learner():
    chosen = algorithm("algorithm={name: apex_dqn, rollout_steps: 8}", "replay.prioritised={}")
    return population(initial_population(config(*SETTINGS), chosen), chosen)


@pytest.mark.parametrize("rows", [64, 20])
def test_rollouts_are_stored_as_they_were_and_drawn_first_by_the_actors_errors(collecting, rows):
    collector, message, _ = collecting
    received, sampler = receiving(rows)
    policy = learner().policy
    received.begin(policy, 1)
    expected, errors = [], []
    for _ in range(5):
        collector.collect(message, lambda: None)
        received.extend(message)
        columns = message.columns(["reward", "error"])
        expected.append(columns["reward"].transpose(0, 1).flatten())
        errors.append(columns["error"].transpose(0, 1).flatten())
    count = received.storage.drawable
    assert count == min(5 * T, rows) * P * E
    fields = kept(received.storage)
    torch.testing.assert_close(fields["reward"], torch.cat(expected)[-count:], rtol=0, atol=0)
    slots = received.storage.valid_index().numpy()
    priority = ((torch.cat(errors)[-count:].abs().double() + EPSILON) ** 0.7).numpy()
    tree = sampler.tree
    for leaves in tree.leaves:
        np.testing.assert_allclose(leaves[slots], priority)
    np.testing.assert_allclose(tree.total, priority.sum())
    assert not sampler.fresh().any()
    counted = []
    policy.acted = lambda steps: counted.append(steps.tolist())
    list(received.take_batches())
    assert counted == [[5.0 * T * E] * P]


def test_exploration_rates_go_from_end_to_end():
    ladder = EpsilonLadder(base=0.4, exponent=7)
    first, last = exploration_rates(ladder, 0, 2, 4).tolist(), exploration_rates(ladder, 1, 2, 4).tolist()
    assert [*first, *last] == pytest.approx([0.4 ** (1 + place) for place in range(8)])
    assert exploration_rates(ladder, 0, 1, 1).tolist() == pytest.approx([0.4])
