"""The state of a learner that updates modify, as one flat buffer shared by several processes in turn.

Axes: P agents, D all parameters and moments, N networks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evorl.population.learner import Learner


def state_size(learner: Learner) -> int:
    """Return D, the number of values in the flat buffer."""
    return sum(values.numel() for values in _flats(learner))


@torch.no_grad()
def write_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Write parameters and moments into `flat` [D], and the agents' optimiser steps into `updates` [N, P]."""
    place = 0
    for values in _flats(learner):
        # The parameters may already be views of this buffer.
        if values.data_ptr() != flat[place:].data_ptr():
            flat[place : place + values.numel()] = values
        place += values.numel()
    policy = learner.policy
    for room, name in zip(updates, policy.algorithm.networks, strict=True):
        room.copy_(policy.joined([own[name].adam.updates for own in learner.networks]))


@torch.no_grad()
def read_state(learner: Learner, flat: Tensor, updates: Tensor) -> None:
    """Load the state written by `write_state`."""
    place = 0
    for values in _flats(learner):
        if values.data_ptr() != flat[place:].data_ptr():
            values.copy_(flat[place : place + values.numel()])
        place += values.numel()
    for taken, name in zip(updates, learner.policy.algorithm.networks, strict=True):
        for own, stack in zip(learner.networks, learner.policy.stacks, strict=True):
            own[name].adam.load(taken[stack.members])


def _flats(learner: Learner) -> list[Tensor]:
    """Return the flat parameters and observation statistics, followed by Adam's moments of every network."""
    adams = [network.adam for own in learner.networks for network in own.values()]
    return [learner.policy.flat.detach(), *(moments.flat for adam in adams for moments in (adam.mean, adam.square))]
