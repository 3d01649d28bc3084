"""What actors and their learner know of each other, also where one of them hangs."""

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.kinds import made, rollout_batch
from helpers.learning import SETTINGS, Learning, all_gone, descendants
from helpers.support import agent, config, first_architecture, population

from evorl.actors import supervisor
from evorl.actors.actor import Actor
from evorl.actors.actors import Counters
from evorl.actors.memory import Board, Description, SharedMemory
from evorl.distributed import Ranks
from evorl.envs.episodes import Recent
from evorl.population import Policy
from evorl.types.outcomes import RunFailed

APEX = (
    "algorithm={name: apex_dqn}", "replay={prioritised: {}, learning_starts: 10000}", "environment.id=CartPole-v1",
)  # fmt: skip
HANGING = "environment={id: 'helpers.faults:Hanging-v0', num_envs: 2, vectorization: async}"
SHARED = "algorithm={name: a3c_shared, rollout_steps: 5}"
ON_CPU = {"learner_device": "cpu"}


@pytest.mark.parametrize("name", ["impala", "appo", "a3c"])
def test_advantages_are_scaled_where_that_is_set(name):
    found = {}
    for scaled in ("false", "true"):
        settings = ("rollout_steps=6", "sequence_length=null", f"normalize_advantage={scaled}")
        algorithm = made(name, *(f"algorithm.{each}" for each in settings))
        together = population([agent(id=id, dqn=algorithm) for id in range(2)], algorithm)
        (stack,) = together.policy.stacks
        batch = rollout_batch(algorithm, together.policy.agents, size=4, length=6)
        never = torch.zeros(batch.weight.shape, dtype=torch.bool)
        numbers = {name: batch.columns[of] for name, of in (("reward", "advantage"), ("next_value", "return"))}
        flags = {"terminated": never, "truncated": never, "valid": ~never, "entropy_scale": torch.ones(never.shape)}
        batch = replace(batch, columns={**batch.columns, **numbers, **flags})
        outputs = stack.networks["policy"](batch.observation, batch.recurrent)
        likelihood = algorithm.distribution.likelihood(outputs, None, batch.columns["unclipped_action"])
        # On-policy, since importance weights multiply what is scaled; APPO's are those of its target network.
        acting = (stack.target_networks if name == "appo" else stack.networks)["policy"](batch.observation)
        log_prob = algorithm.distribution.log_prob(acting, None, batch.columns["unclipped_action"])
        batch.columns["log_prob"] = log_prob.detach()
        batch = replace(batch, columns={**batch.columns, **algorithm.batch_targets(stack, batch)})
        found[scaled] = algorithm.with_targets(stack, batch, likelihood, outputs["value"].squeeze(-1)).columns
        if name == "impala":  # Explained variance is that of these values, not of the actor's older ones.
            torch.testing.assert_close(found[scaled]["value"], outputs["value"].squeeze(-1).detach())
    scaled, bare = (found[each]["advantage"] for each in ("true", "false"))
    assert scaled.mean(-1).abs().max() < 1e-5 < bare.mean(-1).abs().max()
    torch.testing.assert_close(scaled.var(-1, correction=0), torch.ones(2), rtol=1e-3, atol=0)


def test_the_learner_counts_the_updates_that_actors_make_to_shared_parameters_and_loads_their_result():
    lockstep = "actors={count: 2, lockstep: true}"
    with Learning(SHARED, lockstep, start=False) as learning:
        # No fifth rollout, whose update an actor could make before the parameters are compared.
        learning.begin(1, steps=4 * 5)
        before = learning.policy.flat.detach().clone()
        learning.learn(4)
        torch.testing.assert_close(learning.policy.flat, before, rtol=0, atol=0)
        learning.actors.end(learning.learner)
        assert not torch.equal(learning.policy.flat, before)
        counted = learning.learner.metrics()
        assert counted.updates.tolist() == counted.counts["loss"].tolist() == [4, 4]
        assert [agent.state.updates["policy"] for agent in learning.learner.to_agents()] == [4, 4]


