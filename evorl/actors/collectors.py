"""Collectors, one for each value of `actor_messages`, and the messages in shared memory that they fill.

Axes: T steps of a rollout, P agents, E environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evorl.actors.memory import PAGE, Arena, Board, SharedMemory
from evorl.algorithms.functional import n_step_return
from evorl.config import AnyConfig
from evorl.envs import Environments
from evorl.envs.spaces import ObservationSpec
from evorl.population import Learner, Policy
from evorl.population.learner import compute_gradients, read_state, split_states, write_state
from evorl.population.stack_learner import COMMON
from evorl.replay.batches import BatchBuilder
from evorl.replay.observations import moments_of
from evorl.replay.received import GradientMemory, ReceivedRollouts
from evorl.replay.replay import ERROR
from evorl.replay.rollout_memory import RolloutLayout, RolloutMemory
from evorl.replay.statistics import Moments
from evorl.replay.storage import Empty, Field
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Batch, PolicyOutput
from evorl.types.tensors import Tensors

Message = RolloutMemory | GradientMemory
"""Shared memory for one message of an actor to the learner."""


@dataclass
class Acting:
    """An actor's policy in a generation; `flat` [D] holds the parameters of `version`, from the board."""

    config: AnyConfig
    environments: Environments
    board: Board
    policy: Policy
    flat: Tensor
    states: Tensor
    generation: int
    version: int


class RolloutCollector:
    """Records rollouts of T steps, with rewards clipped if that is configured."""

    shared: ClassVar[bool] = False
    """True if the board holds the learner's full state, which actors update and publish themselves."""

    @classmethod
    def layout(cls, policy: Policy, config: AnyConfig) -> Callable[[Empty], RolloutMemory]:
        """The factory of messages for rollouts of these agents, with what is `kept` of each policy output."""
        num_envs, parts = config.environment.num_envs, policy.algorithm.interface.with_mask()
        output = _output(policy, parts, num_envs)
        flag: Field = (), torch.bool
        fields: dict[str, Field] = {
            name: (tuple(value.shape[2:]), value.dtype) for name, value in cls.kept(output).items()
        }
        fields |= {"reward": ((), torch.float32), "terminated": flag, "truncated": flag, "started": flag}
        state = output.state.shape[2:] if output.state.numel() else (0, 0)
        steps = config.algorithm.rollout_steps
        layout = RolloutLayout(steps, len(policy.agents), num_envs, parts, fields, (state[0], state[1]))
        return lambda empty: RolloutMemory(layout, empty)

    @staticmethod
    def kept(output: PolicyOutput) -> Tensors:
        """The columns [P, E, ...] of a message that are from the policy's output."""
        return output.extras

    def __init__(self, acting: Acting) -> None:
        policy, environments, config = acting.policy, acting.environments, acting.config
        self._policy = policy
        self._environments = environments
        self._steps: int = config.algorithm.rollout_steps
        self._clip: float | None = config.algorithm.reward_clip

    def collect(self, message: RolloutMemory, beat: Callable[[], None]) -> None:
        """Fill a message with a rollout by the current parameters; call `beat` before each step as a heartbeat."""
        for step in range(self._steps):
            beat()
            environments = self._environments
            output = self._policy.explore(environments.observation, environments.started)
            transition = environments.step(output.action)
            if self._clip is not None:
                transition.reward.clamp_(-self._clip, self._clip)
            message.write(step, transition, output)


class TransitionCollector(RolloutCollector):
    """Records rollouts with their initial priorities, which are errors under the actor's own parameters."""

    @staticmethod
    def kept(output: PolicyOutput) -> Tensors:
        return {"action": output.action, ERROR: torch.zeros(output.action.shape[:2])}

    def __init__(self, acting: Acting) -> None:
        super().__init__(acting)
        self._n_step: int = acting.config.replay.n_step
        for stack in acting.policy.stacks:
            # An actor has no target networks, so its online networks take their place.
            stack.target_networks = dict(stack.networks)

    def collect(self, message: RolloutMemory, beat: Callable[[], None]) -> None:
        """Fill a message with a rollout and the errors of its transitions."""
        super().collect(message, beat)
        builder = BatchBuilder(message.storage, self._n_step, n_step_return)
        builder.begin(self._policy.agents)
        index = message.index.transpose(0, 1)
        seen, following, columns = builder.gather(index.flatten(1))
        ones = torch.ones_like(columns["reward"])
        batch = Batch(seen, following, columns, ones, ones[:, 0], all_due=True)
        message.write_column(ERROR, self._errors(batch).view(index.shape).transpose(0, 1))

    @torch.no_grad()
    def _errors(self, batch: Batch) -> Tensor:
        """The errors [P, B] for priorities from the algorithm's first loss."""
        policy = self._policy
        parts = [
            policy.algorithm.objectives[0].loss(stack, part, policy.generator).errors
            for stack, part in zip(policy.stacks, policy.parts(batch), strict=True)
        ]
        return policy.joined([errors for errors in parts if errors is not None])


