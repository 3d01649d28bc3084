"""The learner's side of its actors: it publishes parameters, receives experience, and measures rates and staleness.

Axes: P agents, A actors, R ranks.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.actors.collectors import COLLECTORS, Message, message_size, messages_in
from evorl.actors.memory import Board, Description, SharedMemory
from evorl.actors.supervisor import COUNT_KEY, Supervisor
from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.distributed import Placement, Ranks
from evorl.envs.episodes import Collected, Recent
from evorl.population import Learner, Policy
from evorl.population.learner import read_state, split_states, state_size, write_state
from evorl.system.closing import Closeable
from evorl.system.files import file_errors
from evorl.system.processes import check_room, usable_cores
from evorl.types.outcomes import EvorlWarning


def warn_of_cores(count: int, ranks: Ranks) -> None:
    """Warn if a host has more actors than cores."""
    cores, actors = usable_cores(), count * ranks.on_host
    if actors > cores and ranks.is_main:
        warnings.warn(
            f"actors.count: {actors} actors and {ranks.on_host} learning process{'es' if ranks.on_host > 1 else ''} "
            f"share {cores} core{'s' if cores > 1 else ''}; more than {cores} actors are unlikely to collect faster",
            EvorlWarning,
            stacklevel=3,
        )


Floats = NDArray[np.float64]
SUMMED = ("rollouts", "staleness", "queue_depth", "restarts", "discarded_old")
"""The metrics that are summed over messages and actors; staleness and queue depth are then divided by the rollouts."""


class Counters:
    """Counters of one rank's actors since they were last read: experience, rates and staleness."""

    def __init__(self, actors: int, agents: int) -> None:
        self._counts = np.zeros((len(Collected._fields), agents))
        # Each agent's number of episodes since the last call of `recent`, and their returns and lengths.
        self._lately = np.zeros((3, agents))
        self._steps = np.zeros(actors)
        self._sums = dict.fromkeys(SUMMED, 0.0)
        self._max_staleness = 0
        self._began = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def received(self, actor: int, counts: Floats, staleness: int, waiting: int) -> None:
        """Record a message's counters [C, P], its staleness in updates, and how many other messages are waiting."""
        collected = Collected(*counts)
        self._counts += counts
        self._lately += collected.episodes, collected.returns, collected.lengths
        self._steps[actor] += counts[0].sum()
        self._sums["rollouts"] += 1
        self._sums["staleness"] += staleness
        self._sums["queue_depth"] += waiting
        self._max_staleness = max(self._max_staleness, staleness)

    def discarded(self) -> None:
        """Count a discarded message, which is of an earlier generation."""
        self._sums["discarded_old"] += 1

    def pop_collected(self) -> Collected:
        """The counters of the messages received since the last call."""
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        return Collected(*counts)

    def recent(self) -> Recent | None:
        """The means over the episodes received since the last call, or None without any."""
        sums, self._lately = self._lately, np.zeros_like(self._lately)
        return Recent.of(sums)

    def pop(self, placement: Placement, restarts: int) -> dict[str, float]:
        """All other metrics over all ranks, which are reset; actors are numbered rank after rank."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._sums["restarts"] += restarts
        of_rank = np.array([*self._sums.values(), self._max_staleness, *(self._steps / seconds)])
        everyones = placement.ranks.gather(of_rank, "the other ranks' actors")
        metrics = dict(zip(SUMMED, everyones[:, : len(SUMMED)].sum(0).tolist(), strict=True))
        for mean in ("staleness", "queue_depth"):
            metrics[mean] /= max(metrics["rollouts"], 1)
        rates = everyones[:, len(SUMMED) + 1 :].flatten()
        self._steps[:], self._max_staleness = 0.0, 0
        self._sums = dict.fromkeys(SUMMED, 0.0)
        return {
            **metrics,
            "max_staleness": float(everyones[:, len(SUMMED)].max()),
            **{f"steps_per_second/{actor}": float(rate) for actor, rate in enumerate(rates)},
        }


class Actors(Closeable):
    """The actors of this rank; each acts for all of the rank's agents.

    An actor has `actors.queue` messages, to fill or waiting to be received. It blocks while it has none to fill.
    """

    def __init__(self, config: AnyConfig, placement: Placement, algorithm: Algorithm) -> None:
        """Start the process that forks actors.

        Raises UserError if actors need too many open files.
        """
        assert config.actors is not None
        self._config = config
        self._settings = config.actors
        self._placement = placement
        self._algorithm = algorithm
        self.sent_steps: int = config.algorithm.sent_steps
        warn_of_cores(self._settings.count, placement.ranks)
        self._memories: list[SharedMemory] = []
        self._first = placement.ranks.rank * self._settings.count
        """The number of this rank's first actor among those of all ranks."""
        context = {
            "config": config.to_yaml(),
            "agents": placement.local_size,
            "rank": placement.ranks.rank,
            "first_actor": self._first,
            "copies": placement.copies,
            "learner_device": placement.ranks.device.type,
        }
        self._collector = COLLECTORS[config.algorithm.actor_messages]
        with file_errors(COUNT_KEY), contextlib.ExitStack() as opened:
            self._board = Board(self._settings.count)
            opened.callback(self._board.close)
            for _ in range(self._settings.count):
                self._memories.append(SharedMemory())
                opened.callback(self._memories[-1].close)
            descriptors = [memory.descriptor for memory in self._memories]
            self._supervisor = Supervisor(self._settings, context, self._board, descriptors, self._first)
            self._opened = opened.pop_all()
        self._messages: dict[int, Any] = {}
        self._generation, self._published, self._turn = 0, 0, 0
        self._left = 0
        """Rollouts of this generation that are not handed out yet (lockstep only)."""
        self.counters = Counters(self._settings.count, placement.local_size)

    def close(self) -> None:
        self._supervisor.close()
        self._opened.close()

    def begin(self, policy: Policy, generation: int, carries_over: bool, steps: int) -> None:
        """Start a generation: publish its agents, for which actors make `steps` steps of this rank's environments.

        Raises UserError if actors need too much memory or too many open files.
        """
        count, queue = self._settings.count, self._settings.queue
        make, first = self._collector.layout(policy, self._config), not self._generation
        size = message_size(make)
        if first:
            rollouts = f"actors.queue: {count * queue} rollouts of {size / 2**20:.1f} MiB"
            check_room(size * count * queue, rollouts, processes=self._placement.ranks.on_host)
        with file_errors(COUNT_KEY):
            for actor, memory in enumerate(self._memories):
                memory.grow(size * queue)
                self._messages |= messages_in(memory, make, range(actor * queue, (actor + 1) * queue))
        self._generation, self._published, self._turn = generation, policy.version, 0
        self._left = steps // self.sent_steps
        flat, states = self._published_of(policy)
        # With shared parameters, an actor may still be publishing an update of the last generation.
        with self._board.locked(self._supervisor.look):
            self._board.describe(Description(generation, policy.agents, carries_over), len(flat), len(states))
            self._board.publish(flat, states, policy.version)
        if not self._supervisor.started:
            self._supervisor.start()
        self.publish(policy)
        if first and not self._settings.lockstep:
            for number in self._messages:
                self._supervisor.hand_out(number // queue, number)
        self.counters.begin()

    def receive(self, policy: Policy) -> Any:
        """Wait for the next message of this generation.

        Raises UserError if an actor reports one, and RunFailed if actors cannot be kept alive.
        """
        while (arrival := self._supervisor.receive()).generation != self._generation:
            self.counters.discarded()
            self._supervisor.hand_out(arrival.actor, arrival.number)
        message = self._messages[arrival.number]
        staleness = int(message.behind[0]) if self._collector.shared else policy.version - arrival.version
        self.counters.received(arrival.actor, message.counts.numpy(), staleness, self._supervisor.waiting)
        return message

    def release(self, message: Message) -> None:
        """Hand a received message back to its actor; its contents must not be read afterwards."""
        if not self._settings.lockstep:
            self._supervisor.hand_out(message.number // self._settings.queue, message.number)

    def publish(self, policy: Policy) -> None:
        """Publish the policy's parameters if they are new.

        In lockstep, do nothing while an actor is busy; once none is, also hand out the next messages.
        """
        lockstep = self._settings.lockstep
        if lockstep and self._supervisor.busy:
            return
        # Before the first update the version stays 0, but acting states and observation statistics change.
        if (policy.version != self._published or not policy.version) and not self._collector.shared:
            self._published = policy.version
            self._board.publish(*self._published_of(policy), policy.version)
        if lockstep:
            # Actors that share parameters take turns: their updates would otherwise come in no fixed order.
            together = min(self._left, 1 if self._collector.shared else self._settings.count)
            for _ in range(together):
                self._supervisor.hand_out(self._turn, self._turn * self._settings.queue)
                self._turn = (self._turn + 1) % self._settings.count
            self._left -= together

    def end(self, learner: Learner) -> None:
        """End the generation. With shared parameters, load the ones that the actors have updated into the learner."""
        if not self._collector.shared:
            return
        flat, states = self._board.empty()
        self._board.fetch(flat, states, self._generation)
        device = learner.policy.flat.device
        read_state(learner, flat.to(device), split_states(self._algorithm, states)[1].to(device))

    def _published_of(self, policy: Policy) -> tuple[Tensor, list[Tensor]]:
        """The parameters [D] of a policy and its acting states, each [P].

        With shared parameters, the learner's full state is included: Adam's moments and step counts.
        """
        states = list(policy.acting_states().values())
        if not self._collector.shared:
            return policy.flat.detach(), states
        learner = Learner(policy)
        flat = torch.empty(state_size(learner))
        updates = torch.empty(len(policy.algorithm.networks), len(policy.agents), dtype=torch.float64)
        write_state(learner, flat, updates)
        return flat, [*states, *updates]

    def pop_metrics(self, placement: Placement) -> dict[str, float]:
        """The metrics of all ranks' actors since the last call."""
        restarts, self._supervisor.restarts = self._supervisor.restarts, 0
        return self.counters.pop(placement, restarts)
