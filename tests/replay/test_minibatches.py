"""Minibatches: every agent passes over all of its rollout, in parts of its own size and orders of its own."""

import itertools

import numpy as np
import pytest
import torch
from helpers.worlds import P, members

from evorl.replay.rollouts import Minibatches, check_rollout
from evorl.types.outcomes import UserError


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 2, 8])
def test_each_pass_divides_the_sequences_into_parts_of_the_wanted_size(length, seed):
    """Whatever evolution has made of batch sizes and epochs."""
    rng = np.random.default_rng(seed)
    steps = length * int(rng.integers(1, 40))
    sizes = [float(size) for size in rng.uniform(0.3, 2.5 * steps, P)]
    passes = [float(epochs) for epochs in rng.uniform(0.2, 4, P)]
    minibatches = Minibatches.of(
        members(batch_size=tuple(sizes), epochs=tuple(passes)), steps, length, torch.device("cpu")
    )
    index = minibatches.draw(torch.Generator().manual_seed(seed))
    assert index.shape == minibatches.in_batch.shape
    lasts = []
    for p, (size, epochs) in enumerate(zip(sizes, passes, strict=True)):
        parts = min(steps // length, max(1, round(steps / size)))
        passes_made = max(1, round(epochs))
        lasts.append(parts * passes_made)
        assert minibatches.due[:, p].tolist() == [1] * lasts[-1] + [0] * (len(index) - lasts[-1])
        for epoch in range(passes_made):
            drawn = [index[u, p][minibatches.in_batch[u, p]] for u in range(epoch * parts, (epoch + 1) * parts)]
            assert sorted(torch.cat(drawn).tolist()) == list(range(steps // length))
            widths = [len(part) for part in drawn]
            assert max(widths) - min(widths) <= 1
    assert len(index) == max(lasts)


def test_agents_without_batch_size_or_epochs_learn_once_from_everything():
    minibatches = Minibatches.of(members(), 24, 4, torch.device("cpu"))
    assert minibatches.due.tolist() == [[1] * P]
    index = minibatches.draw(torch.Generator().manual_seed(0))
    assert index.sort(-1).values.tolist() == [[list(range(6))] * P]


def test_agents_and_passes_have_orders_of_their_own():
    minibatches = Minibatches.of(members(epochs=3), 200, 1, torch.device("cpu"))
    index = minibatches.draw(torch.Generator().manual_seed(0)).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in index}) == 3 * P
    again = minibatches.draw(torch.Generator().manual_seed(0)).flatten(0, 1)
    assert torch.equal(index, again)


@pytest.mark.parametrize("steps", [1, 12, 16, 45])
def test_what_is_refused_names_its_key_and_what_would_fit(steps):
    """Where ranks share rollouts and batches, the parts of each of these copies are what has to fit."""
    for num_envs, copies, sequence in itertools.product((1, 2, 3), (1, 2, 3), range(1, steps + 2)):
        for size in (None, *range(1, steps * num_envs + 2)):
            message = ""
            try:
                check_rollout(steps, num_envs, sequence, size, copies)
            except UserError as error:
                message = str(error)
            if steps % copies:
                assert message.startswith(f"algorithm.rollout_steps: {steps} steps cannot be shared by {copies} ranks")
                assert message.endswith(f"use a multiple of {copies * sequence}")
            elif steps % (copies * sequence):
                assert message.startswith("algorithm.sequence_length: ")
                assert message.endswith(f"use a divisor of {steps // copies}")
            elif size is None or (steps * num_envs % size == 0 and size % (copies * sequence) == 0):
                assert not message
            else:
                assert message.startswith("algorithm.batch_size: ")
                multiple = f" that is a multiple of {copies * sequence}" if copies * sequence > 1 else ""
                assert message.endswith(f"use a divisor of {steps * num_envs}{multiple}")
