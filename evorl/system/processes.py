"""Processes and their machine: identity, termination, usable cores, free memory, versions and processors.

Pids are reused and clocks are changed, so a process is identified by more than its pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import signal
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from evorl.types.outcomes import UserError

if TYPE_CHECKING:
    import torch


def namespace() -> str:
    """An id of this machine and PID namespace, within which pids are comparable.

    Containers may share a host name. If the id cannot be read, it is unique to this call.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return uuid.uuid4().hex


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The cores this process may use: its CPU affinity, or all of the machine's, within a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, CPU_QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # No control group of version 2, or "max".
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def started_at(pid: int) -> float:
    """A process's start time: in ticks since boot on Linux, elsewhere in seconds since 1970; 0 if unknown."""
    try:
        # The name, in brackets, may itself contain spaces and brackets.
        return float(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError, ValueError):
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).create_time()
        return 0.0


def identity(pid: int) -> str:
    """A unique name of a living process: its namespace, its id and the time at which it started."""
    return f"{namespace()}/{pid}/{started_at(pid):g}"


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent `parent` ends; exit now if it already has.

    Linux only. More exactly, the thread that started this process must end.
    """
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The memory limits of all cgroups, and the path of this process's."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's `mallopt`."""
KEPT = 2**25
"""Size in bytes up to which freed blocks are kept: the maximum that glibc accepts."""


def check_room(size: int, where: str, *, device: torch.device | None = None, processes: int = 1) -> None:
    """Raise UserError unless each of `processes` processes on this host can allocate `size` bytes.

    `where` names the setting that needs the memory; without a `device` it is the CPU's.
    """
    free = free_memory(device)
    owner = "GPU memory" if device is not None and device.type == "cuda" else "memory"
    if size * processes > free:
        times = f", for each of {processes} ranks," if processes > 1 else ""
        raise UserError(
            f"{where}: {size / 2**30:.1f} GiB do not fit{times} into {free / 2**30:.1f} GiB of free {owner}"
        )


def keep_freed_memory() -> None:
    """Make glibc, if it is the C library, keep freed blocks.

    Otherwise it returns blocks of some MB to the kernel, which clears every page before its next use: 3,500 pages and 8
    of 80 ms for an update of 8 SAC agents of [256, 256].
    """
    with contextlib.suppress(OSError, AttributeError):
        change = ctypes.CDLL(None).mallopt
        change(MMAP_THRESHOLD, KEPT)
        change(TRIM_THRESHOLD, 2**30)


def free_memory(device: torch.device | None) -> int:
    """The free memory in bytes that this process can allocate on a device; None is the CPU."""
    if device is not None and device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> list[int]:
    """The free bytes under the memory limits of this process's cgroup and those around it (version 2)."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    path = next((GROUPS / line[len("0::/") :] for line in lines if line.startswith("0::/")), GROUPS)
    left = []
    # A container may see its own cgroup as the root, although the path is the host's.
    for group in (path, *path.parents) if path.is_dir() else (GROUPS,):
        # There is no limit at the root, and none is written as `max`.
        with contextlib.suppress(OSError, ValueError):
            most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The kernel reclaims inactive file pages before it kills a process.
            left.append(max(0, most - used + int(numbers.get("inactive_file", 0))))
    return left


PACKAGES = ("evorl-accelerate", "torch", "numpy", "gymnasium", "box2d", "mujoco", "minatar", "ale-py")
"""Packages whose versions can change results."""


@functools.cache
def _versions() -> dict[str, str]:
    """The versions of Python and of the packages, read once: every checkpoint names them."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def made_with(device: torch.device) -> dict[str, str]:
    """The package versions, device, CPU type and number of torch's threads of this process."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**_versions(), "device": name, "cpu": cpu(), "threads": str(torch.get_num_threads())}


def cpu() -> str:
    """The CPU type as far as it affects rounding: the instruction set by which kernels are chosen."""
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def is_first_rank() -> bool:
    """True if this process is the main process of its launch, or was not launched by Accelerate."""
    return os.environ.get("RANK", "0") == "0"
