"""Free memory for this process: of the machine, of its control group (cgroup), or of a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import psutil
import torch

from evorl.types import UserError

GROUPS = Path("/sys/fs/cgroup")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's `mallopt`."""
KEPT = 2**25
"""Size in bytes up to which freed blocks are kept: the maximum that glibc accepts."""


def check_room(
    size: int, where: str, *, copies: int = 2, device: torch.device | str = "cpu", processes: int = 1
) -> None:
    """Raise UserError unless each of `processes` processes on this host can allocate `copies` copies of `size` bytes.

    The default of two copies is for data that is read from a file and then parsed. `where` names the file or setting
    that needs the memory.
    """
    device = torch.device(device)
    free, owner = free_memory(device), "GPU memory" if device.type == "cuda" else "memory"
    if copies * size * processes > free:
        times = (" twice" if copies == 2 else "") + (f", for each of {processes} ranks," if processes > 1 else "")
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


def free_memory(device: torch.device, groups: Path = GROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the free memory in bytes that this process can allocate on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *_left_in_groups(groups, membership)])


def _left_in_groups(groups: Path, membership: Path) -> list[int]:
    """Return the free bytes under the memory limits of this process's cgroups, versions 1 and 2."""
    left = []
    for root, path, limit, usage, cache in _memory_groups(groups, membership):
        # A container may see its own cgroup as the root, although the path is the host's.
        places = [root / path, *(root / path).parents] if (root / path).is_dir() else [root]
        for place in places:
            if not place.is_relative_to(root):
                break
            try:
                most, used = int((place / limit).read_text()), int((place / usage).read_text())
                lines = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                # The kernel reclaims inactive file pages before it kills a process.
                left.append(max(0, most - used + int(lines.get(cache, 0))))
            except (OSError, ValueError):  # No limit is written as `max`.
                continue
    return left


def _memory_groups(groups: Path, membership: Path) -> list[tuple[Path, str, str, str, str]]:
    """Return where each cgroup version keeps this process's memory limit, usage, and inactive file cache."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            found.append((groups, path.lstrip("/"), "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found.append((groups / "memory", path.lstrip("/"), *names))
    return found
