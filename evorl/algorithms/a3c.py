"""Asynchronous advantage actor-critic, A3C (arXiv 1602.01783).

There are three variants: actors send rollouts, send gradients, or update shared parameters themselves. The losses are
A2C's. Each actor may scale the entropy coefficient differently, so that some explore more than others.

Axes: T steps of a rollout, P agents, E environments, S sequences, B = T * S steps of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evorl.algorithms.asynchronous import Asynchronous, flattened
from evorl.algorithms.base import ActInput, ActOutput
from evorl.config.actor_critic import A3CSettings
from evorl.distributed import Placement
from evorl.networks.stack import Stack
from evorl.replay import Experience
from evorl.replay.received import ReceivedGradients
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

SCALE = "entropy_scale"
"""Name of a column and of an acting state: the factor by which an actor scales the entropy coefficients."""


class A3CDataParallel(Asynchronous):
    """A2C on rollouts of several actors, which one learner joins into batches, without off-policy correction."""

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), SCALE: 1.0}

    def actor_state(self, index: int, count: int) -> Tensors:
        scales = self.settings.entropy_scales
        return {SCALE: torch.tensor(scales[index % len(scales)])}

    def act(self, stack: Stack, inputs: ActInput) -> ActOutput:
        """Act as A2C does, and also store the actor's entropy scale [P, E]."""
        output = super().act(stack, inputs)
        if not inputs.deterministic:
            scale = stack.state[SCALE].float().unsqueeze(-1)
            output.extras[SCALE] = scale.expand_as(output.extras["value"])
        return output

    def entropy_coefficient(self, stack: Stack, batch: Batch) -> Tensor:
        """The entropy coefficient [P, B], scaled by each step's actor."""
        return super().entropy_coefficient(stack, batch) * batch.columns[SCALE]

    def batch_targets(self, stack: Stack, batch: Batch) -> Tensors:
        """Advantages and returns [P, B], computed from the actor's own values."""
        targets = self.targets(self.segment(batch.columns), stack.hyperparameters)
        targets = {name: flattened(values) for name, values in targets.items()}
        return targets | {"advantage": self.normalized_advantage(targets["advantage"], batch)}


class A3C(A3CDataParallel):
    """A2C whose actors compute gradients with the parameters they act with; the learner applies them on arrival."""

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> Experience:
        settings: A3CSettings = self.settings
        return ReceivedGradients(
            steps=settings.sent_steps,
            gradients=settings.rollouts,
            applied=settings.actor_messages == "updates",
            gather=placement.gather_copies,
            device=placement.ranks.device,
            stopwatch=stopwatch,
        )


class A3CShared(A3C):
    """A2C whose actors update parameters in shared memory themselves, one actor at a time.

    The learner counts these updates as it hears of them. When a generation ends, it loads the actors' parameters.
    """

    def check_copies(self, copies: int) -> None:
        if copies > 1:
            raise UserError(
                f"population.placement: actors of a3c_shared update parameters in their host's memory, which {copies} "
                "ranks cannot share; use population.placement=sharded"
            )
