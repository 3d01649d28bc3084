"""Replays as a configuration describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.generation import steps_of_generation
from evorl.envs.spaces import EnvSpec
from evorl.replay.batches import BatchBuilder, Returns, SequenceBuilder
from evorl.replay.observations import ObservationBuffer, ObservationStatistics
from evorl.replay.prioritised import PrioritisedSampler, PrioritySettings, PriorityTree
from evorl.replay.replay import ReceivedTransitions, ReplayExperience
from evorl.replay.samplers import SamplerSettings, UniformSampler
from evorl.replay.storage import Field, Storage
from evorl.system.processes import check_room
from evorl.system.stopwatch import Stopwatch

EPSILON = 1e-6
"""Added to each error, so that all transitions can be drawn (arXiv 1511.05952)."""


def replay_experience(
    config: AnyConfig,
    interface: EnvSpec,
    placement: Placement,
    *,
    action: Field,
    returns: Returns,
    always_valid: bool,
    stopwatch: Stopwatch,
    normalized: Sequence[str],
    sequences: tuple[int, int] | None,
) -> ReplayExperience:
    """Build this rank's part of the replay; `capacity` and `learning_starts` are divided over the ranks.

    `returns` computes the algorithm's n-step returns; agents normalise the observation parts in `normalized`, and
    recurrent ones learn from `sequences` (length, burn-in). Raises UserError if memory is insufficient or the
    rank's part is too small for such windows.
    """
    ranks, replay = placement.ranks, config.replay
    share = max(1, replay.capacity // ranks.size)
    lanes = placement.local_size * config.environment.num_envs
    storage = make_replay(share, lanes, interface, action, ranks.device, ranks.on_host)
    prioritised = replay.prioritised is not None or not replay.shared
    place = SamplerSettings(config.seed, ranks.rank, placement.copy, config.algorithm.split_batches)
    builder = BatchBuilder(storage, replay.n_step, returns)
    if sequences is not None:
        builder = SequenceBuilder(storage, *sequences)
        place = replace(place, transitions=builder.transitions)
    sampler = _prioritised(config, storage, placement, place) if prioritised else UniformSampler(storage, place)
    parts = {name: interface.parts[name] for name in normalized}
    statistics = ObservationStatistics(parts, placement.gather_copies, stopwatch, replay.shared)
    return (ReplayExperience if config.actors is None else ReceivedTransitions)(
        storage,
        builder,
        sampler,
        ObservationBuffer(parts, statistics),
        learning_starts=min(replay.learning_starts * placement.copies // ranks.size, share * placement.copies),
        # Ranks that exchange priorities learn each other's sizes anyway and need no lockstep.
        lockstep=always_valid and not prioritised and config.actors is None,
        reward_clip=config.algorithm.reward_clip,
        split_batches=config.algorithm.split_batches,
        gather=placement.gather_copies,
        stopwatch=stopwatch,
        period=_period(config),
    )


def _period(config: AnyConfig) -> int:
    """The steps of each environment that arrive together."""
    return 1 if config.actors is None else int(config.algorithm.sent_steps)


def make_replay(
    capacity: int, lanes: int, interface: EnvSpec, action: Field, device: torch.device, ranks_on_host: int = 1
) -> Storage:
    """Allocate a storage of `capacity` transitions from `lanes` environments, at least one row of them.

    Raises UserError if memory is insufficient.
    """
    parts = interface.with_mask()
    columns: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    rows = max(1, capacity // lanes)
    size = Storage(rows, lanes, parts, columns, torch.device("meta")).memory
    sharing = ranks_on_host if device.type == "cpu" else 1
    check_room(size, "replay.capacity", copies=1, device=device, processes=sharing)
    return Storage(rows, lanes, parts, columns, device)


def _prioritised(
    config: AnyConfig, storage: Storage, placement: Placement, place: SamplerSettings
) -> PrioritisedSampler:
    """Build a prioritised sampler; per-agent replay without prioritisation uses equal priorities."""
    agents, ranks, prioritised = placement.local_size, placement.ranks, config.replay.prioritised
    size = PriorityTree.memory(agents, storage.size)
    check_room(size, "replay.capacity: priorities", copies=1, processes=ranks.on_host)
    rows = steps_of_generation(config, placement.copies, _period(config))
    settings = PrioritySettings(
        exponent=prioritised.exponent if prioritised else 0.0,
        epsilon=EPSILON if prioritised else 1.0,
        importance_start=prioritised.importance_exponent.start if prioritised else 0.0,
        importance_end=prioritised.importance_exponent.end if prioritised else 0.0,
        generation_steps=rows * config.environment.num_envs * placement.copies,
        importance_steps=(prioritised and prioritised.importance_exponent.steps) or config.training.max_steps,
        shared=config.replay.shared,
    )
    return PrioritisedSampler(storage, agents, settings, place)