def test_actors_that_share_parameters_anneal_the_learning_rate_by_the_steps_of_all_of_them():
    annealed = (SHARED, "algorithm.annealing=true", "training.max_steps=20", "actors={count: 2, lockstep: true}")
    with Learning(*annealed, start=False) as learning:
        learning.begin(1, steps=6 * 5)
        flat, states = learning.actors._board.empty()
        learning.actors._board.fetch(flat, states, 1)
        parameters = [flat.clone()]
        for _ in range(2):
            learning.learn(3)
            learning.actors._board.fetch(flat, states, 1)
            parameters.append(flat[: len(learning.policy.flat)].clone())
        names = list(learning.algorithm.initial_state())
        counted = learning.policy.acting_states()["steps"]
        torch.testing.assert_close(states[names.index("steps")], counted, rtol=0, atol=0)
        assert counted.min() > 40
    first, trained, last = (each[: len(parameters[1])] for each in parameters)
    assert not torch.equal(first, trained)
    torch.testing.assert_close(trained, last, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["a3c", "a3c_shared"])
def test_agents_normalise_by_what_actors_saw_that_sent_no_observations(name):
    settings = f"algorithm={{name: {name}, rollout_steps: 5, normalize_observations: true}}"
    with Learning(settings, "actors={count: 2, lockstep: true}", start=False) as learning:
        learning.begin(1, steps=4 * 5)
        learning.learn(4)
        learning.actors.end(learning.learner)
        statistics = learning.policy.stacks[0].networks["policy"].buffers.views
        assert statistics["normal.observation.number"].flatten().tolist() == [4 * 5 * 2] * 2
        assert statistics["normal.observation.variance"].min() > 0


@pytest.mark.parametrize(("copies", "first", "count"), [(1, 0, 4), (4, 8, 16)])
def test_environments_explore_differently_among_those_of_the_same_agents(copies, first, count):
    """The third of four ranks with two actors of two environments. Ranks with agents of their own count alone."""
    apex = config(*APEX, "actors.count=2")
    context = {"config": apex.to_yaml(), "agents": 1, "rank": 2, "copies": copies, **ON_CPU}
    board, memory = Board(2), SharedMemory()
    actors = [Actor(context, index, 0, board.memory.descriptor, board.lock, memory.descriptor) for index in range(2)]
    rates = [rate for actor in actors for rate in actor._own_state["epsilon"].flatten().tolist()]
    assert rates == pytest.approx([0.4 ** (1 + 7 * place / (count - 1)) for place in range(first, first + 4)])


def test_actors_see_what_acting_changes_before_the_first_update():
    ddpg = ("algorithm={name: apex_ddpg}", "environment.id=Pendulum-v1")
    with Learning(*APEX, *ddpg) as learning:
        learning.learn(6)
        assert learning.policy.version == 0
        flat, states = learning.actors._board.empty()
        assert learning.actors._board.fetch(flat, states, 1) == 0
        names = list(learning.algorithm.initial_state())
        assert states[names.index("steps")].tolist() == [6 * 16 * 2] * 2


@pytest.mark.parametrize(("fetch_steps", "staleness"), [(5, 0), (6, 1), (15, 2)])
def test_actors_fetch_parameters_after_the_configured_steps(fetch_steps, staleness):
    """Each rollout of 5 steps has an update, and the actor waits for it."""
    actors = f"actors={{count: 1, lockstep: true, fetch_steps: {fetch_steps}}}"
    with Learning("algorithm={name: impala, rollout_steps: 5}", actors, start=False) as learning:
        learning.begin(1, steps=5 * 7)
        learning.learn(7)
        figures = learning.actors.pop_metrics(learning.placement)
    assert figures["max_staleness"] == staleness


