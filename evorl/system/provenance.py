"""Provenance of results: versions, processors and threads."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("evorl-accelerate", "torch", "numpy", "gymnasium", "box2d", "ale-py")
"""Packages whose versions can change results."""
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux CPU flags for bfloat16 multiplication; the last is ARM's."""
CPU_FEATURES = Path("/proc/cpuinfo")


def made_with(device: torch.device) -> dict[str, str]:
    """Return the package versions, device, CPU type and thread count of this process."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found | {"device": name, "cpu": cpu(), "threads": str(torch.get_num_threads())}


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has bfloat16 units; assumed for a CPU whose flags cannot be read."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        features = CPU_FEATURES.read_text().split()
    except OSError:
        return True
    return not {*BF16_UNITS}.isdisjoint(features)


def cpu() -> str:
    """Return the CPU type as far as it affects rounding: the instruction set by which kernels are chosen."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
