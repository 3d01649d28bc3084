"""Checks of the actor settings, made before any actor is started."""

from __future__ import annotations

import contextlib
import errno
import math
import resource
import warnings
from collections.abc import Iterator

import torch

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Placement, Ranks
from evorl.system.memory import free_memory
from evorl.system.processes import usable_cores
from evorl.types import EvorlWarning, RunFailed, UserError

FILES_OF_ACTOR = 3
"""Files that a rank keeps open per actor: its memory, and one end of each of its two pipes."""
FILES_OF_OTHERS = 256
"""Files that a rank may need open for everything else."""


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


@contextlib.contextmanager
def starting(count: int) -> Iterator[None]:
    """Raise UserError if `count` actors need too many open files, and RunFailed for any other OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise RunFailed(f"actors cannot be started: {error.strerror or error}") from error
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = FILES_OF_OTHERS + FILES_OF_ACTOR * count
        allowed = f"`ulimit -n {needed}`" if most == resource.RLIM_INFINITY or needed <= most else "a higher limit"
        raise UserError(
            f"actors.count: {count} actors take {FILES_OF_ACTOR * count} open files of their rank, which may have "
            f"{limit} in all (ulimit -n); launch it with {allowed}, or take fewer actors"
        ) from error


def _cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"