@pytest.mark.parametrize(("device", "stacks"), [("cpu", 2), ("cuda", 1)])
def test_actors_group_agents_as_the_learner_on_its_device_does(device, stacks):
    """Parameters arrive in the layout of the learner, which groups more agents on a GPU."""
    impala = config(*SETTINGS, "actors.count=1", "network.hidden_sizes=[16, 16]")
    context = {"config": impala.to_yaml(), "agents": 2, "rank": 0, "copies": 1}
    board, memory = Board(1), SharedMemory()
    with Actor(
        context | {"learner_device": device}, 0, 0, board.memory.descriptor, board.lock, memory.descriptor
    ) as actor:
        algorithm = actor._algorithm
        first = first_architecture(algorithm)
        deep = [replace(first, hidden_sizes=(width, width)) for width in (16, 256)]
        agents = [agent(each, id=id, dqn=algorithm) for id, each in enumerate(deep)]
        generator = torch.Generator()
        learner = Policy(agents, algorithm, generator, planned_for=torch.device(device))
        states = list(learner.acting_states().values())
        memory.grow(2**20)
        board.describe(Description(1, agents, False), len(learner.flat), len(states))
        board.publish(learner.flat, states, 0)
        actor._begin()
        policy = actor._acting.policy
        assert len(policy.stacks) == stacks
        assert torch.equal(policy.flat, learner.flat)


def test_episodes_of_received_rollouts_count_and_discarded_ones_are_counted():
    counters = Counters(actors=1, agents=2)
    counts = np.array([[5.0, 5], [30, 0], [2, 0], [3, 1], [9, 0]])
    counters.received(0, counts, staleness=1, waiting=0)
    counters.received(0, counts, staleness=3, waiting=0)
    counters.discarded()
    assert counters.recent() == Recent(episodic_return=15, episodic_length=4.5)
    assert np.stack(counters.pop_collected()).tolist() == (2 * counts).tolist()
    figures = counters.pop(SimpleNamespace(ranks=Ranks()), restarts=0)
    assert (figures["discarded_old"], figures["rollouts"]) == (1, 2)
    assert (figures["staleness"], figures["max_staleness"]) == (2, 3)


def test_no_actor_writes_into_the_slots_of_another_that_are_larger_now():
    with Learning("algorithm={name: a3c, rollout_steps: 5}", "actors={count: 2, lockstep: true}") as learning:
        for process in learning.processes:
            os.kill(process, signal.SIGSTOP)  # They would write into their messages meanwhile.
        late = learning.actors._messages[2]
        wider = replace(learning.agents[0].architectures["policy"], hidden_sizes=(64,))
        learning.agents = [agent(wider, id=id, dqn=learning.algorithm) for id in (7, 8)]
        learning.begin(2)
        others = [learning.actors._messages[number] for number in (0, 1)]
        before = [{name: values.clone() for name, values in message.gradients.items()} for message in others]
        for values in (*late.gradients.values(), late.counts):
            values.fill_(-9)
        assert before[0]["policy"].numel() > late.gradients["policy"].numel()
        for message, kept in zip(others, before, strict=True):
            torch.testing.assert_close(message.gradients, kept)
        for process in learning.processes:
            os.kill(process, signal.SIGCONT)


def test_an_actor_whose_environments_process_hangs_is_replaced_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE", 10.0)
    monkeypatch.setattr(supervisor, "RESTARTS", 0)
    others = descendants()
    with Learning(HANGING) as learning:
        until, family = time.monotonic() + 30, set()
        # The process that forks actors, an actor, and one for each of its environments.
        while len(family) < 2 + 2 * 2 and time.monotonic() < until:
            family = descendants() - others
            time.sleep(0.01)
        with pytest.raises(RunFailed, match=r"actor 0 ended 1 times .*; it took no step for 10 s"):
            learning.learn(1000)
    assert len(family) == 6
    assert all_gone(family)
