"""Replays as a configuration describes them."""

from __future__ import annotations

import torch

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.generation import steps_of_generation
from evorl.envs.spaces import EnvSpec, ObservationSpecs
from evorl.replay.batches import BatchBuilder, Returns, SequenceBuilder
from evorl.replay.observations import ObservationStatistics
from evorl.replay.prioritised import PrioritisedSampler, PriorityTree
from evorl.replay.replay import ReplayExperience
from evorl.replay.samplers import Sampler, UniformSampler
from evorl.replay.storage import Field, Storage
from evorl.system.processes import check_room
from evorl.system.stopwatch import Stopwatch


def replay_experience(
    config: AnyConfig,
    interface: EnvSpec,
    placement: Placement,
    *,
    action: Field,
    returns: Returns,
    always_valid: bool,
    stopwatch: Stopwatch,
    normalized: ObservationSpecs,
    sequences: tuple[int, int] | None,
) -> ReplayExperience:
    """Build this rank's part of the replay; an island's `capacity` and `learning_starts` are divided over the ranks.

    `returns` computes the algorithm's n-step returns; agents normalise the observation parts in `normalized`, and
    recurrent ones learn from `sequences` (length, burn-in). Raises UserError if memory is insufficient or the
    rank's part is too small for such windows.
    """
    ranks, replay = placement.ranks, config.replay
    # The agents of a population that is divided over ranks share a replay only within a rank.
    populations, sharing = len(config.population.places), min(config.population.size, placement.local_size)
    share = max(1, replay.capacity * populations // ranks.size)
    islands, lanes = placement.local_size // sharing, placement.local_size * config.environment.num_envs
    storage = make_replay(share, lanes, interface, action, ranks.device, ranks.on_host, islands)
    prioritised, split = replay.prioritised is not None or not replay.shared, config.algorithm.split_batches
    period = 1 if config.actors is None else int(config.algorithm.sent_steps)
    builder = BatchBuilder(storage, replay.n_step, returns)
    if sequences is not None:
        builder = SequenceBuilder(storage, *sequences)
    common = {"seed": config.seed, "rank": ranks.rank, "part": placement.copy, "split_batches": split}
    common["transitions"] = builder.transitions
    sampler: Sampler = UniformSampler(storage, **common)
    if prioritised:
        # Per-agent replay without prioritisation has equal priorities.
        size = PriorityTree.memory(placement.local_size, storage.size // islands)
        check_room(size, "replay.capacity: priorities", processes=ranks.on_host)
        rows = steps_of_generation(config, placement.copies, period)
        sampler = PrioritisedSampler(
            storage,
            placement.local_size,
            replay.prioritised,
            shared=replay.shared,
            generation_steps=rows * config.environment.num_envs * placement.copies,
            max_steps=config.training.max_steps,
            **common,
        )
    statistics = ObservationStatistics(normalized, placement.gather_copies, stopwatch, sharing if replay.shared else 1)
    return ReplayExperience(
        storage,
        builder,
        sampler,
        statistics,
        learning_starts=min(
            replay.learning_starts * populations * placement.copies // ranks.size, share * placement.copies
        ),
        # Ranks that exchange priorities learn each other's sizes anyway and need no lockstep.
        lockstep=always_valid and not prioritised and config.actors is None,
        reward_clip=config.algorithm.reward_clip,
        split_batches=split,
        gather=placement.gather_copies,
        stopwatch=stopwatch,
        period=period,
    )


def make_replay(
    capacity: int,
    lanes: int,
    interface: EnvSpec,
    action: Field,
    device: torch.device,
    ranks_on_host: int = 1,
    islands: int = 1,
) -> Storage:
    """Allocate a storage of `capacity` transitions from `lanes` environments, at least one row of them.

    Raises UserError if memory is insufficient.
    """
    parts = interface.with_mask()
    columns: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    rows = max(1, capacity // lanes)
    on_cpu = device.type == "cpu"
    size = Storage(rows, lanes, parts, columns, torch.device("meta")).memory(second_ring=not on_cpu)
    check_room(size, "replay.capacity", device=device, processes=ranks_on_host if on_cpu else 1)
    return Storage(rows, lanes, parts, columns, device, islands=islands)
