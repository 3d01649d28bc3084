"""Agents, settings and parts of a prioritised replay, for tests."""

from types import SimpleNamespace

import numpy as np
import torch

from evorl.config.learning import ImportanceExponent, Prioritised
from evorl.replay.prioritised import PrioritisedSampler
from helpers.support import replay_of, vector

P, E = 2, 3
PRIORITISED = Prioritised(exponent=0.7, importance_exponent=ImportanceExponent(start=0.4, end=1.0))
SETTINGS = {"prioritised": PRIORITISED, "shared": True, "generation_steps": 100, "max_steps": 1000}
OWN = SETTINGS | {"shared": False}
UNIFORM = OWN | {"prioritised": None}
ONES = torch.ones(P)


def members(*ids, batch_size=(40.0, 24.0)):
    """Agents of these ids, or ids with those of parents."""
    pairs = [each if isinstance(each, tuple) else (each, None) for each in ids or range(P)]
    numbers = zip(pairs, batch_size, strict=True)
    return [
        SimpleNamespace(id=id, parent=parent, hyperparameters={"batch_size": size}) for (id, parent), size in numbers
    ]


def sampler_of(storage, rank=0, settings=SETTINGS, seed=3):
    return PrioritisedSampler(storage, P, **settings, seed=seed, rank=rank, part=rank, split_batches=False)


class Part:
    """One rank's part of a replay, and its sampler."""

    def __init__(self, rank=0, settings=SETTINGS, rows=8, agents=None, ranks=1, generation=1):
        self.storage, self.rank, self.random = replay_of(rows, P * E, vector(1)), rank, np.random.default_rng(rank)
        self.sampler = sampler_of(self.storage, rank, settings)
        self.sampler.begin(agents or members(), generation, ranks)

    def write(self, valid=1.0):
        """Add a row, of which about a share is valid."""
        own = torch.from_numpy(self.random.random(P * E) < valid)
        number, never = torch.zeros(P * E), torch.zeros(P * E, dtype=torch.bool)
        columns = {"action": number.long(), "reward": number, "terminated": never}
        shown = {"observation": number.unsqueeze(-1)}
        self.storage.write(shown, columns, next_observation=shown, valid=own, started=never, ended=never)

    def drawable(self):
        return set(self.storage.valid_index().tolist())


def sync(parts, steps=0.0):
    reports = np.stack([part.sampler.local_totals() for part in parts])
    sizes = np.array([part.storage.drawable for part in parts])
    for part in parts:
        part.sampler.sync(sizes, np.full(P, steps), reports)


def error(agent, rank, slot, time):
    """An error that says whose it is, of any sign and size."""
    return np.sin(agent + 7.3 * rank + 1.7 * slot + 0.3 * time) * 10.0 ** ((slot + time) % 3 - 1)
