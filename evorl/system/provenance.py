"""Provenance of results beside the configuration: versions, processors and threads."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("evorl-accelerate", "torch", "numpy", "gymnasium", "box2d", "ale-py")
"""The packages whose versions can change what a run computes."""
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""The names by which Linux says that a CPU multiplies in bfloat16; the last is that of ARM."""
CPU_FEATURES = Path("/proc/cpuinfo")


def made_with(device: torch.device) -> dict[str, str]:
    """Return the versions, the device, the kind of CPU and the threads that this process computes with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found | {"device": name, "cpu": cpu(), "threads": str(torch.get_num_threads())}


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has units for bfloat16; a CPU that does not tell is taken to have them."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        features = CPU_FEATURES.read_text().split()
    except OSError:
        return True
    return not {*BF16_UNITS}.isdisjoint(features)


def cpu() -> str:
    """Return the kind of CPU as far as rounding depends on it: its instructions, by which kernels are chosen."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
