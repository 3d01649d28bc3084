"""Experience for algorithms that learn from replay. Axes: P agents, E environments, N streams, B batch, U updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.envs.spec import EnvSpec, ObservationSpec, choices
from evorl.randomness import numpy_generator, torch_generator
from evorl.replay import Gather, Population
from evorl.replay.n_step import Windows
from evorl.replay.ring import Field, memory_at_first
from evorl.replay.sampler import DistributedSampler
from evorl.replay.schedule import UpdateSchedule
from evorl.replay.storage import Storage
from evorl.system.memory import check_room
from evorl.system.timing import Stopwatch
from evorl.types import Agent, Batch, PolicyOutput, Tensors, Transition, UpdateResult, UserError


def make_replay(
    capacity: int, streams: int, interface: EnvSpec, action: Field, device: torch.device, ranks_on_host: int = 1
) -> Storage:
    """Return a replay of so many transitions of `streams` environments; a row of all of them is the least it keeps.

    Raises UserError where memory has no room.
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


class ReplayExperience:
    """Keeps all agents' transitions in one storage, and says which batches are due.

    Agents learn from each other's transitions: P agents fill it P times as fast with P kinds of behaviour.
    """

    def __init__(
        self,
        storage: Storage,
        windows: Windows,
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
        self.storage = storage
        self._windows = windows
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
        self._capacity = storage.rows * storage.streams

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
        # Agents change places, and episodes may begin anew: what comes next does not follow what came last.
        self.storage.break_streams()
        self._windows.begin(agents)
        self._schedule = UpdateSchedule(learn_step, debt)
        known = self._gather(np.array([float(self.storage.drawable), float(self.storage.full)]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        self._sampler = DistributedSampler(
            self._part,
            batch_size if self._split_batches else batch_size * len(known),
            shared=numpy_generator(self._seed, generation=generation, rank=0, purpose="share of draws"),
            own=torch_generator(
                self._seed, generation=generation, rank=self._rank, purpose="draws", device=self.storage.device
            ),
        )

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments; where it was no transition, nothing can be drawn.

        Raises UserError where ranks add in lockstep and there is nothing to draw.
        """
        clip, valid = self._reward_clip, transition.valid
        columns = {
            "action": output.action,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
        }
        self.storage.write(
            _streams(transition.observation),
            _streams(columns),
            next_observation=_streams(transition.next_observation),
            valid=valid.flatten(),
            started=transition.started.flatten(),
            ended=(transition.terminated | transition.truncated).flatten(),
        )
        if self._lockstep or transition.all_valid:
            # The other ranks do not hear of a step that was dropped here, and count on as many as they have made.
            self._steps = np.full(valid.shape[0], float(valid.shape[1]))
        else:
            self._steps = valid.sum(1).cpu().numpy().astype(np.float64)
        if self._lockstep and not self.storage.drawable:
            when = "in the very first step" if self.storage.written == 1 else "in every step that replay.capacity keeps"
            raise UserError(f"environment.id: every environment failed {when}")

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that the steps since the last call make due, one for each update of the population."""
        steps = self._agree_on_steps()
        self._policy.acted(steps)
        # A ring also holds resets: full, it may never come to so many transitions, or fall back below.
        if self._sizes.sum() < self._learning_starts and not self._full:
            return
        counts = self._schedule.due(steps if self._split_batches else steps / len(self._sizes))
        updates = int(counts.max())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            index, weight = self._sampler.draw(updates, self._sizes, self.storage.drawable)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(weight.device)
            found = self._windows.gather(self.storage.nth(index))
        for update in range(updates):
            seen, following, columns = ({name: values[update] for name, values in group.items()} for group in found)
            yield Batch(seen, following, columns, weight[update], due[update], all_due=bool((counts > update).all()))

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Draws are uniform whatever became of a batch."""

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """Return steps [P] of each agent since the last call, over all ranks that hold it; note all parts' sizes."""
        if self._lockstep:
            self._sizes = np.minimum(self._sizes + int(self._steps.sum()), self._capacity)
            self._full = self._full or bool((self._sizes == self._capacity).all())
            return self._steps * len(self._sizes)
        with self._stopwatch("communication"):
            known = self._gather(np.concatenate([[self.storage.drawable, self.storage.full], self._steps]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        return np.asarray(known[:, 2:].sum(0))

    def end(self, agents: list[Agent]) -> None:
        """End the generation: each agent keeps the share of an update that it has earned."""
        for agent, debt in zip(agents, self._schedule.debt(), strict=True):
            agent.state.update_debt = float(debt)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return what a checkpoint keeps of this rank's part."""
        return self.storage.state()

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Take over what `state` gave."""
        self.storage.restore(rows, numbers)


def _streams(values: Mapping[str, Tensor]) -> Tensors:
    """Return values [P, E, ...] as those of streams [N, ...]."""
    return {name: value.flatten(0, 1) for name, value in values.items()}
