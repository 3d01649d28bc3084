"""Observation normalisation statistics for agents with a replay. Axes: P agents, E environments, T steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from evorl.envs.spaces import ObservationSpecs, as_numbers
from evorl.replay.moments import Gather, Moments
from evorl.replay.protocols import Population
from evorl.replay.stored import WHERE
from evorl.system.console import Stopwatch
from evorl.system.formats import check_tensors
from evorl.types import Tensors, Transition, UserError

EVERY = 64
"""Statistics are exchanged between ranks every so many steps of each environment, and at a generation's end."""

SEEN, VALID = "seen.", "valid"
"""Tensor names, or prefixes of names, in a snapshot of the buffer."""


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

    def snapshot(self) -> Tensors:
        """Return the buffered observations [T, P, E, ...] by part, and which of them count; empty if there are none."""
        if not self._seen:
            return {}
        parts = {f"{SEEN}{name}": torch.stack([step[name] for step in self._seen]) for name in self._parts}
        return parts | {VALID: torch.stack(self._valid)}

    def resume(self, tensors: Tensors) -> None:
        """Load the output of `snapshot`. Raises UserError for an invalid one."""
        if not tensors:
            return
        valid = tensors.get(VALID, torch.zeros(0))
        if valid.dim() != 3 or not 0 < len(valid) < EVERY or valid.shape[1] != len(self._policy.agents):
            raise UserError(
                f"{WHERE}: the observations that are not yet in the statistics are of other agents or steps"
            )
        expected = {f"{SEEN}{name}": ((*valid.shape, *part.shape), part.dtype) for name, part in self._parts.items()}
        check_tensors(tensors, {**expected, VALID: (tuple(valid.shape), torch.bool)}, WHERE)
        self._seen = [{name: tensors[f"{SEEN}{name}"][step] for name in self._parts} for step in range(len(valid))]
        self._valid = list(valid)

    def _moments(self, samples: np.ndarray, weight: np.ndarray) -> Moments:
        """Return moments [P] of samples [P, N, D] with weights [P, N] over all ranks, pooled over agents if shared."""
        agents = len(weight)
        if self._shared:
            samples, weight = samples.reshape(1, -1, samples.shape[-1]), weight.reshape(1, -1)
        with self._stopwatch("communication"):
            moments = Moments.over_ranks(samples, weight, self._gather)
        return moments.part(np.zeros(agents, np.intp)) if self._shared else moments