class GradientCollector:
    """Computes the gradient of rollouts with the parameters that collected them."""

    shared: ClassVar[bool] = False

    @classmethod
    def layout(cls, policy: Policy, config: AnyConfig) -> Callable[[Empty], GradientMemory]:
        """The factory of messages for gradients, with moments of observations if the learner merges these."""
        agents, algorithm = len(policy.agents), policy.algorithm
        sizes = {
            name: sum(stack.networks[name].parameters.flat.numel() for stack in policy.stacks) + agents
            for name in algorithm.networks
        }
        normalized = {} if cls.shared else algorithm.normalized_parts
        return lambda empty: GradientMemory(sizes, (*COMMON, *algorithm.metrics), normalized, agents, empty)

    def __init__(self, acting: Acting) -> None:
        policy, config = acting.policy, acting.config
        self._rollouts = RolloutCollector(acting)
        self._memory = RolloutCollector.layout(policy, config)(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        self._learner = Learner(policy)
        self._normalized = policy.algorithm.normalized_parts
        self._together: int = config.algorithm.grad_sync_steps
        one = config.algorithm.model_copy(update={"rollouts": self._together})
        self._received = ReceivedRollouts(
            config.model_copy(update={"algorithm": one}),
            normalized={},
            rank=0,
            gather=lambda numbers: numbers[None],
            device=torch.device("cpu"),
            stopwatch=Stopwatch(),
        )
        self._received.begin(policy, generation=0)

    def collect(self, message: GradientMemory, beat: Callable[[], None]) -> None:
        """Fill a message with the mean gradient of `grad_sync_steps` rollouts."""
        batch, observed, _ = self._gradient(beat)
        message.write(batch, observed)

    def _gradient(self, beat: Callable[[], None]) -> tuple[Batch, dict[str, Moments], Tensor]:
        """Collect rollouts; return their gradient as a batch, moments of observations by part, and transitions [P]."""
        for _ in range(self._together):
            self._rollouts.collect(self._memory, beat)
            self._received.extend(self._memory)
        (batch,) = self._received.take_batches()
        valid = batch.weight > 0
        observed = moments_of(self._normalized, batch.observation, valid)
        return compute_gradients(self._learner, batch), observed, valid.sum(1)


class UpdateCollector(GradientCollector):
    """Applies its own gradients to parameters that all actors share, one actor at a time."""

    shared: ClassVar[bool] = True

    def __init__(self, acting: Acting) -> None:
        super().__init__(acting)
        self._acting = acting

    def collect(self, message: GradientMemory, beat: Callable[[], None]) -> None:
        """Fill a message with a gradient and apply it, unless the generation is over."""
        acting, version = self._acting, self._acting.version
        batch, observed, transitions = self._gradient(beat)
        message.write(batch, {})
        # An actor that waits for another one is not late.
        with acting.board.locked(beat):
            newest = acting.board.fetch(acting.flat, acting.states, acting.generation)
            if newest is None:
                return
            message.behind[0], acting.version = newest - version, newest
            states, updates = split_states(acting.policy.algorithm, acting.states)
            read_state(self._learner, acting.flat, updates)
            self._learner.update(batch)
            states["steps"] += transitions  # An annealed learning rate depends on them.
            for name, moments in observed.items():
                acting.policy.update_observation_stats(name, moments)
            write_state(self._learner, acting.flat, updates)
            acting.version = newest + 1
            acting.board.publish(acting.flat, list(acting.states), acting.version)


def _output(policy: Policy, parts: Mapping[str, ObservationSpec], num_envs: int) -> PolicyOutput:
    """The policy's output for a dummy observation, to infer shapes; the generator's state is unchanged."""
    shape, device = (len(policy.agents), num_envs), policy.generator.device
    seen = {name: torch.zeros(*shape, *part.shape, dtype=part.dtype, device=device) for name, part in parts.items()}
    if "action_mask" in seen:
        seen["action_mask"].fill_(True)
    state = policy.generator.get_state()
    output, _ = policy.act(seen, torch.ones(shape, dtype=torch.bool, device=device), policy.initial_state(num_envs))
    policy.generator.set_state(state)
    return output


COLLECTORS: Mapping[str, type[RolloutCollector | GradientCollector]] = {
    "gradients": GradientCollector,
    "rollouts": RolloutCollector,
    "transitions": TransitionCollector,
    "updates": UpdateCollector,
}
"""Collectors by `actor_messages`."""


def note_counts(message: Message, environments: Environments) -> None:
    """Write the environments' counters since the last message into this one."""
    for row, values in zip(message.counts, environments.pop_collected(), strict=True):
        row.copy_(torch.from_numpy(values))


def messages_in(memory: SharedMemory, make: Callable[[Empty], Message], numbers: Iterable[int]) -> dict[int, Message]:
    """An actor's messages by number; the actor and its rank find them at the same offsets of its own memory.

    Memory is not shared between actors: one still in the last generation, whose messages had another size, would
    overwrite the messages of others.
    """
    size = message_size(make)
    made = {number: make(memory.arena(index * size).empty) for index, number in enumerate(numbers)}
    for number, message in made.items():
        message.number = number
    return made


def message_size(make: Callable[[Empty], Message]) -> int:
    """The size of a message in bytes, rounded up to whole pages."""
    arena = Arena()
    make(arena.empty)
    return -(-arena.used // PAGE) * PAGE
