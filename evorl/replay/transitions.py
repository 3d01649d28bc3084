"""A replay filled by actor processes, with actor-computed initial priorities (Ape-X, arXiv 1803.00933).

Axes: T steps of a rollout, P agents, E environments, N = P * E streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from evorl.replay.experience import ReplayExperience
from evorl.replay.segment import RolloutMemory
from evorl.types import PolicyOutput, Transition

ERROR = "error"
"""The rollout column with the td_error that sets initial priorities."""


class ReceivedTransitions(ReplayExperience):
    """A replay of rollouts that arrive one after the other, each on an actor's streams.

    A rollout does not continue the previous one, which may be another actor's: n-step windows end with it.
    """

    def __init__(self, *parts: Any, steps: int) -> None:
        """`steps` is the rollout length per environment; the other arguments are those of `ReplayExperience`."""
        super().__init__(*parts)
        self._period = steps

    @property
    def period(self) -> int:
        """The rollout length: a generation has a whole number of rollouts."""
        return self._period

    def extend(self, slot: RolloutMemory) -> None:
        """Store an actor's rollout, with initial priorities from its errors."""
        with self._stopwatch("receiving"):
            self.storage.break_streams()
            steps = []
            for transition, output in _steps(slot):
                self.add(transition, output)
                steps.append(self._steps)
            self._steps = sum(steps[1:], steps[0])
            errors = slot.columns([ERROR])[ERROR].transpose(0, 1).flatten(1)
            self.sampler.insert(errors.double().numpy())


def _steps(slot: RolloutMemory) -> Iterator[tuple[Transition, PolicyOutput]]:
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
