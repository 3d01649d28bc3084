"""The number of torch threads that compute in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from evorl.distributed.signals import LAUNCHED
from evorl.envs.spec import ObservationSpecs
from evorl.system.processes import usable_cores


def use_threads(wanted: int | None, parts: ObservationSpecs, ranks: int) -> int:
    """Let torch compute with as many threads as suit the observation; gives their number.

    `wanted` is `run.threads`, `parts` what the agents' networks read, `ranks` the number of processes on this machine.
    """
    images = any(part.kind == "image" for part in parts.values())
    count = choose_threads(wanted or _set_by_user(), images, usable_cores(), ranks)
    torch.set_num_threads(count)
    return count


def choose_threads(wanted: int | None, images: bool, cores: int, ranks: int) -> int:
    """Return the number of threads wanted, if any is; else 1, or for images an equal share of the cores.

    Small products are done sooner than a second thread has begun, and where another program holds that thread's core
    every one of them waits.
    """
    if wanted is not None:
        return wanted
    return max(1, cores // ranks) if images else 1


def _set_by_user() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it: where not, `accelerate launch` sets it for its processes."""
    variables: Mapping[str, str] = os.environ
    if any(name in variables for name in LAUNCHED):
        try:
            variables = psutil.Process(os.getppid()).environ()
        except psutil.Error:
            return None
    # OpenMP takes a list, of which the first number is for what is not nested.
    first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
