"""Experience for algorithms that learn from replay. Axes: P agents, E environments, B batch, U updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.envs.spec import EnvSpec, choices
from evorl.randomness import numpy_generator, torch_generator
from evorl.replay import Gather, Population
from evorl.replay.buffer import ReplayBuffer
from evorl.replay.frames import FrameReplay
from evorl.replay.sampler import DistributedSampler
from evorl.replay.schedule import UpdateSchedule
from evorl.system.memory import check_room
from evorl.system.timing import Stopwatch
from evorl.types import Agent, Batch, PolicyOutput, Tensors, Transition, UpdateResult, UserError

Field = tuple[tuple[int, ...], torch.dtype]


def replay_fields(interface: EnvSpec, action: Field) -> dict[str, Field]:
    """Shape and type of everything that a replay of these environments keeps."""
    seen: dict[str, Field] = {name: (part.shape, part.dtype) for name, part in interface.parts.items()}
    if interface.masked:
        seen["action_mask"] = (sum(choices(interface.action)),), torch.bool
    fields: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    return fields | {
        prefix + name: field for prefix in ("observation.", "next_observation.") for name, field in seen.items()
    }


class Replay(Protocol):
    """Where transitions are kept."""

    @property
    def capacity(self) -> int:
        """The most transitions that are kept."""

    @property
    def size(self) -> int:
        """How many can be drawn."""

    @property
    def full(self) -> bool:
        """Whether the oldest give way from now on; fewer than `capacity` may then be there to draw."""

    @property
    def device(self) -> torch.device:
        """Where they are kept."""

    def begin(self) -> None:
        """Start a generation: what comes next does not follow what came last."""

    def add_step(self, fields: Mapping[str, Tensor], valid: Tensor, started: Tensor) -> None:
        """Append one step of all copies, fields [P, E, ...], a transition where `valid` [P, E]."""

    def gather(self, index: Tensor) -> Tensors:
        """The transitions at `index` [...], each below `size`, as fields [..., ...]."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps."""

    def restore(self, rows: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Take over what `state` gave."""


def make_replay(
    capacity: int, interface: EnvSpec, action: Field, device: torch.device, ranks_on_host: int = 1
) -> Replay:
    """A replay for what agents see here; stacked frames are kept once. Raises UserError where memory has no room."""
    fields = replay_fields(interface, action)
    frames = {name: part.frames for name, part in interface.parts.items() if part.frames}
    size = round(capacity * _bytes_of_transition(fields, frames))
    sharing = ranks_on_host if device.type == "cpu" else 1
    check_room(size, "replay.capacity", copies=1, device=device, processes=sharing)
    return FrameReplay(capacity, frames, fields, device) if frames else ReplayBuffer(capacity, fields, device)


def _bytes_of_transition(fields: Mapping[str, Field], frames: Mapping[str, int]) -> float:
    total = 0.0
    for name, (shape, dtype) in fields.items():
        part = name.partition(".")[2]
        # One frame of a stack is new at each step, and both observations share it.
        total += math.prod(shape) * dtype.itemsize / (2 * frames[part] if part in frames else 1)
    return total


class ReplayExperience:
    """Keeps all agents' transitions in one buffer, and says which batches are due.

    Agents learn from each other's transitions: P agents fill the buffer P times as fast with P kinds of behaviour.
    """

    def __init__(
        self,
        buffer: Replay,
        *,
        learning_starts: int,
        gather: Gather,
        lockstep: bool,
        part: int,
        reward_clip: float | None,
        split_batches: bool,
        seed: int,
        rank: int,
        stopwatch: Stopwatch,
    ) -> None:
        """`part` is this rank's place among those that `gather` asks; in `lockstep` all of them add equally many.

        With `split_batches` learn steps and batch sizes count over all of them, otherwise on each.
        """
        self.buffer = buffer
        self._learning_starts = learning_starts
        self._gather = gather
        self._lockstep = lockstep
        self._part = part
        self._reward_clip = reward_clip
        self._split_batches = split_batches
        self._seed = seed
        self._rank = rank
        self._stopwatch = stopwatch
        self._policy: Population
        self._schedule: UpdateSchedule
        self._sampler: DistributedSampler
        self._steps: NDArray[np.float64]
        self._sizes: NDArray[np.int64]
        self._full = False

    @property
    def period(self) -> int:
        """A generation may have any number of steps."""
        return 1

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation of these agents."""
        agents = policy.agents
        self._policy = policy
        learn_step = np.array([agent.hyperparameters["learn_step"] for agent in agents])
        debt = np.array([agent.state.update_debt for agent in agents])
        batch_size = np.array([round(agent.hyperparameters["batch_size"]) for agent in agents])
        self.buffer.begin()
        self._schedule = UpdateSchedule(learn_step, debt)
        known = self._gather(np.array([float(self.buffer.size), float(self.buffer.full)]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        self._sampler = DistributedSampler(
            self._part,
            batch_size if self._split_batches else batch_size * len(known),
            shared=numpy_generator(self._seed, generation=generation, rank=0, purpose="share of draws"),
            own=torch_generator(
                self._seed, generation=generation, rank=self._rank, purpose="draws", device=self.buffer.device
            ),
        )

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments, and nothing of those where it was no transition.

        Raises UserError where ranks add in lockstep and there is nothing to add.
        """
        clip = self._reward_clip
        fields = {
            "action": output.action,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
        }
        for prefix, seen in (
            ("observation.", transition.observation),
            ("next_observation.", transition.next_observation),
        ):
            fields |= {prefix + name: value for name, value in seen.items()}
        valid, whole = transition.valid, transition.all_valid
        if self._lockstep and not whole:
            fields, valid, whole = self._filled(fields, valid), torch.ones_like(valid), True
        self.buffer.add_step(fields, valid, transition.started)
        if whole:
            self._steps = np.full(transition.valid.shape[0], float(transition.valid.shape[1]))
        else:
            self._steps = transition.valid.sum(1).cpu().numpy().astype(np.float64)

    def _filled(self, fields: Tensors, valid: Tensor) -> Tensors:
        """The fields [P, E, ...] of a step, with some other true transition where an episode was dropped."""
        # The other ranks do not hear of it, and draw from this rank's part as if it had grown like their own.
        if self.buffer.size:
            # Frames come only from environments that spend a step on a reset, which are never in lockstep.
            assert isinstance(self.buffer, ReplayBuffer)
            other = self.buffer.newest()
        elif valid.any():
            other = {name: value[valid][:1] for name, value in fields.items()}
        else:
            raise UserError("environment.id: every environment failed in the very first step")
        return {
            name: torch.where(valid.view(*valid.shape, *[1] * (value.dim() - 2)), value, other[name])
            for name, value in fields.items()
        }

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that the steps since the last call make due, one for each update of the population."""
        steps = self._agree_on_steps()
        self._policy.acted(steps)
        # A ring of frames also holds resets: full, it may never come to so many transitions, or fall back below.
        if self._sizes.sum() < self._learning_starts and not self._full:
            return
        counts = self._schedule.due(steps if self._split_batches else steps / len(self._sizes))
        updates = int(counts.max())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            index, weight = self._sampler.draw(updates, self._sizes)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(weight.device)
            fields = self.buffer.gather(index)
        groups = [
            {name[len(prefix) :]: value for name, value in fields.items() if name.startswith(prefix)}
            for prefix in ("observation.", "next_observation.")
        ]
        columns = {name: value for name, value in fields.items() if "observation." not in name}
        for update in range(updates):
            seen, following, rest = (
                {name: value[update] for name, value in group.items()} for group in (*groups, columns)
            )
            yield Batch(seen, following, rest, weight[update], due[update])

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Draws are uniform whatever became of a batch."""

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """Steps [P] of each agent since the last call, over all ranks that hold it; notes all parts' sizes."""
        if self._lockstep:
            self._sizes = np.minimum(self._sizes + int(self._steps.sum()), self.buffer.capacity)
            self._full = bool((self._sizes == self.buffer.capacity).all())
            return self._steps * len(self._sizes)
        with self._stopwatch("communication"):
            known = self._gather(np.concatenate([[self.buffer.size, self.buffer.full], self._steps]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        return np.asarray(known[:, 2:].sum(0))

    def end(self, agents: list[Agent]) -> None:
        """End the generation: each agent keeps the share of an update that it has earned."""
        for agent, debt in zip(agents, self._schedule.debt(), strict=True):
            agent.state.update_debt = float(debt)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """What a checkpoint keeps of this rank's part."""
        return self.buffer.state()

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave."""
        self.buffer.restore(rows, numbers)
