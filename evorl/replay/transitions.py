"""Replay for off-policy algorithms: observation statistics, and replay filled here or by actors.

Axes: P agents, E environments, N = P * E streams, T steps, B batch, U updates. Actors compute initial priorities as
Ape-X does (arXiv 1803.00933).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.envs.generation import steps_of_generation
from evorl.envs.spaces import EnvSpec, ObservationSpecs, as_numbers
from evorl.replay.experience import Experience, Population, UpdateSchedule
from evorl.replay.prioritised import PrioritisedSampler, PrioritySettings, PriorityTree
from evorl.replay.rollouts import RolloutMemory
from evorl.replay.samplers import DRAWS, PRIORITIES, RankTotals, Sampler, SamplerSettings, UniformSampler
from evorl.replay.statistics import Gather, Moments
from evorl.replay.storage import WHERE, Field, Storage, memory_at_first
from evorl.replay.windows import Returns, Sequences, Windows, make_windows
from evorl.system.formats import check_tensors, load_like, numbers_to_tensors, part_of, with_prefix
from evorl.system.processes import check_room
from evorl.system.stopwatch import Stopwatch
from evorl.types import Agent, Batch, PolicyOutput, Tensors, Transition, UpdateResult, UserError

GATHERED_BYTES = 2**28
"""Batches of several updates are gathered in groups of about this many bytes."""
EVERY = 64
"""Steps of each environment between exchanges of statistics among ranks; another takes place at a generation's end."""

SEEN, VALID = "seen.", "valid"
"""Tensor names, or prefixes of names, in the state of observation statistics."""


class ObservationStatistics:
    """Running observation statistics over all transitions added to the replay, on all ranks that hold the agents.

    With a shared replay, every agent normalises by the observations of all agents on this rank; otherwise each by its
    own. Ranks take equally many steps, so they exchange at the same ones.
    """

    def __init__(self, parts: ObservationSpecs, gather: Gather, shared: bool, stopwatch: Stopwatch) -> None:
        """`parts` are the observation parts to normalise; `gather` reaches all ranks that hold the same agents."""
        self._parts = parts
        self._gather = gather
        self._shared = shared
        self._stopwatch = stopwatch
        self._policy: Population
        self._seen: list[Tensors] = []
        self._valid: list[Tensor] = []

    def begin(self, policy: Population) -> None:
        """Start a generation with the agents of `policy`."""
        self._policy = policy
        self._seen, self._valid = [], []

    def add(self, transition: Transition) -> None:
        """Buffer the observations of one step of all environments; update the statistics when the buffer is full."""
        if not self._parts:
            return
        self._seen.append({name: transition.observation[name].clone() for name in self._parts})
        self._valid.append(transition.valid.clone())
        if len(self._seen) == EVERY:
            self.update()

    def update(self) -> None:
        """Merge the buffered observations into the agents' statistics."""
        if not self._seen:
            return
        weight = torch.stack(self._valid, 1).flatten(1).double().numpy()
        for name, part in self._parts.items():
            # [T, P, E, ...] -> [P, T * E, D]
            seen = as_numbers(torch.stack([step[name] for step in self._seen], 1), part)
            samples = seen.reshape(*weight.shape, -1).double().cpu().numpy()
            self._policy.update_observation_stats(name, self._moments(samples, weight))
        self._seen, self._valid = [], []

    def state_dict(self) -> Tensors:
        """The buffered observations [T, P, E, ...] by part, and which of them count; empty if there are none."""
        if not self._seen:
            return {}
        parts = {f"{SEEN}{name}": torch.stack([step[name] for step in self._seen]) for name in self._parts}
        return parts | {VALID: torch.stack(self._valid)}

    def load_state_dict(self, tensors: Tensors, device: torch.device) -> None:
        """Load the output of `state_dict` to the device of the observations. Raises UserError for an invalid one."""
        if not tensors:
            return
        valid = tensors.get(VALID, torch.zeros(0))
        if valid.dim() != 3 or not 0 < len(valid) < EVERY or valid.shape[1] != len(self._policy.agents):
            raise UserError(
                f"{WHERE}: the observations that are not yet in the statistics are of other agents or steps"
            )
        expected = {f"{SEEN}{name}": ((*valid.shape, *part.shape), part.dtype) for name, part in self._parts.items()}
        check_tensors(tensors, {**expected, VALID: (tuple(valid.shape), torch.bool)}, WHERE)
        seen = {name: tensors[f"{SEEN}{name}"].to(device) for name in self._parts}
        self._seen = [{name: values[step] for name, values in seen.items()} for step in range(len(valid))]
        self._valid = list(valid)

    def _moments(self, samples: np.ndarray, weight: np.ndarray) -> Moments:
        """Moments [P] of samples [P, N, D] with weights [P, N] over all ranks, pooled over agents if shared."""
        agents = len(weight)
        if self._shared:
            samples, weight = samples.reshape(1, -1, samples.shape[-1]), weight.reshape(1, -1)
        with self._stopwatch("communication"):
            moments = Moments.over_ranks(samples, weight, self._gather)
        return moments.part(np.zeros(agents, np.intp)) if self._shared else moments


