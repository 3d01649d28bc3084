"""Experience for off-policy algorithms. Axes: P agents, E environments, N streams, B batch, U updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.replay.moments import Gather
from evorl.replay.n_step import Windows
from evorl.replay.observation_statistics import ObservationStatistics
from evorl.replay.protocols import Agreement, Population, Sampler
from evorl.replay.schedule import UpdateSchedule
from evorl.replay.storage import Storage
from evorl.replay.stored import WHERE
from evorl.system.console import Stopwatch
from evorl.system.formats import check_numbers, load_like
from evorl.types import Agent, Batch, PolicyOutput, Tensors, Transition, UpdateResult, UserError

PRIORITIES = "priorities"
"""Prefix of a sampler's tensor names in a checkpoint."""
WITHIN, FULL = "within.", "full"
"""Prefix of what a snapshot has beside the contents of the replay (`counters.`, `draws.`, `statistics.`); a number."""


@dataclass(frozen=True)
class ReplaySettings:
    """When and how often to learn from replay.

    In `lockstep` all ranks that hold the same agents add equally many transitions. With `split_batches`, `learn_step`
    counts environment steps over all of these ranks, otherwise on each.
    """

    learning_starts: int
    lockstep: bool
    reward_clip: float | None
    split_batches: bool


class ReplayExperience:
    """A replay buffer for all agents, with the schedule that says which updates are due.

    If the replay is shared, agents learn from each other's transitions: P agents fill it P times as fast with P
    behaviour policies. All batches of a vector step are drawn before the first update on them.
    """

    def __init__(
        self,
        storage: Storage,
        windows: Windows,
        sampler: Sampler,
        settings: ReplaySettings,
        gather: Gather,
        stopwatch: Stopwatch,
        statistics: ObservationStatistics | None = None,
    ) -> None:
        """`windows` turns the slots that `sampler` draws into transitions; `gather` reaches all ranks of the agents.

        `statistics` are the running observation statistics used for normalisation.
        """
        self._statistics = statistics
        self.storage = storage
        self.windows = windows
        self.sampler = sampler
        self._settings = settings
        self._gather = gather
        self._stopwatch = stopwatch
        self._policy: Population
        self._schedule: UpdateSchedule
        self._steps: NDArray[np.float64]
        self._made: NDArray[np.float64]
        self._sizes: NDArray[np.int64]
        self._full = False
        self._capacity = storage.rows * storage.streams

    @property
    def period(self) -> int:
        """A generation may have any number of steps, so the period is 1."""
        return 1

    def begin(self, policy: Population, generation: int) -> None:
        """Start a generation with the agents of `policy`."""
        agents = policy.agents
        self._policy = policy
        if self._statistics is not None:
            self._statistics.begin(policy)
        learn_step = np.array([agent.hyperparameters["learn_step"] for agent in agents])
        debt = np.array([agent.state.update_debt for agent in agents])
        # Agents change places and environments may be reset: the next transition does not continue the last one.
        self.storage.break_streams()
        self.windows.begin(agents)
        self._schedule = UpdateSchedule(learn_step, debt)
        self._made = np.zeros(len(agents))
        known = self._gather(np.array([float(self.storage.drawable), float(self.storage.full)]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        self.sampler.begin(agents, generation, len(known))

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments; invalid steps are never drawn.

        Raises UserError if ranks run in lockstep and no valid transition is left to draw.
        """
        clip, valid = self._settings.reward_clip, transition.valid
        if self._statistics is not None:
            self._statistics.add(transition)
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
        if self._settings.lockstep or transition.all_valid:
            # Other ranks are not told of a step dropped here and assume the same number of steps as their own.
            self._steps = np.full(valid.shape[0], float(valid.shape[1]))
        else:
            self._steps = valid.sum(1).cpu().numpy().astype(np.float64)
        if self._settings.lockstep and not self.storage.drawable:
            when = "in the very first step" if self.storage.written == 1 else "in every step that replay.capacity keeps"
            raise UserError(f"environment.id: every environment failed {when}")

    def batches(self) -> Iterator[Batch]:
        """Yield the batches due after the steps since the last call, one per population update."""
        steps = self._agree_on_steps()
        self._policy.acted(steps)
        # A ring also holds resets: even when full it may hold fewer than `learning_starts` valid transitions.
        if self._sizes.sum() < self._settings.learning_starts and not self._full:
            return
        counts = self._schedule.due(steps if self._settings.split_batches else steps / len(self._sizes))
        updates = int(counts.max())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            slots, weight, share = self.sampler.draw(updates)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(weight.device)
            parts = [_unbound(group) for group in self.windows.gather(slots)]
            everyone = int(counts.min())
        shares = [None] * updates if share is None else share.unbind()
        shared = zip(weight.unbind(), due.unbind(), shares, strict=True)
        for number, (fields, (own, learns, part)) in enumerate(zip(zip(*parts, strict=True), shared, strict=True)):
            seen, following, columns = fields
            yield Batch(seen, following, columns, own, learns, all_due=number < everyone, number=number, share=part)

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        """Pass the result of an update on one of the last drawn batches to the sampler."""
        self.sampler.observe(batch.number, result)

    def _agree_on_steps(self) -> NDArray[np.float64]:
        """Return each agent's steps [P] since the last call, summed over its ranks; record every rank's replay size.

        The same exchange carries the samplers' reports. Ranks in lockstep skip the exchange and have nothing to report.
        """
        if self._settings.lockstep:
            self._sizes = np.minimum(self._sizes + int(self._steps.sum()), self._capacity)
            self._full = self._full or bool((self._sizes == self._capacity).all())
            steps, reports = self._steps * len(self._sizes), np.zeros((len(self._sizes), 0))
        else:
            with self._stopwatch("sampling"):
                report = self.sampler.report()
            with self._stopwatch("communication"):
                known = self._gather(np.concatenate([[self.storage.drawable, self.storage.full], self._steps, report]))
            self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
            steps, reports = known[:, 2 : 2 + len(self._steps)].sum(0), known[:, 2 + len(self._steps) :]
        self._made = self._made + steps
        with self._stopwatch("sampling"):
            self.sampler.agree(Agreement(self._sizes, self._made, reports))
        return steps

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its fractional update debt."""
        if self._statistics is not None:
            self._statistics.update()
        for agent, debt in zip(agents, self._schedule.debt(), strict=True):
            agent.state.update_debt = float(debt)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Return this rank's replay contents for a checkpoint."""
        tensors, numbers = self.storage.state()
        return tensors | self.sampler.state(), numbers

    def snapshot(self) -> tuple[Tensors, dict[str, int]]:
        """Return the contents of the replay, and how far this generation's schedule and draws are."""
        tensors, numbers = self.state()
        buffered = {} if self._statistics is None else self._statistics.snapshot()
        counters = {
            "steps": torch.from_numpy(self._schedule.steps),
            "made": torch.from_numpy(self._made),
            "sizes": torch.from_numpy(self._sizes),
        }
        within = _prefixed("counters.", counters) | _prefixed("draws.", self.sampler.generators())
        return tensors | {
            f"{WITHIN}{name}": value for name, value in (within | _prefixed("statistics.", buffered)).items()
        }, {**numbers, FULL: int(self._full)}

    def resume(self, tensors: Tensors, numbers: Mapping[str, int]) -> None:
        """Load the output of `snapshot` into an empty replay of the same agents and capacity.

        Raises UserError for an invalid one.
        """
        within = _part_of(WITHIN, tensors)
        rows, known = {name: tensors[name] for name in tensors if not name.startswith(WITHIN)}, dict(numbers)
        check_numbers({FULL: known.pop(FULL, -2)}, (FULL,), WHERE)
        counters = {name: torch.zeros(len(self._made), dtype=torch.float64) for name in ("steps", "made")}
        counters["sizes"] = torch.zeros(len(self._sizes), dtype=torch.int64)
        load_like(_part_of("counters.", within), counters, WHERE)
        for name, values in counters.items():
            most = self._capacity if name == "sizes" else 10**15
            if not ((values >= 0) & (values <= most)).all():
                raise UserError(f"{WHERE}: {name} hold what nothing counts to")
        self.restore(rows, known)
        if self.storage.written != known["written"]:
            raise UserError(f"{WHERE}: it is of another capacity")
        self._schedule.resume(counters["steps"].numpy())
        self._made, self._sizes = counters["made"].numpy(), counters["sizes"].numpy()
        self._full = bool(numbers[FULL])
        self.sampler.resume(_part_of("draws.", within))
        if self._statistics is not None:
            self._statistics.resume(_part_of("statistics.", within))

    def restore(self, rows: Tensors, numbers: dict[str, int]) -> None:
        """Restore from the output of `state`."""
        priorities = {name: values for name, values in rows.items() if name.startswith(PRIORITIES)}
        self.storage.restore({name: values for name, values in rows.items() if name not in priorities}, numbers)
        self.sampler.restore(priorities, numbers)


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def _part_of(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _unbound(values: Tensors) -> list[Tensors]:
    """Split values [U, P, B, ...] into one [P, B, ...] dictionary per update."""
    parts = zip(*(value.unbind() for value in values.values()), strict=True)
    return [dict(zip(values, part, strict=True)) for part in parts]


def _streams(values: Mapping[str, Tensor]) -> Tensors:
    """Flatten values [P, E, ...] to streams [N, ...]."""
    return {name: value.flatten(0, 1) for name, value in values.items()}
