"""What actors make of their steps, by what their algorithm `sends`: the memory it takes, and who fills it.

Axes: T steps of a rollout, P agents, E environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from evorl.actors.board import Board
from evorl.actors.memory import PAGE, Arena, SharedMemory
from evorl.algorithms.returns import n_step_return
from evorl.config import AnyConfig
from evorl.envs import Environments
from evorl.envs.spec import ObservationSpec, choices
from evorl.population import Learner, Policy
from evorl.population.learner import COMMON, compute_gradients
from evorl.population.shared import read_state, write_state
from evorl.replay.gradients import GradientMemory, staleness_weight
from evorl.replay.n_step import make_windows
from evorl.replay.received import ReceivedRollouts, ReceivedSettings
from evorl.replay.ring import Empty, Field
from evorl.replay.segment import COUNTS, RolloutLayout, RolloutMemory
from evorl.replay.transitions import ERROR
from evorl.system.timing import Stopwatch
from evorl.types import Batch, PolicyOutput, Tensors


class Slot(Protocol):
    """Memory for what an actor sends at a time."""

    counts: Tensor
    """What the actor counted of each agent [C, P], by the names of `evorl.replay.segment.COUNTS`."""
    staleness: int
    """The updates by which what acted was behind, when it was received."""
    number: int
    """The number of the slot among all of its rank, by which it is handed out."""


@dataclass
class Acting:
    """Hold what an actor acts with in a generation: parameters `flat` [D] of a `version`, as the board has them."""

    config: AnyConfig
    environments: Environments
    board: Board
    policy: Policy
    flat: Tensor
    states: Tensor
    generation: int
    version: int
    max_staleness: int


class Collector(Protocol):
    """Acts, and fills slots with what comes of it."""

    def collect(self, slot: Slot, beat: Callable[[], None]) -> None:
        """Fill a slot by the policy's present parameters; call `beat` as a heartbeat."""


class RolloutCollector:
    """Keeps every step of T steps as it was."""

    def __init__(self, acting: Acting) -> None:
        policy, environments, config = acting.policy, acting.environments, acting.config
        self._policy = policy
        self._environments = environments
        self._steps: int = config.algorithm.rollout_steps
        self._clip: float | None = config.algorithm.reward_clip
        self._state = policy.initial_state(environments.num_envs)

    def collect(self, slot: RolloutMemory, beat: Callable[[], None]) -> None:
        """Fill a slot with a rollout."""
        for step in range(self._steps):
            beat()
            environments = self._environments
            output, self._state = self._policy.act(environments.observation, environments.started, self._state)
            transition = environments.step(output.action)
            if self._clip is not None:
                transition.reward.clamp_(-self._clip, self._clip)
            slot.write(step, transition, output)


class TransitionCollector(RolloutCollector):
    """Keeps every step, with the error by which the learner draws it first: that of the actor's own parameters."""

    def __init__(self, acting: Acting) -> None:
        super().__init__(acting)
        self._n_step: int = acting.config.replay.n_step
        for stack in acting.policy.stacks:
            # An actor has no target copies.
            stack.targets = dict(stack.networks)

    def collect(self, slot: RolloutMemory, beat: Callable[[], None]) -> None:
        """Fill a slot with a rollout and its errors."""
        super().collect(slot, beat)
        windows = make_windows(slot.storage, self._n_step, n_step_return)
        windows.begin(self._policy.agents)
        found = windows.gather(slot.slots.flatten(1, 2).unsqueeze(0))
        seen, following, columns = ({name: value[0] for name, value in group.items()} for group in found)
        ones = torch.ones_like(columns["reward"])
        batch = Batch(seen, following, columns, ones, ones[:, 0], all_due=True)
        slot.put(ERROR, self._errors(batch).view(slot.slots.shape))

    @torch.no_grad()
    def _errors(self, batch: Batch) -> Tensor:
        """Return the errors [P, B] of the algorithm's first loss that has any."""
        policy = self._policy
        parts = [
            objective.loss(stack, batch.part(stack.members), policy.generator).errors
            for objective in policy.algorithm.objectives[:1]
            for stack in policy.stacks
        ]
        return policy.joined([each for each in parts if each is not None])


