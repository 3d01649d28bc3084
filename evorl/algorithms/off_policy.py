"""The base class of off-policy algorithms with a replay buffer: settings and storage.

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
from evorl.envs.spaces import EnvSpec
from evorl.networks.stack import Stack
from evorl.replay import Experience
from evorl.replay.factory import replay_experience
from evorl.replay.storage import Field as StoredField
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
        return replay_experience(
            self.config,
            self.interface,
            placement,
            action=self.stored_action,
            returns=lambda reward, steps, gamma: n_step_return(reward, steps, self.discount(gamma)),
            always_valid=always_valid,
            stopwatch=stopwatch,
            normalized=self.normalized_parts,
            sequences=self.sequences,
        )


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
