"""Prioritised replay on two real processes."""

import pytest

PROGRAM = """
import numpy as np, torch
from helpers.support import agent, replay_of, vector
from evorl.distributed import Placement, Ranks, shutdown
from evorl.config.learning import ImportanceExponent, Prioritised
from evorl.replay.prioritised import PrioritisedSampler
from evorl.types.batches import UpdateResult

ranks, streams = Ranks(timeout=60), 6
gather = Placement(ranks, "replicated", 2).gather_copies
storage = replay_of(5 + 4 * ranks.rank, streams, vector(1))
settings = Prioritised(exponent=0.7, importance_exponent=ImportanceExponent(start=0.4, end=0.4))
place = {"seed": 3, "rank": ranks.rank, "part": ranks.rank, "split_batches": False}
sampler = PrioritisedSampler(storage, 2, settings, shared=True, generation_steps=1, max_steps=1, **place)
sampler.begin([agent(id=id, batch_size=16.0) for id in range(2)], 1, ranks.size)
random = torch.Generator().manual_seed(ranks.rank)
for step in range(25):
    shown, never = {"observation": torch.zeros(streams, 1)}, torch.zeros(streams, dtype=torch.bool)
    columns = {"action": torch.zeros(streams).long(), "reward": torch.zeros(streams), "terminated": never}
    valid = torch.rand(streams, generator=random) < 0.9
    storage.write(shown, columns, next_observation=shown, valid=valid, started=never, ended=never)
    sampler.sync(np.ones(2), np.zeros(2), gather(sampler.local_totals()))
    union = [part for part in gather(np.pad(sampler.tree.leaves, ((0, 0), (0, 64)))[:, :64])]
    union = np.concatenate(union, -1)
    slots, weight, _ = sampler.draw(2)
    assert gather((weight > 0).sum(-1).numpy()).sum(0).tolist() == [[32, 32]] * 2
    for p in range(2):
        every = union[p][union[p] > 0]
        weights = (len(every) * every / every.sum()) ** -0.4
        mine = sampler.tree.leaves[p, slots[:, p].numpy()]
        expected = (len(every) * mine / every.sum()) ** -0.4 / weights.max() / 16
        found = weight[:, p].numpy()
        assert np.abs(found - expected)[found > 0].max() < 1e-6 * expected.max()
    for update in range(2):
        errors = torch.randn(slots.shape[1:], generator=random) * 3.0 ** (step % 3)
        sampler.observe(update, UpdateResult(torch.ones(2), errors))
if ranks.is_main:
    print("as one buffer")
shutdown()
"""


@pytest.mark.two_process
def test_two_ranks_draw_as_one_central_buffer(tmp_path, forked_launch):
    done = forked_launch(tmp_path, instead=PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("as one buffer") == 1
