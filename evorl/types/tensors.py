"""Names of what tensors are. Axes: P agents, E environments, A actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Flags = NDArray[np.bool_]
Tensors = dict[str, "Tensor"]
Roles = dict[str, Tensors]
"""The tensors of one network of one agent, by role."""
Observation = Mapping[str, "Tensor"]
"""Observation parts [P, E, ...], with `action_mask` [P, E, A] where actions can be masked."""
