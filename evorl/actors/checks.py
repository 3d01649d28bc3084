"""Checks of the actor settings, made before any actor is started."""

from __future__ import annotations

import math
import warnings

import torch

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Placement, Ranks
from evorl.system.processes import free_memory, usable_cores
from evorl.types import EvorlWarning, UserError


def max_staleness(config: AnyConfig, algorithm: Algorithm, copies: int) -> int:
    """Return the largest staleness accepted, in updates. Raises UserError if it would reject most rollouts."""
    actors, pace = config.actors, algorithm.pace(copies)
    assert actors is not None
    steps = config.algorithm.sent_steps * config.environment.num_envs * copies
    waiting = actors.count * actors.queue
    behind: int = math.ceil(waiting * steps * pace.updates * _most_updates(config) / pace.steps)
    if actors.max_staleness is None:
        return 2 * behind
    if actors.max_staleness < behind:
        raise UserError(
            f"actors.max_staleness: with {waiting} rollouts on their way (actors.count x actors.queue) parameters can "
            f"be {behind} updates behind, and most of what actors do would be discarded; take at least {behind}, or "
            "fewer actors"
        )
    return actors.max_staleness


def _most_updates(config: AnyConfig) -> float:
    """Return the factor by which evolution may raise an agent's update-to-data ratio."""
    evolved = config.evolution.hyperparameters or {}
    if "learn_step" not in evolved:
        return 1.0
    return max(1.0, float(config.algorithm.learn_step / evolved["learn_step"].min))


def warn_of_cores(count: int, ranks: Ranks) -> None:
    """Warn if a host has more actors than cores."""
    cores = usable_cores()
    actors = count * ranks.on_host
    if actors > cores and ranks.is_main:
        warnings.warn(
            f"actors.count: {actors} actors on a host of {_cores(cores)} share them with {ranks.on_host} learning "
            f"process{'es' if ranks.on_host > 1 else ''}; more than {max(1, cores)} hardly collect faster",
            EvorlWarning,
            stacklevel=3,
        )


def check_memory(size: int, slots: int, placement: Placement) -> None:
    """Raise UserError unless every rank of this host can share `size` bytes with its actors."""
    free, ranks = free_memory(torch.device("cpu")), placement.ranks.on_host
    if size * ranks > free:
        raise UserError(
            f"actors.queue: {slots} rollouts of {size / slots / 2**20:.1f} MiB each, on each of {ranks} ranks, take "
            f"{size * ranks / 2**30:.1f} GiB of shared memory, and {free / 2**30:.1f} GiB are free; take a smaller "
            "queue, fewer actors, fewer environments or shorter rollouts"
        )


def _cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"
