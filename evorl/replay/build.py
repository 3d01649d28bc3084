"""Build this rank's replay buffer, sampler and windows from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.spaces import EnvSpec, ObservationSpec, choices
from evorl.replay.experience import ReplayExperience, ReplaySettings
from evorl.replay.n_step import Returns, make_windows
from evorl.replay.observation_statistics import ObservationStatistics
from evorl.replay.priorities import PriorityTree
from evorl.replay.prioritised import PrioritisedSampler, PrioritySettings
from evorl.replay.protocols import Sampler
from evorl.replay.ring import Field, memory_at_first
from evorl.replay.sampler import SamplerSettings, UniformSampler
from evorl.replay.storage import Storage
from evorl.replay.transitions import ReceivedTransitions
from evorl.system.console import Stopwatch
from evorl.system.processes import check_room


def replay_experience(
    config: AnyConfig,
    interface: EnvSpec,
    action: Field,
    returns: Returns,
    placement: Placement,
    always_valid: bool,
    stopwatch: Stopwatch,
    normalized: Sequence[str] = (),
) -> ReplayExperience:
    """Build this rank's part of the replay; `capacity` and `learning_starts` are divided over the ranks.

    `returns` computes the algorithm's n-step returns; agents normalise the observation parts in `normalized`. Raises
    UserError if memory is insufficient or the rank's part is too small for such windows.
    """
    ranks, replay = placement.ranks, config.replay
    share = max(1, replay.capacity // ranks.size)
    streams = placement.local_size * config.environment.num_envs
    storage = make_replay(share, streams, interface, action, ranks.device, ranks.on_host)
    prioritised = replay.prioritised is not None or not replay.shared
    place = SamplerSettings(
        config.seed, ranks.rank, 0 if placement.is_sharded else ranks.rank, config.algorithm.split_batches
    )
    make_sampler = _prioritised if prioritised else _uniform
    settings = ReplaySettings(
        learning_starts=min(replay.learning_starts * placement.copies // ranks.size, share * placement.copies),
        # Ranks that exchange priorities learn each other's sizes anyway and need no lockstep.
        lockstep=always_valid and not prioritised and config.actors is None,
        reward_clip=config.algorithm.reward_clip,
        split_batches=config.algorithm.split_batches,
    )
    windows = make_windows(storage, replay.n_step, returns)
    sampler = make_sampler(config, storage, placement, place)
    parts = {name: interface.parts[name] for name in normalized}
    statistics = ObservationStatistics(parts, placement.gather_copies, replay.shared, stopwatch)
    make = (
        ReplayExperience if config.actors is None else partial(ReceivedTransitions, steps=config.algorithm.sent_steps)
    )
    return make(storage, windows, sampler, settings, placement.gather_copies, stopwatch, statistics)


def make_replay(
    capacity: int, streams: int, interface: EnvSpec, action: Field, device: torch.device, ranks_on_host: int = 1
) -> Storage:
    """Allocate a storage of `capacity` transitions from `streams` environments, at least one row of them.

    Raises UserError if memory is insufficient.
    """
    parts = dict(interface.parts)
    if interface.masked:
        parts["action_mask"] = ObservationSpec("vector", (sum(choices(interface.action)),), torch.bool)
    columns: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    rows = max(1, capacity // streams)
    size = memory_at_first(rows, streams, parts, columns)
    sharing = ranks_on_host if device.type == "cpu" else 1
    check_room(size, "replay.capacity", copies=1, device=device, processes=sharing)
    return Storage(rows, streams, parts, columns, device)


def _uniform(config: AnyConfig, storage: Storage, placement: Placement, place: SamplerSettings) -> Sampler:
    return UniformSampler(storage, place)


def _prioritised(config: AnyConfig, storage: Storage, placement: Placement, place: SamplerSettings) -> Sampler:
    """Build a prioritised sampler; per-agent replay without prioritisation uses equal priorities."""
    agents, ranks, given = placement.local_size, placement.ranks, config.replay.prioritised
    size = PriorityTree.memory(agents, storage.slots)
    check_room(size, "replay.capacity: priorities", copies=1, processes=ranks.on_host)
    settings = PrioritySettings(
        exponent=given.exponent if given else 0.0,
        epsilon=given.epsilon if given else 1.0,
        importance_start=given.importance_exponent.start if given else 0.0,
        importance_end=given.importance_exponent.end if given else 0.0,
        generation_steps=config.evolution.steps,
        importance_steps=(given and given.importance_exponent.steps) or config.training.max_steps,
        shared=config.replay.shared,
    )
    return PrioritisedSampler(storage, agents, settings, place)
