"""The base class of off-policy algorithms, with the replay that they learn from.

Axes: P agents, E environments, B batch, C critics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evorl.algorithms.base import Algorithm
from evorl.algorithms.functional import n_step_return
from evorl.config import Config
from evorl.distributed import Placement
from evorl.envs.generation import steps_of_generation
from evorl.envs.spaces import EnvSpec
from evorl.networks.stack import Stack
from evorl.replay import Experience
from evorl.replay.batches import BatchBuilder, SequenceBuilder
from evorl.replay.observations import ObservationStatistics
from evorl.replay.prioritised import PrioritisedSampler, PriorityTree
from evorl.replay.replay import ReplayExperience
from evorl.replay.samplers import Sampler, UniformSampler
from evorl.replay.storage import Field as StoredField
from evorl.replay.storage import make_replay
from evorl.system.processes import check_room
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Loss
from evorl.types.outcomes import UserError

TWIN_CRITICS = ("first", "second")
"""The heads of the twin critics Q1 and Q2, which name their tensors in checkpoints."""


class OffPolicy(Algorithm):
    """An algorithm that learns from a replay buffer of all agents' transitions."""

    report_every = 17
    stored_action: StoredField
    """The shape and type of an action in the replay, which stores the environment's actions."""

    def __init__(self, config: Config[Any], interface: EnvSpec) -> None:
        super().__init__(config, interface)
        if config.network.recurrent and self.sequences is None:
            raise UserError(
                f"network.recurrent: {self.settings.name} cannot be recurrent; leave {config.network.recurrent!r} out, "
                "or use dqn or ppo"
            )

    @property
    def sequences(self) -> tuple[int, int] | None:
        """The length and burn-in of the sequences that recurrent agents learn from; None if there are none."""
        return None

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        """This rank's part of the replay; an island's `capacity` and `learning_starts` are divided over the ranks.

        Raises UserError if memory is insufficient, or the part too small for n-step windows or sequences.
        """
        config, ranks, replay = self.config, placement.ranks, self.config.replay
        # The agents of a population that is divided over ranks share a replay only within a rank.
        populations, sharing = len(config.population.places), min(config.population.size, placement.local_size)
        share = max(1, replay.capacity * populations // ranks.size)
        islands, lanes = placement.local_size // sharing, placement.local_size * config.environment.num_envs
        storage = make_replay(share, lanes, self.interface, self.stored_action, ranks.device, ranks.on_host, islands)
        prioritised, split = replay.prioritised is not None or not replay.shared, config.algorithm.split_batches
        period = 1 if config.actors is None else int(config.algorithm.sent_steps)
        builder = BatchBuilder(storage, replay.n_step, self._n_step_return)
        if self.sequences is not None:
            builder = SequenceBuilder(storage, *self.sequences)
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
        gather = placement.gather_copies
        statistics = ObservationStatistics(self.normalized_parts, gather, stopwatch, sharing if replay.shared else 1)
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
            gather=gather,
            stopwatch=stopwatch,
            period=period,
        )

    def _n_step_return(self, reward: Tensor, steps: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """The n-step return of rewards [..., P, B, n] and the discount after it, both by discounts gamma [P]."""
        return n_step_return(reward, steps, self.discount(gamma))


def actor_learning_rate(stack: Stack) -> Tensor:
    """The actors' learning rate [P]: `actor_learning_rate` if set, else `learning_rate`."""
    hparams: Mapping[str, Tensor] = stack.hyperparameters
    return hparams.get("actor_learning_rate", hparams["learning_rate"])


def critic_loss(q_values: Tensor, target: Tensor) -> Loss:
    """Squared td_error of critics' values Q(s, a) [C, P, B] from their common target [P, B], summed over critics.

    Priorities use the mean absolute td_error over critics.
    """
    td_error = q_values - target
    errors = td_error.detach().abs().mean(0)
    return Loss(td_error.square().sum(0), lambda: {"td_error": errors, "q_values": q_values.detach()[0]}, errors)
