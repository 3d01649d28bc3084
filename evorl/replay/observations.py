"""The observations by which agents normalise what they see. Axes: T steps, P agents, E environments, D components."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from evorl.envs.spaces import ObservationSpecs, as_numbers
from evorl.replay.experience import ActingAgents
from evorl.replay.statistics import Gather, Moments
from evorl.replay.storage import WHERE
from evorl.system.formats import check_tensors
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Transition
from evorl.types.outcomes import UserError
from evorl.types.tensors import Tensors

EVERY = 64
"""Steps of each environment between merges of a replay's observations; another takes place at a generation's end."""
SEEN, VALID = "seen.", "valid"
"""Tensor names, or prefixes of names, in a state."""


def moments_of(parts: ObservationSpecs, observation: Mapping[str, Tensor], valid: Tensor) -> dict[str, Moments]:
    """Moments of each part of P * N observations, in the order of `valid` [P, N], which masks out some of them."""
    moments = {}
    for name, part in parts.items():
        values = as_numbers(observation[name], part)
        moments[name] = Moments.of(values.reshape(*valid.shape, -1), valid.to(values.device))
    return moments


class ObservationStatistics:
    """Merges observations of all ranks that hold the agents into the statistics by which agents normalise them.

    Every agent normalises by the observations of all agents on this rank that share theirs with it, or by its own. A
    replay adds single steps, which are merged every `EVERY` steps: ranks take equally many, so they merge together.
    """

    def __init__(self, parts: ObservationSpecs, gather: Gather, stopwatch: Stopwatch, sharing: int = 1) -> None:
        """`parts` are the observation parts to normalise; `gather` reaches all ranks that hold the same agents.

        Each `sharing` agents, one after another, share their observations.
        """
        self._parts = parts
        self._gather = gather
        self._sharing = sharing
        self._stopwatch = stopwatch
        self._policy: ActingAgents
        self._seen: list[Tensors] = []
        self._valid: list[Tensor] = []

    def begin(self, policy: ActingAgents) -> None:
        """Start a generation with the agents of `policy`."""
        self._policy = policy
        self._seen, self._valid = [], []

    def add(self, transition: Transition) -> None:
        """Add the observations of one step of all environments to those that wait to be merged."""
        if not self._parts:
            return
        self._seen.append({name: transition.observation[name].clone() for name in self._parts})
        device = next(iter(self._seen[-1].values())).device
        self._valid.append(transition.valid.to(device, copy=True))
        if len(self._seen) == EVERY:
            self.merge_waiting()

    def merge_waiting(self) -> None:
        """Merge the observations that wait."""
        if self._seen:
            steps = {name: torch.stack([step[name] for step in self._seen], 1) for name in self._parts}
            self.merge(steps, torch.stack(self._valid, 1))
        self._seen, self._valid = [], []

    def merge(self, observation: Tensors, valid: Tensor) -> None:
        """Merge the `valid` [P, T, E] ones of observations [P, T, E, ...]."""
        agents = np.arange(len(valid)) // self._sharing
        moments = moments_of(self._parts, observation, valid.reshape(len(valid) // self._sharing, -1))
        for name, of_rank in moments.items():
            with self._stopwatch("communication"):
                of_all = of_rank.over_ranks(self._gather)
            self._policy.update_observation_stats(name, of_all.part(agents))

    def state_dict(self) -> Tensors:
        """The waiting observations [T, P, E, ...] by part, and which of them are valid; empty if there are none."""
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
            raise UserError(f"{WHERE}: observations that are not yet in the statistics are of other agents or steps")
        expected = {f"{SEEN}{name}": ((*valid.shape, *part.shape), part.dtype) for name, part in self._parts.items()}
        check_tensors(tensors, {**expected, VALID: (tuple(valid.shape), torch.bool)}, WHERE)
        seen = {name: tensors[f"{SEEN}{name}"].to(device) for name in self._parts}
        self._seen = [{name: values[step] for name, values in seen.items()} for step in range(len(valid))]
        self._valid = list(valid.to(device))
