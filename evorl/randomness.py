"""Random generators as a pure function of (seed, generation, rank, purpose), so that a generation is reproducible."""

from __future__ import annotations

import zlib

import numpy as np
import torch


def derive_seed(seed: int, *, generation: int, rank: int, purpose: str) -> int:
    """Return a 63-bit seed, independent for each generation, rank and purpose."""
    entropy = [seed, generation, rank, zlib.crc32(purpose.encode())]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(
    seed: int, *, generation: int, rank: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a torch generator for one purpose in one generation on one rank."""
    value = derive_seed(seed, generation=generation, rank=rank, purpose=purpose)
    return torch.Generator(device=device).manual_seed(value)


def numpy_generator(seed: int, *, generation: int, rank: int, purpose: str) -> np.random.Generator:
    """Return a NumPy generator for one purpose in one generation on one rank."""
    return np.random.default_rng(derive_seed(seed, generation=generation, rank=rank, purpose=purpose))
