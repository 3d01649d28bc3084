"""Processes: their identity, since ids are reused and clocks are set, their ends, and the cores they may use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path

import psutil


def namespace() -> str:
    """Return what tells apart the machines and containers in which a process number means the same process.

    Containers may share a name. Where it is not known, no other process has the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return uuid.uuid4().hex


def usable_cores() -> int:
    """Return the number of cores that this process may run on: all of the machine's, or those of its CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_at(pid: int) -> float:
    """Return when a process began, in the system's own ticks, which do not move when the clock is set. 0 if unknown."""
    try:
        # The name, in brackets, may itself hold spaces and brackets.
        return float(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError, ValueError):
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).create_time()
        return 0.0


def identity() -> str:
    """Return a name for this process, which no other has."""
    return f"{namespace()}/{os.getpid()}/{started_at(os.getpid()):g}"


def launcher() -> str:
    """Return a name for the process that started this one."""
    return f"{namespace()}/{os.getppid()}/{started_at(os.getppid()):g}"


def end_sibling(pid: int, began: float) -> bool:
    """Kill a process of the same launcher as this one that began at `began`; return whether there was one.

    Nothing else can be meant: whoever can write the number can also write that of a bystander.
    """
    with contextlib.suppress(OSError, psutil.Error, ValueError, TypeError, OverflowError):
        # By a descriptor, the process that is checked is the one that is killed, whoever has its number by then.
        descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        try:
            if not began or psutil.Process(pid).ppid() != os.getppid() or started_at(pid) != began:
                return False
            if descriptor is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return True
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return False


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when `parent`, which started it, ends; at once where that has happened.

    Only Linux does it. More exactly, the thread that started this process must end.
    """
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
