"""Statistics by which agents with a replay normalise observations. Axes: P agents, E environments, T steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from evorl.envs.spec import ObservationSpecs, as_numbers
from evorl.replay import Gather, Population
from evorl.replay.moments import Moments
from evorl.system.timing import Stopwatch
from evorl.types import Tensors, Transition

EVERY = 64
"""Steps of each environment after which statistics move, in exchange with the other ranks; a generation's end too."""


class ObservationStatistics:
    """Lets agents normalise by all that was added to their replay, over all ranks that hold them.

    Where agents share the replay they learn from what all of this rank have seen, and normalise by it; else each by its
    own. Ranks make equally many steps, so that they exchange at the same ones.
    """

    def __init__(self, parts: ObservationSpecs, gather: Gather, shared: bool, stopwatch: Stopwatch) -> None:
        """`parts` are those that are normalised; `gather` asks all ranks that hold the same agents."""
        self._parts = parts
        self._gather = gather
        self._shared = shared
        self._stopwatch = stopwatch
        self._policy: Population
        self._seen: list[Tensors] = []
        self._valid: list[Tensor] = []

    def begin(self, policy: Population) -> None:
        """Start a generation of these agents."""
        self._policy = policy
        self._seen, self._valid = [], []

    def add(self, transition: Transition) -> None:
        """Take note of one step of all environments, if anything is normalised."""
        if not self._parts:
            return
        self._seen.append({name: transition.observation[name].clone() for name in self._parts})
        self._valid.append(transition.valid.clone())
        if len(self._seen) == EVERY:
            self.update()

    def update(self) -> None:
        """Let the agents normalise by what was noted too."""
        if not self._seen:
            return
        weight = torch.stack(self._valid, 1).flatten(1).double().numpy()
        for name, part in self._parts.items():
            # [T, P, E, ...] -> [P, T * E, D]
            seen = as_numbers(torch.stack([step[name] for step in self._seen], 1), part)
            samples = seen.reshape(*weight.shape, -1).double().cpu().numpy()
            self._policy.update_observation_stats(name, self._moments(samples, weight))
        self._seen, self._valid = [], []

    def _moments(self, samples: np.ndarray, weight: np.ndarray) -> Moments:
        """Return the moments [P] of samples [P, N, D] with weights [P, N] over all ranks, or of all agents together."""
        agents = len(weight)
        if self._shared:
            samples, weight = samples.reshape(1, -1, samples.shape[-1]), weight.reshape(1, -1)
        with self._stopwatch("communication"):
            moments = Moments.over_ranks(samples, weight, self._gather)
        return moments.part(np.zeros(agents, np.intp)) if self._shared else moments