COUNTERS, STATISTICS = "counters.", "statistics."
"""Prefixes of tensors in a state, beside those of the storage and the sampler."""


@dataclass(frozen=True)
class ReplaySettings:
    """When and how often to learn from replay.

    In `lockstep` all ranks that hold the same agents add equally many transitions. With `split_batches`, `learn_step`
    counts environment steps over all of these ranks, otherwise on each. Unless `shared`, agents learn from their own
    transitions only.
    """

    learning_starts: int
    lockstep: bool
    reward_clip: float | None
    split_batches: bool
    shared: bool = True


class ReplayExperience(Experience):
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
        *,
        gather: Gather,
        stopwatch: Stopwatch,
        statistics: ObservationStatistics,
        period: int,
    ) -> None:
        """`windows` turns the slots that `sampler` draws into transitions.

        `statistics` are the running observation statistics used for normalisation; they may cover no part.
        """
        super().__init__(period, gather=gather, device=storage.device, stopwatch=stopwatch)
        self._statistics = statistics
        self.storage = storage
        self.windows = windows
        self.sampler = sampler
        self._settings = settings
        self._schedule: UpdateSchedule
        self._new_steps: NDArray[np.float64]
        self._made: NDArray[np.float64]
        self._sizes: NDArray[np.int64]
        self._full = False
        self._capacity = storage.rows * storage.streams
        self._row_bytes = sum(2 * math.prod(part.shape) * part.dtype.itemsize for part in storage.parts.values()) + 32

    def begin(self, policy: Population, generation: int) -> None:
        super().begin(policy, generation)
        agents = policy.agents
        self._statistics.begin(policy)
        learn_step = np.array([agent.hyperparameters["learn_step"] for agent in agents])
        debt = np.array([agent.state.update_debt for agent in agents])
        # Agents change places and environments may be reset: the next transition does not continue the last one.
        self.storage.break_streams()
        self.windows.begin(agents)
        self._schedule = UpdateSchedule(learn_step, debt)
        self._made, self._new_steps = np.zeros(len(agents)), np.zeros(len(agents))
        known = self._gather(np.array([float(self.storage.drawable), float(self.storage.full)]))
        self._sizes, self._full = known[:, 0].astype(np.int64), bool(known[:, 1].all())
        self.sampler.begin(agents, generation, len(known))

    def add(self, transition: Transition, output: PolicyOutput) -> None:
        """Store one step of all environments; invalid steps are never drawn.

        Raises UserError if ranks run in lockstep and no valid transition is left to draw.
        """
        clip, valid = self._settings.reward_clip, transition.valid
        self._statistics.add(transition)
        columns = {
            "action": output.action,
            "reward": transition.reward if clip is None else transition.reward.clamp(-clip, clip),
            "terminated": transition.terminated,
        }
        self.storage.write_step(transition, columns)
        if self._settings.lockstep or transition.all_valid:
            # Other ranks are not told of a step dropped here and assume the same number of steps as their own.
            self._new_steps += float(valid.shape[1])
        else:
            self._new_steps += valid.sum(1).cpu().numpy()
        if self._settings.lockstep and not self.storage.drawable:
            when = "in the very first step" if self.storage.written == 1 else "in every step that replay.capacity keeps"
            raise UserError(f"environment.id: every environment failed {when}")

    def batches(self) -> Iterator[Batch]:
        """Yield the batches due after the steps since the last call, one per update of the population."""
        steps = self._sync_steps()
        self._policy.acted(steps)
        # A ring also holds resets: even when full it may hold fewer than `learning_starts` valid transitions.
        if self._sizes.sum() < self._settings.learning_starts and not self._full:
            return
        counts = self._schedule.due(steps if self._settings.split_batches else steps / len(self._sizes))
        updates = int(counts.max())
        if updates == 0:
            return
        with self._stopwatch("sampling"):
            draws = self.sampler.draw(updates)
            due = torch.from_numpy((np.arange(updates)[:, None] < counts).astype(np.float32)).to(draws.weight.device)
            everyone = int(counts.min())
        rows = draws.slots[0].numel() * (self.windows.transitions + self.windows.burn_in)
        at_once = max(1, GATHERED_BYTES // (rows * self._row_bytes))
        for first in range(0, updates, at_once):
            with self._stopwatch("sampling"):
                found = self.windows.batches(draws.of(slice(first, first + at_once)))
            for update in range(min(at_once, updates - first)):
                number = first + update
                yield found.batch(update, number, due[number], all_due=number < everyone)

    def observe(self, batch: Batch, result: UpdateResult) -> None:
        if result.errors is not None:
            result = UpdateResult(result.active, self.windows.errors(result.errors, batch))
        self.sampler.observe(batch.number, result)

    def _sync_steps(self) -> NDArray[np.float64]:
        """Sum each agent's steps [P] since the last call over its ranks, and record every rank's replay size.

        The same exchange carries the samplers' totals. Ranks in lockstep skip it, and their samplers need none.
        """
        new, self._new_steps = self._new_steps, np.zeros_like(self._new_steps)
        if self._settings.lockstep:
            self._sizes = np.minimum(self._sizes + int(new.sum()), self._capacity)
            self._full = self._full or bool((self._sizes == self._capacity).all())
            steps, samplers = new * len(self._sizes), np.zeros((len(self._sizes), 0))
        else:
            with self._stopwatch("sampling"):
                local = self.sampler.local_totals()
            with self._stopwatch("communication"):
                totals = self._gather(np.concatenate([[self.storage.drawable, self.storage.full], new, local]))
            self._sizes, self._full = totals[:, 0].astype(np.int64), bool(totals[:, 1].all())
            steps, samplers = totals[:, 2 : 2 + len(new)].sum(0), totals[:, 2 + len(new) :]
        self._made = self._made + steps
        with self._stopwatch("sampling"):
            self.sampler.sync(RankTotals(self._sizes, self._made, samplers))
        return steps

    def end(self, agents: list[Agent]) -> None:
        """End the generation; each agent keeps its fractional update debt."""
        super().end(agents)
        self.sampler.end()
        self._statistics.update()
        for agent, debt in zip(agents, self._schedule.debt(), strict=True):
            agent.state.update_debt = float(debt)

    def state_dict(self) -> Tensors:
        """The contents of the replay and, within a generation, how far its schedule and draws are."""
        state = self.storage.state_dict() | self.sampler.state_dict()
        if not self._has_begun:
            return state
        return state | with_prefix(COUNTERS, self._counters()) | with_prefix(STATISTICS, self._statistics.state_dict())

    def load_state_dict(self, state: Tensors) -> None:
        counters = self._counters() if self._has_begun else {}
        load_like(part_of(COUNTERS, state), counters, WHERE)
        if not all(values.isfinite().all() for values in counters.values()):
            raise UserError(f"{WHERE}: its counters are not finite")
        sampler = {name: values for name, values in state.items() if name.startswith((PRIORITIES, DRAWS))}
        others = {name: values for name, values in state.items() if not name.startswith((COUNTERS, STATISTICS))}
        self.storage.load_state_dict({name: values for name, values in others.items() if name not in sampler})
        self.sampler.load_state_dict(sampler)
        if self._has_begun:
            self._schedule.steps = counters["steps"].numpy()
            self._made, self._sizes = counters["made"].numpy(), counters["sizes"].numpy()
            self._full = bool(counters["full"])
            self._statistics.load_state_dict(part_of(STATISTICS, state), self.storage.device)

    def _counters(self) -> Tensors:
        """Copies of this generation's counters."""
        counters = {"steps": self._schedule.steps, "made": self._made, "sizes": self._sizes}
        tensors = {name: torch.from_numpy(values.copy()) for name, values in counters.items()}
        return tensors | numbers_to_tensors(full=int(self._full))


EPSILON = 1e-6
"""Added to each error, so that all transitions can be drawn (arXiv 1511.05952)."""
ERROR = "error"
"""The rollout column with the td_error that sets initial priorities."""


class ReceivedTransitions(ReplayExperience):
    """A replay of rollouts that arrive one after the other, each on an actor's streams.

    A rollout does not continue the previous one, which may be another actor's: n-step windows end with it.
    """

    def extend(self, slot: RolloutMemory) -> None:
        """Store an actor's rollout, with initial priorities from its errors."""
        with self._stopwatch("receiving"):
            self.storage.break_streams()
            for transition, output in _transitions_of(slot):
                self.add(transition, output)
            self.sampler.insert(slot.column(ERROR).flatten(1).double().numpy())


def _transitions_of(slot: RolloutMemory) -> Iterator[tuple[Transition, PolicyOutput]]:
    """Yield the steps of a rollout as transitions and policy outputs."""
    names = ("action", "reward", "terminated", "truncated", "started", "valid")
    observation, columns = slot.observation(), slot.columns(names)
    nothing = torch.zeros(0)
    for step in range(slot.layout.steps):
        action, reward, terminated, truncated, started, valid = (columns[name][:, step] for name in names)
        transition = Transition(
            {name: value[:, step] for name, value in observation.items()},
            started,
            reward,
            slot.next_observation(step),
            terminated,
            truncated,
            valid,
            bool(valid.all()),
            bool(truncated.any()),
        )
        yield transition, PolicyOutput(action, {}, nothing, nothing)


def replay_experience(
    config: AnyConfig,
    interface: EnvSpec,
    placement: Placement,
    *,
    action: Field,
    returns: Returns,
    always_valid: bool,
    stopwatch: Stopwatch,
    normalized: Sequence[str],
    sequences: tuple[int, int] | None,
) -> ReplayExperience:
    """Build this rank's part of the replay; `capacity` and `learning_starts` are divided over the ranks.

    `returns` computes the algorithm's n-step returns; agents normalise the observation parts in `normalized`, and
    recurrent ones learn from `sequences` (length, burn-in). Raises UserError if memory is insufficient or the
    rank's part is too small for such windows.
    """
    ranks, replay = placement.ranks, config.replay
    share = max(1, replay.capacity // ranks.size)
    streams = placement.local_size * config.environment.num_envs
    storage = make_replay(share, streams, interface, action, ranks.device, ranks.on_host)
    prioritised = replay.prioritised is not None or not replay.shared
    windows: Windows = make_windows(storage, replay.n_step, returns)
    if sequences is not None:
        windows = Sequences(storage, *sequences)
    place = SamplerSettings(
        config.seed,
        ranks.rank,
        placement.copy,
        config.algorithm.split_batches,
        windows.transitions,
    )
    settings = ReplaySettings(
        learning_starts=min(replay.learning_starts * placement.copies // ranks.size, share * placement.copies),
        # Ranks that exchange priorities learn each other's sizes anyway and need no lockstep.
        lockstep=always_valid and not prioritised and config.actors is None,
        reward_clip=config.algorithm.reward_clip,
        split_batches=config.algorithm.split_batches,
        shared=replay.shared,
    )
    sampler = _prioritised(config, storage, placement, place) if prioritised else UniformSampler(storage, place)
    parts = {name: interface.parts[name] for name in normalized}
    statistics = ObservationStatistics(parts, placement.gather_copies, replay.shared, stopwatch)
    make = ReplayExperience if config.actors is None else ReceivedTransitions
    return make(
        storage,
        windows,
        sampler,
        settings,
        gather=placement.gather_copies,
        stopwatch=stopwatch,
        statistics=statistics,
        period=_period(config),
    )


def _period(config: AnyConfig) -> int:
    """The steps of each environment that arrive together."""
    return 1 if config.actors is None else int(config.algorithm.sent_steps)


def make_replay(
    capacity: int, streams: int, interface: EnvSpec, action: Field, device: torch.device, ranks_on_host: int = 1
) -> Storage:
    """Allocate a storage of `capacity` transitions from `streams` environments, at least one row of them.

    Raises UserError if memory is insufficient.
    """
    parts = interface.with_mask()
    columns: dict[str, Field] = {"action": action, "reward": ((), torch.float32), "terminated": ((), torch.bool)}
    rows = max(1, capacity // streams)
    size = memory_at_first(rows, streams, parts, columns)
    sharing = ranks_on_host if device.type == "cpu" else 1
    check_room(size, "replay.capacity", copies=1, device=device, processes=sharing)
    return Storage(rows, streams, parts, columns, device)


def _prioritised(
    config: AnyConfig, storage: Storage, placement: Placement, place: SamplerSettings
) -> PrioritisedSampler:
    """Build a prioritised sampler; per-agent replay without prioritisation uses equal priorities."""
    agents, ranks, given = placement.local_size, placement.ranks, config.replay.prioritised
    size = PriorityTree.memory(agents, storage.slots)
    check_room(size, "replay.capacity: priorities", copies=1, processes=ranks.on_host)
    rows = steps_of_generation(config, placement.copies, _period(config))
    settings = PrioritySettings(
        exponent=given.exponent if given else 0.0,
        epsilon=EPSILON if given else 1.0,
        importance_start=given.importance_exponent.start if given else 0.0,
        importance_end=given.importance_exponent.end if given else 0.0,
        generation_steps=rows * config.environment.num_envs * placement.copies,
        importance_steps=(given and given.importance_exponent.steps) or config.training.max_steps,
        shared=config.replay.shared,
    )
    return PrioritisedSampler(storage, agents, settings, place)
