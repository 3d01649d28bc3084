"""Statistics of what a replay is given, by which agents normalise observations. Axes: P agents, E environments."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.ranks import Exchange
from helpers.support import agent, algorithm, lines, population, saved_agents, seen, train, vector

from evorl.replay.observations import EVERY, ObservationStatistics
from evorl.replay.statistics import Moments
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Transition

P, E, D = 2, 3, 2


def steps_of(rank, count):
    """Random steps, a fifth of which are no transitions."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        shown = torch.randn(P, E, D, generator=generator) * 3 + torch.arange(P).view(P, 1, 1)
        valid = torch.rand(P, E, generator=generator) < 0.8
        never = torch.zeros(P, E, dtype=torch.bool)
        yield Transition(seen(shown), never, torch.zeros(P, E), seen(shown + 9), never, never, valid, False)


def watching(gather, shared, count, rank=0):
    """The moments of what so many steps bring, and after how many the agents heard of them."""
    heard, now = [], 0

    def take(part, moments):
        heard.append((now, part, moments))

    parts = {"observation": vector(D)}
    buffer = ObservationStatistics(parts, gather, Stopwatch(), P if shared else 1)
    buffer.begin(SimpleNamespace(update_observation_stats=take))
    for now, transition in enumerate(steps_of(rank, count), 1):  # noqa: B007
        buffer.add(transition)
        transition.observation["observation"].fill_(torch.nan)
        transition.valid.fill_(True)
    buffer.merge_waiting()
    buffer.merge_waiting()
    return heard


def reference(ranks, shared, count):
    """Mean, variance and number of every agent's own transitions on all ranks, or of all agents'."""
    shown, valid = [[] for _ in range(P)], [[] for _ in range(P)]
    for transition in (each for rank in ranks for each in steps_of(rank, count)):
        for p in range(P):
            shown[p].append(transition.observation["observation"][p])
            valid[p].append(transition.valid[p])
    values = [torch.cat(shown[p])[torch.cat(valid[p])].double().numpy() for p in range(P)]
    values = [np.concatenate(values)] * P if shared else values
    return [(len(each), each.mean(0), each.var(0)) for each in values]


def total(heard):
    found = heard[0][2]
    for _, _, moments in heard[1:]:
        found = found.merged(moments)
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [10, EVERY, 2 * EVERY + 5])
def test_agents_hear_of_all_transitions_every_so_many_steps_and_at_the_end(shared, count):
    heard = watching(lambda numbers: numbers[None], shared, count)
    assert [when for when, _, _ in heard] == [*range(EVERY, count + 1, EVERY), *([count] if count % EVERY else [])]
    found = total(heard)
    for p, (number, mean, variance) in enumerate(reference([0], shared, count)):
        assert found.number[p] == number
        np.testing.assert_allclose(found.mean[p], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.variance[p], variance, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_all_ranks_hear_the_same(shared):
    exchange = Exchange(2)
    first, second = exchange.run(lambda rank: watching(exchange.gather(rank), shared, EVERY + 3, rank))
    for (_, _, one), (_, _, other) in zip(first, second, strict=True):
        for values, others in zip(one, other, strict=True):
            np.testing.assert_array_equal(values, others)
    for p, (number, mean, _) in enumerate(reference([0, 1], shared, EVERY + 3)):
        assert total(first).number[p] == number
        np.testing.assert_allclose(total(first).mean[p], mean, rtol=1e-5, atol=1e-6)


def test_a_network_and_its_target_read_normalised_vectors():
    dqn = algorithm("algorithm.normalize_observations=true")
    group = population([agent(id=id, dqn=dqn) for id in range(P)], dqn)
    (stack,), x = group.policy.stacks, torch.randn(P, 4, 5)
    before = [networks["q"](seen(x))["q_values"] for networks in (stack.networks, stack.target_networks)]
    mean, variance = np.arange(P * 5.0).reshape(P, 5), np.full((P, 5), 4.0)
    group.policy.update_observation_stats("observation", Moments(np.full(P, 100.0), mean, variance))
    moved = 2 * x + torch.from_numpy(mean).float().unsqueeze(1)
    for networks, expected in zip((stack.networks, stack.target_networks), before, strict=True):
        torch.testing.assert_close(networks["q"](seen(moved))["q_values"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_normalises_by_all_its_transitions(shared, in_directory):
    options = (
        "algorithm.normalize_observations=true", f"replay.shared={shared}", "evolution.selection.size=1",
        "evolution.mutation={none: 1, architecture: 0, parameters: 0, hyperparameters: 0}",
    )  # fmt: skip
    assert train("run.name=a", "population.size=2", "evolution.steps=400", "training.max_steps=300", *options) == 0
    run = in_directory / "runs" / "a"
    (row,) = lines(run / "metrics.jsonl")
    counts = [float(member.tensors["q"]["buffers"]["normal.observation.number"]) for member in saved_agents(run)]
    if shared:
        assert counts == [row["global_steps"]] * 2
    else:
        assert all(150 < count < row["global_steps"] for count in counts)


def test_waiting_observations_stay_with_their_flags_on_the_device_that_they_are_loaded_to():
    def made():
        buffer = ObservationStatistics({"observation": vector(D)}, lambda numbers: numbers[None], Stopwatch())
        buffer.begin(SimpleNamespace(agents=[None] * P))
        return buffer

    before, after, meta = made(), made(), torch.device("meta")
    for transition in steps_of(0, 3):
        before.add(transition)
    after.load_state_dict(before.state_dict(), meta)
    (transition,) = steps_of(1, 1)
    shown = {name: values.to(meta) for name, values in transition.observation.items()}
    after.add(replace(transition, observation=shown))
    assert {values.device for values in after.state_dict().values()} == {meta}
    assert {len(values) for values in after.state_dict().values()} == {4}
