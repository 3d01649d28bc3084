"""A replay that actor processes fill, with first priorities by their own errors (arXiv 1803.00933).

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
"""The column of a rollout by which its transitions are first drawn."""


class ReceivedTransitions(ReplayExperience):
    """A replay of rollouts that arrive one after the other, each on as many streams as an actor has.

    One does not go on with the one before it, which may be another actor's: windows of several steps end with it.
    """

    def __init__(self, *parts: Any, steps: int) -> None:
        """`steps` are those of each environment in a rollout; the rest is as in `ReplayExperience`."""
        super().__init__(*parts)
        self._period = steps

    @property
    def period(self) -> int:
        """A generation has a whole number of rollouts."""
        return self._period

    def extend(self, slot: RolloutMemory) -> None:
        """Store what an actor did, to be drawn by the errors that it gave."""
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
    """Yield the steps of a rollout, as environments gave them."""
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
