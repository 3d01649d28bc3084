"""Devices of tensors."""

from __future__ import annotations

import torch


def is_host(device: torch.device) -> bool:
    """True if the host reads this device's tensors without waiting; for a GPU it would wait until all work is done."""
    return device.type == "cpu"
