"""Processes: identity (pids are reused and clocks are changed), termination, and usable cores."""

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
    """Return an id of this machine and PID namespace, within which pids are comparable.

    Containers may share a host name. If the id cannot be read, it is unique to this call.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return uuid.uuid4().hex


def usable_cores() -> int:
    """Return the number of cores this process may use: its CPU affinity, or all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_at(pid: int) -> float:
    """Return a process's start time in system ticks, which clock changes do not affect; 0 if unknown."""
    try:
        # The name, in brackets, may itself contain spaces and brackets.
        return float(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError, ValueError):
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).create_time()
        return 0.0


def identity() -> str:
    """Return a globally unique name of this process."""
    return f"{namespace()}/{os.getpid()}/{started_at(os.getpid()):g}"


def launcher() -> str:
    """Return a globally unique name of the parent process."""
    return f"{namespace()}/{os.getppid()}/{started_at(os.getppid()):g}"


def end_sibling(pid: int, began: float) -> bool:
    """Kill the process with this pid and start time `began` if it has this process's parent; return whether it did.

    Nothing else may be killed: whoever can write the pid can also write that of an unrelated process.
    """
    with contextlib.suppress(OSError, psutil.Error, ValueError, TypeError, OverflowError):
        # A pidfd ensures that the process checked is the one killed, even if the pid is reused.
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
    """Have the kernel kill this process when its parent `parent` ends; exit now if it already has.

    Linux only. More exactly, the thread that started this process must end.
    """
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
