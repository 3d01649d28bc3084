"""The objectives that an algorithm minimises. Axes: P agents of a stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evorl.networks.stack import Stack
from evorl.types import Batch, Loss

PerAgent = Callable[[Stack], Tensor]
"""Maps a stack to one number per agent [P]."""


@dataclass(frozen=True)
class Objective:
    """The loss and optimiser settings of one network in an update.

    `loss` may draw from the generator. `learning_rate` includes the learning rate schedule. `max_grad_norm` clips each
    agent's gradient by its own norm. Metrics of the loss are computed in every `report_every`-th of its updates.

    An agent's network is updated in the first of every `every` updates of that agent (TD3's policy delay, arXiv
    1802.09477). The optimiser steps of the first objective's network count the agent's updates; its `every` is 1.
    """

    network: str
    loss: Callable[[Stack, Batch, torch.Generator], Loss]
    learning_rate: PerAgent
    every: int = 1
    max_grad_norm: PerAgent | None = None
    report_every: int = 1


def hyperparameter(name: str) -> PerAgent:
    """Return the function that reads a hyperparameter [P] of a stack."""
    return lambda stack: stack.hyperparameters[name]
