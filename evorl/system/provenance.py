"""Provenance of results beside the configuration: versions, processors and threads."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

import torch

PACKAGES = ("evorl-accelerate", "torch", "numpy", "gymnasium", "box2d", "ale-py")
"""The packages whose versions can change what a run computes."""


def made_with(device: torch.device) -> dict[str, str]:
    """Return the versions, the device, the kind of CPU and the threads that this process computes with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found | {"device": name, "cpu": cpu(), "threads": str(torch.get_num_threads())}


def cpu() -> str:
    """Return the kind of CPU as far as rounding depends on it: its instructions, by which kernels are chosen."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