class GradientCollector:
    """Computes the gradient of rollouts by the parameters that made them."""

    def __init__(self, acting: Acting) -> None:
        policy, config = acting.policy, acting.config
        self._rollouts = RolloutCollector(acting)
        self._memory = rollout_slot(policy, config)(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        self._learner = Learner(policy)
        settings = config.algorithm
        self._received = ReceivedRollouts(
            ReceivedSettings(settings.rollout_steps, settings.grad_sync_steps, passes=1, normalized=()),
            policy.algorithm.interface.parts,
            gather=lambda numbers: numbers[None],
            device=torch.device("cpu"),
            stopwatch=Stopwatch(),
        )
        self._received.begin(policy, generation=0)
        self._together: int = settings.grad_sync_steps

    def collect(self, slot: GradientMemory, beat: Callable[[], None]) -> None:
        """Fill a slot with the gradient of as many rollouts as are sent together."""
        slot.write(self._gradient(beat))

    def _gradient(self, beat: Callable[[], None]) -> Batch:
        """Return a gradient as a batch."""
        for _ in range(self._together):
            self._rollouts.collect(self._memory, beat)
            self._received.extend(self._memory)
        (batch,) = self._received.batches()
        return compute_gradients(self._learner, batch)


class UpdateCollector(GradientCollector):
    """Applies its gradients itself, to the parameters that all actors share, one actor at a time."""

    def __init__(self, acting: Acting) -> None:
        super().__init__(acting)
        self._acting = acting
        self._names = len(acting.policy.algorithm.initial_state())

    def collect(self, slot: GradientMemory, beat: Callable[[], None]) -> None:
        """Make an update, and fill a slot with its gradient."""
        acting, version = self._acting, self._acting.version
        batch = self._gradient(beat)
        slot.write(batch)
        with acting.board.locked():
            newest = acting.board.fetch(acting.flat, acting.states, acting.generation)
            if newest is None:
                return
            slot.behind[0], acting.version = newest - version, newest
            if newest - version > acting.max_staleness:
                return
            read_state(self._learner, acting.flat, acting.states[self._names :])
            self._learner.update(self._weighed(batch, newest - version))
            write_state(self._learner, acting.flat, acting.states[self._names :])
            acting.version = newest + 1
            acting.board.publish(acting.flat, list(acting.states), acting.version)

    def _weighed(self, batch: Batch, staleness: int) -> Batch:
        """Return gradients as the learner weighs its copy of them."""
        if not self._acting.config.algorithm.weigh_by_staleness:
            return batch
        gradients = {name: values * staleness_weight(staleness) for name, values in batch.gradients.items()}
        return replace(batch, gradients=gradients)


def gradient_slot(policy: Policy, config: AnyConfig) -> Callable[[Empty], GradientMemory]:
    """Return what makes the memory of gradients of these agents."""
    agents, algorithm = len(policy.agents), policy.algorithm
    sizes = {
        name: sum(stack.networks[name].parameters.flat.numel() for stack in policy.stacks) + agents
        for name in algorithm.networks
    }
    return lambda empty: GradientMemory(sizes, (*COMMON, *algorithm.metrics), agents, empty)


def rollout_slot(policy: Policy, config: AnyConfig) -> Callable[[Empty], RolloutMemory]:
    """Return what makes the memory of a rollout of these agents, with what acting gave beside actions."""
    return _rollout(policy, config, lambda output: output.extras)


def transition_slot(policy: Policy, config: AnyConfig) -> Callable[[Empty], RolloutMemory]:
    """Return what makes the memory of a rollout of these agents, with actions and errors."""
    return _rollout(
        policy, config, lambda output: {"action": output.action, ERROR: torch.zeros(output.action.shape[:2])}
    )


def _rollout(
    policy: Policy, config: AnyConfig, kept: Callable[[PolicyOutput], Tensors]
) -> Callable[[Empty], RolloutMemory]:
    """Return what makes the memory of a rollout, with what is `kept` of each step's output."""
    algorithm = policy.algorithm
    num_envs, parts = config.environment.num_envs, dict(algorithm.interface.parts)
    if algorithm.interface.masked:
        parts["action_mask"] = ObservationSpec("vector", (sum(choices(algorithm.interface.action)),), torch.bool)
    shown = kept(_output(policy, parts, num_envs))
    flag: Field = (), torch.bool
    fields: dict[str, Field] = {name: (tuple(value.shape[2:]), value.dtype) for name, value in shown.items()}
    fields |= {"reward": ((), torch.float32), "terminated": flag, "truncated": flag, "started": flag}
    state = policy.initial_state(num_envs)
    steps = config.algorithm.rollout_steps
    layout = RolloutLayout(steps, len(policy.agents), num_envs, parts, fields, (state.shape[2], state.shape[3]))
    return lambda empty: RolloutMemory(layout, empty)


def _output(policy: Policy, parts: Mapping[str, ObservationSpec], num_envs: int) -> PolicyOutput:
    """Return what the policy gives for some observation, for the shapes."""
    shape, device = (len(policy.agents), num_envs), policy.generator.device
    seen = {name: torch.zeros(*shape, *part.shape, dtype=part.dtype, device=device) for name, part in parts.items()}
    if "action_mask" in seen:
        seen["action_mask"].fill_(True)
    state = policy.generator.get_state()
    output, _ = policy.act(seen, torch.ones(shape, dtype=torch.bool, device=device), policy.initial_state(num_envs))
    policy.generator.set_state(state)
    return output


@dataclass(frozen=True)
class Kind:
    """Describe one kind of what is sent: `slot` gives what makes its memory, `collector` who fills it.

    Where parameters are `shared`, the board holds all of a learner's state, and actors publish there themselves.
    """

    slot: Callable[[Policy, AnyConfig], Callable[[Empty], Slot]]
    collector: Callable[[Acting], Any]
    shared: bool = False


KINDS: Mapping[str, Kind] = {
    "gradients": Kind(gradient_slot, GradientCollector),
    "rollouts": Kind(rollout_slot, RolloutCollector),
    "transitions": Kind(transition_slot, TransitionCollector),
    "updates": Kind(gradient_slot, UpdateCollector, shared=True),
}


def note_counts(slot: Slot, environments: Environments) -> None:
    """Write into a slot what was counted since the last one."""
    assert COUNTS == ("steps", "returns", "episodes", "ended", "lengths")
    for row, values in zip(slot.counts, (environments.pop_steps(), *environments.pop_returns()), strict=True):
        row.copy_(torch.from_numpy(values))


def slots(memory: SharedMemory, make: Callable[[Empty], Slot], numbers: Iterable[int]) -> dict[int, Slot]:
    """Return an actor's slots of these numbers, which it and its rank find at the same places of its own memory.

    No other actor writes there: one that is still in the last generation, whose slots had another size, would write
    into the slots of others.
    """
    size = slot_size(make)
    made = {number: make(memory.arena(place * size).empty) for place, number in enumerate(numbers)}
    for number, slot in made.items():
        slot.number = number
    return made


def slot_size(make: Callable[[Empty], Slot]) -> int:
    """Return the bytes of a slot, whole pages."""
    arena = Arena()
    make(arena.empty)
    return -(-arena.used // PAGE) * PAGE
