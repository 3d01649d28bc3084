"""The number of torch compute threads of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from evorl.distributed.signals import LAUNCHED
from evorl.envs.spaces import ObservationSpecs
from evorl.system.processes import usable_cores


def use_threads(wanted: int | None, parts: ObservationSpecs, ranks: int) -> int:
    """Set and return the number of torch threads, chosen by the observation type unless given.

    `wanted` is `run.threads`, `parts` the observation specs, `ranks` the number of ranks on this machine.
    """
    images = any(part.kind == "image" for part in parts.values())
    count = choose_threads(wanted or _set_by_user(), images, usable_cores(), ranks)
    torch.set_num_threads(count)
    return count


def choose_threads(wanted: int | None, images: bool, cores: int, ranks: int) -> int:
    """Return `wanted` if given; else 1, or an equal share of the cores for image observations.

    A small matrix product finishes before a second thread has started, and waits for that thread if another program
    occupies its core.
    """
    if wanted is not None:
        return wanted
    return max(1, cores // ranks) if images else 1


def _set_by_user() -> int | None:
    """Return OMP_NUM_THREADS if the user set it; otherwise `accelerate launch` sets it for its processes."""
    variables: Mapping[str, str] = os.environ
    if any(name in variables for name in LAUNCHED):
        try:
            variables = psutil.Process(os.getppid()).environ()
        except psutil.Error:
            return None
    # OpenMP accepts a list with one number per nesting level.
    first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
