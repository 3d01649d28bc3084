"""Prioritised replay in runs: its checkpoints, its exchanges, and exact resumes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.prioritised import OWN, SETTINGS, E, P, Part, members, sampler_of
from helpers.ranks import Exchange
from helpers.support import algorithm, lines, output_of, replay_experience, replay_of, seen, train, vector

from evorl.distributed import Placement, Ranks
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Transition, UpdateResult
from evorl.types.outcomes import UserError


def add(experience, step, random):
    """Add a step of every environment, whose episodes begin with step 0."""
    shown, never = torch.rand(P, E, 1, generator=random), torch.zeros(P, E, dtype=torch.bool)
    started = torch.full((P, E), step == 0)
    made = Transition(seen(shown), started, shown[..., 0], seen(shown), never, never, ~never)
    experience.add(made, output_of(torch.zeros(P, E, dtype=torch.int64)))


def played(experience, policy, generation, steps, seed):
    """Play a generation, and return all that it drew."""
    random, found = torch.Generator().manual_seed(seed), []
    experience.begin(policy, generation)
    for step in range(steps):
        add(experience, step, random)
        for batch in experience.take_batches():
            found.append((batch.observation["observation"].clone(), batch.weight.clone()))
            errors = batch.observation["observation"][..., 0] * torch.tensor([[1.0], [3.0]])
            experience.observe(batch, UpdateResult(batch.due, errors))
    experience.end(policy.agents)
    return found


def policy_of(*ids):
    agents = members(*ids, batch_size=(6.0, 6.0))
    for agent in agents:
        agent.hyperparameters["learn_step"] = 2.0
        agent.state = SimpleNamespace(update_debt=0.0)
    return SimpleNamespace(agents=agents, acted=lambda steps: None)


def prioritised_experience(part=0, settings=SETTINGS, rows=7, **options):
    storage = replay_of(rows, P * E, vector(1))
    return replay_experience(
        storage, sampler=sampler_of(storage, part, settings), learning_starts=1, lockstep=False, **options
    )


def test_what_was_written_since_the_last_exchange_is_in_a_checkpoint_too():
    first, second = Part(rows=4), Part(rows=4)
    for rows in (3, 4, 9):
        for _ in range(rows):
            first.write(valid=0.8)
        second.storage.load_state_dict(first.storage.state_dict())
        second.sampler.load_state_dict(first.sampler.state_dict())
        leaves = [part.sampler.tree.leaves for part in (first, second)]
        assert np.array_equal(*leaves)
        assert np.flatnonzero(leaves[0][0]).tolist() == sorted(first.drawable())
        second = Part(rows=4)


@pytest.mark.parametrize("settings", [SETTINGS, OWN])
def test_a_restored_replay_draws_as_the_one_that_went_on(settings):
    first, second = (prioritised_experience(settings=settings) for _ in range(2))
    played(first, policy_of(0, 1), 1, 17, seed=1)
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for generation, ids in ((2, ((2, 1), 1)), (3, (1, (3, 2)))):
        went_on, restored = (played(each, policy_of(*ids), generation, 9, seed=generation) for each in (first, second))
        assert len(went_on) >= 13
        torch.testing.assert_close(went_on, restored, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("priorities", lambda x: x * torch.nan, "a priority is not finite"),
        ("priorities", lambda x: x[:, 1:], "it should be"),
        ("priorities.maximum", lambda x: x * torch.inf, "a priority is not finite"),
        ("priorities.maximum", lambda x: x[:1], "it should be"),
        ("priorities.agents", lambda x: None, "missing"),
        ("priorities.more", lambda x: torch.zeros(3), "not expected"),
    ],
)
def test_priorities_that_no_sampler_gave_are_refused(name, change, match):
    first, second = prioritised_experience(), prioritised_experience()
    played(first, policy_of(0, 1), 1, 17, seed=1)
    tensors = first.state_dict()
    changed = change(tensors.get(name))
    tensors = {key: value for key, value in (tensors | {name: changed}).items() if value is not None}
    with pytest.raises(UserError, match=f"the replay: .*({match})"):
        second.load_state_dict(tensors)


def test_a_uniform_replay_takes_no_priorities():
    first = prioritised_experience()
    played(first, policy_of(0, 1), 1, 5, seed=1)
    other = replay_experience(replay_of(7, P * E, vector(1)), learning_starts=1, lockstep=True)
    with pytest.raises(UserError, match="'priorities' is not expected here"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("algorithm={name: apex_dqn, rollout_steps: 16}", "actors={count: 1}"), 1024),
        (("algorithm.name=dqn",), 1000),
        (("algorithm.name=dqn", "environment.num_envs=48"), 1008),
    ],
)
def test_importance_counts_the_steps_that_a_generation_really_has(settings, steps):
    chosen = algorithm("replay.prioritised={}", "environment.num_envs=8", "evolution.steps=1000", *settings)
    experience = chosen.experience(Placement(Ranks(), "replicated", P), True, Stopwatch())
    assert experience.sampler._generation_steps == steps


def test_ranks_make_one_exchange_for_each_vector_step():
    ranks, calls = 2, [0, 0]
    exchange = Exchange(ranks)

    def work(rank):
        inner = exchange.gather(rank)

        def gather(numbers):
            calls[rank] += 1
            return inner(numbers)

        experience = prioritised_experience(rank, gather=gather)
        return played(experience, policy_of(0, 1), 1, 12, seed=rank)

    first, second = exchange.run(work)
    assert calls == [13, 13], "and one to begin with"
    assert len(first) == len(second) == 18


@pytest.mark.parametrize("shared", [True, False])
def test_a_prioritised_run_resumes_exactly(in_directory, shared):
    settings = (
        f"replay={{n_step: 3, shared: {str(shared).lower()}, capacity: 300, learning_starts: 20}}",
        "replay.prioritised={exponent: 0.7, importance_exponent: {start: 0.7, end: 0.7}}",
        "evolution.mutation={none: 0.5, architecture: 0.5, parameters: 0.5, hyperparameters: 0.5}",
    )
    assert train("run.name=a", *settings) == 0
    for steps in (80, 120):
        assert train("run.name=b", "run.resume=auto", f"training.max_steps={steps}", *settings) == 0
    first, second = (
        [{name: row[name] for name in ("fitness", "metrics", "mutations")} for row in lines(path)]
        for path in (in_directory / "runs" / name / "metrics.jsonl" for name in "ab")
    )
    assert len(first) > 2
    assert first == second


def test_results_belong_to_their_batches_in_whatever_order_they_are_known():
    def priorities(order):
        experience, random = prioritised_experience(), torch.Generator().manual_seed(0)
        policy = policy_of(0, 1)
        for agent in policy.agents:
            agent.hyperparameters["learn_step"] = 0.5
        experience.begin(policy, 1)
        for step in range(5):
            add(experience, step, random)
            batches = list(experience.take_batches())
            # Each draw has errors of its own, and no row is drawn twice with different ones.
            for batch in batches[::order]:
                errors = batch.observation["observation"][..., 0]
                experience.observe(batch, UpdateResult(batch.due, errors))
        assert len(batches) > 1
        return experience.state_dict()

    forwards, backwards = priorities(1), priorities(-1)
    assert any("priorit" in name for name in forwards)
    for name, values in forwards.items():
        assert torch.equal(values, backwards[name]), name
