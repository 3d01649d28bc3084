"""With `split_batches` any number of ranks makes the updates that one makes, with batches of the same size."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.ranks import Exchange
from helpers.support import (
    ROOT,
    SMALL,
    agent,
    algorithm,
    batch_of,
    fields_of,
    lines,
    output_of,
    population,
    replay_experience,
    replay_of,
    seen,
    train,
    uniform_samplers,
    vector,
)
from helpers.worlds import E, Group, P, T, World, members, play, rollout_experience

from evorl.replay.rollouts import Minibatches
from evorl.runs.launch import load_config
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Transition
from evorl.types.outcomes import UserError


def replay(gather, lockstep, part):
    return replay_experience(
        replay_of(16, 6, vector(2)), learning_starts=1, gather=gather, lockstep=lockstep, part=part,
        split_batches=True, rank=part,
    )  # fmt: skip


def transition(generator, envs=3):
    flags = torch.zeros(2, envs, dtype=torch.bool)
    shown = torch.rand(2, envs, 2, generator=generator)
    return Transition(seen(shown), flags, shown[..., 0], {"observation": shown + 1}, flags, flags, ~flags)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replay_gives_as_many_updates_and_draws_for_each_global_step_on_any_number_of_ranks(ranks, lockstep):
    """One of the agents has a learn step and a batch of its own, as after a mutation."""
    exchange, steps = Exchange(ranks), 12
    learn_step, batch_size = np.array([5.0, 7.5]), np.array([6, 3])

    def work(rank):
        experience = replay(exchange.gather(rank), lockstep, rank)
        numbers = zip(learn_step, batch_size, strict=True)
        agents = [agent(id=id, learn_step=wait, batch_size=float(size)) for id, (wait, size) in enumerate(numbers)]
        experience.begin(SimpleNamespace(agents=agents, acted=lambda steps: None), 1)
        generator, batches = torch.Generator().manual_seed(rank), []
        for _ in range(steps):
            experience.add(transition(generator), output_of(torch.zeros(2, 3, dtype=torch.int64)))
            batches += list(experience.take_batches())
        return batches

    everyones = exchange.run(work)
    made = sum(batch.due for batch in everyones[0])
    assert made.tolist() == np.floor(steps * 3 * ranks / learn_step + 1e-9).tolist()
    for update in zip(*everyones, strict=True):
        drawn = sum((batch.weight > 0).sum(1) for batch in update)
        assert drawn.tolist() == batch_size.tolist()
        mean = sum(batch.weight.sum(1) for batch in update) / ranks
        torch.testing.assert_close(mean, torch.ones(2))
        assert all(batch.weight.shape[1] for batch in update), "also a rank without a draw gives a batch"


def test_a_rank_on_which_no_draw_falls_takes_part_with_nothing():
    parts = [sampler.draw(1) for sampler in uniform_samplers((5, 5, 5, 5), 1)]
    assert [slots.shape for slots, *_ in parts] == [(1, 1, 1)] * 4
    assert sorted(float(weight.sum()) for _, weight, _ in parts) == [0, 0, 0, 4]


def test_the_average_gradient_of_two_ranks_is_that_of_one_rank_that_drew_the_same():
    """The agents differ in their batch sizes; one of an odd size falls on the ranks unequally."""
    dqn, exchange = algorithm(), Exchange(2)
    agents = [agent(id=0, dqn=dqn, batch_size=6.0), agent(id=1, dqn=dqn, batch_size=3.0)]
    generator = torch.Generator().manual_seed(3)
    rows = {
        "observation.observation": torch.randn(40, 5, generator=generator),
        "next_observation.observation": torch.randn(40, 5, generator=generator),
        "action": torch.randint(3, (40,), generator=generator),
        "reward": torch.randn(40, generator=generator),
        "terminated": torch.rand(40, generator=generator) < 0.2,
    }

    def draw(rank):
        index, weight, _ = uniform_samplers((10, 30), 6, 3)[rank].draw(1)
        index = index[0] + (10 if rank else 0)
        return batch_of({name: value[index] for name, value in rows.items()}, weight[0], torch.ones(2))

    def learn(rank):
        together = population(agents, dqn, average=exchange.average(rank))
        together.update(draw(rank))
        return together.to_agents()

    first, second = exchange.run(learn)
    parts = [draw(0), draw(1)]
    alone = []
    for place, size in enumerate((6, 3)):
        fields = {
            name: torch.cat([fields_of(part)[name][place][part.weight[place] > 0] for part in parts])[None]
            for name in rows
        }
        assert fields["reward"].shape == (1, size)
        single = population([agents[place]], dqn)
        single.update(batch_of(fields, torch.full((1, size), 1 / size), torch.ones(1)))
        alone += single.to_agents()
    for one, other, expected in zip(first, second, alone, strict=True):
        torch.testing.assert_close(one.tensors, other.tensors, rtol=0, atol=0)
        torch.testing.assert_close(one.tensors, expected.tensors)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("next_step", [False, True])
def test_minibatches_of_two_ranks_weigh_and_normalise_as_one(normalize, next_step):
    """Against a loop over the steps of both ranks; steps that were resets count nowhere."""
    exchange = Exchange(2)

    def work(rank, normalize):
        settings = {"normalize_advantage": normalize, "copies": 2}
        experience = rollout_experience(gather=exchange.gather(rank), rank=rank, **settings)
        experience.begin(Group(members(batch_size=(8.0, 5.0, 32.0), epochs=2.0)), 1)
        rollouts = play(experience, World(seed=rank, next_step=next_step))
        assert len(rollouts) == 2
        return [batch for batches in rollouts for batch in batches]

    plain = exchange.run(lambda rank: work(rank, False))
    found = exchange.run(lambda rank: work(rank, normalize))
    sizes = set()
    for one, other, *raw in zip(*found, *plain, strict=True):
        for p in range(P):
            counted = [batch.weight[p] > 0 for batch in (one, other)]
            advantages = torch.cat(
                [fields_of(batch)["advantage"][p][of] for batch, of in zip(raw, counted, strict=True)]
            )
            expected = advantages
            if normalize:
                expected = (advantages - advantages.mean()) / (advantages.var(correction=0) + 1e-8).sqrt()
            both = [fields_of(batch)["advantage"][p][of] for batch, of in zip((one, other), counted, strict=True)]
            torch.testing.assert_close(torch.cat(both), expected, rtol=1e-4, atol=1e-5)
            means = [(batch.weight[p] * fields_of(batch)["advantage"][p] ** 3).sum() for batch in (one, other)]
            torch.testing.assert_close(sum(means) / 2, (expected**3).mean(), rtol=1e-4, atol=1e-5)
            sizes.add((p, len(advantages)))
    if not next_step:
        assert {size for p, size in sizes if p == 0} == {8}
        assert {size for p, size in sizes if p == 1} <= {4, 6}, "parts of 5 steps, as equal as they can be"
        assert {size for p, size in sizes if p == 2} == {32}


def test_an_algorithm_divides_its_rollouts_and_minibatches_over_two_ranks():
    """Two rollouts of 16 steps, 8 on each rank, of 2 environments; 8 updates from each, of 8 steps over both ranks."""
    ppo = algorithm("algorithm={name: ppo, rollout_steps: 16, batch_size: 8, epochs: 2, split_batches: true}")
    exchange = Exchange(2)

    def work(rank):
        ranks = SimpleNamespace(rank=rank, size=2, on_host=2, device=torch.device("cpu"))
        placement = SimpleNamespace(ranks=ranks, copies=2, is_sharded=False, gather_copies=exchange.gather(rank))
        experience = ppo.experience(placement, True, Stopwatch())
        assert experience.period == T
        experience.begin(Group(members(batch_size=8.0, epochs=2.0)), 1)
        return play(experience, World(seed=rank))

    for rollouts in exchange.run(work):
        assert [len(batches) for batches in rollouts] == [8, 8]
        for batch in rollouts[0] + rollouts[1]:
            torch.testing.assert_close(batch.weight, torch.full((P, 4), 2 / 8))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rollouts_give_as_many_updates_for_each_global_step_on_any_number_of_ranks(ranks):
    agents = members(batch_size=(8.0, 16.0, 32.0), epochs=(1.0, 3.0, 2.0))
    whole = Minibatches.of(agents, 64 * E, 2, torch.device("cpu"))
    part = Minibatches.of(agents, 64 * E // ranks, 2, torch.device("cpu"), copies=ranks)
    assert part.due.tolist() == whole.due.tolist()
    assert (part.in_batch.sum(-1) * ranks)[whole.due > 0].tolist() == whole.in_batch.sum(-1)[whole.due > 0].tolist()


@pytest.mark.parametrize(
    ("placement", "says"), [("replicated", "rollout_steps: 9 steps cannot be shared by 2 ranks"), ("sharded", None)]
)
def test_a_launch_that_cannot_share_is_refused_before_anything_trains(placement, says, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = "algorithm={name: a2c, rollout_steps: 9, split_batches: true}"
    arguments = ["--config", str(SMALL), "replay={}", shared, f"population.placement={placement}"]
    if says is None:
        assert load_config(arguments, ROOT).algorithm.split_batches
        return
    with pytest.raises(UserError, match=says):
        load_config(arguments, ROOT)


@pytest.mark.two_process
def test_two_processes_make_the_updates_that_one_makes(tmp_path, monkeypatch, forked_launch):
    same = (
        "run.name=a", "algorithm={batch_size: 9, learn_step: 3, split_batches: true}",
        "evolution.mutation={none: 1, architecture: 0, parameters: 0, hyperparameters: 0}",
    )  # fmt: skip
    forked_launch.well(tmp_path, *same, "environment={id: CartPole-v1, num_envs: 2, vectorization: sync}")
    two = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    assert train(*same, "environment={id: CartPole-v1, num_envs: 4, vectorization: sync}") == 0
    one = lines(tmp_path / "alone" / "runs" / "a" / "metrics.jsonl")
    for key in ("agent_steps", "global_steps", "updates"):
        assert [row[key] for row in two] == [row[key] for row in one]
    assert sum(row["updates"][0] for row in one) > 30
