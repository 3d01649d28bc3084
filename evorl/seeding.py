"""Random generators as a pure function of (seed, generation, rank, purpose), so that a generation is reproducible."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

WORD = 16
"""Bytes of each of the two numbers of PCG64: its state and its increment."""


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


def seed_global_generators(seed: int) -> None:
    """Seed this process's global generators of Python, NumPy and torch (on the CPU), from which environments may draw.

    Processes are forked with equal states of these, so copies of such an environment would repeat each other.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 670 us instead of 4.


def seed_process(seed: int, rank: int, process: str = "rank") -> None:
    """Seed the global generators of a process that is about to create environments, whose constructors may draw."""
    seed_global_generators(derive_seed(seed, generation=0, rank=rank, purpose=f"process: {process}"))


@contextlib.contextmanager
def global_generators_restored() -> Iterator[None]:
    """Restore the states of the global generators after a block that seeds them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def numpy_state(generator: np.random.Generator) -> Tensor:
    """Return the state of a PCG64 generator as bytes [37], little-endian; inverse of `set_numpy_state`."""
    state = generator.bit_generator.state
    inner, left = state["state"], state["uinteger"].to_bytes(4, "little")
    numbers = inner["state"].to_bytes(WORD, "little") + inner["inc"].to_bytes(WORD, "little")
    return torch.frombuffer(bytearray(numbers + left + bytes([state["has_uint32"]])), dtype=torch.uint8)


def set_numpy_state(generator: np.random.Generator, state: Tensor) -> None:
    """Load the output of `numpy_state`; any 37 bytes are a state."""
    numbers = state.numpy().tobytes()
    words = (int.from_bytes(numbers[at : at + WORD], "little") for at in (0, WORD))
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": dict(zip(("state", "inc"), words, strict=True)),
        "uinteger": int.from_bytes(numbers[2 * WORD : -1], "little"),
        "has_uint32": int(numbers[-1] > 0),
    }
