"""The C++ kernel of `dense.cpp`: built by the machine's compiler on first use, kept in the user's cache directory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("dense.cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    # A product and a sum in one instruction; non-finite numbers keep their meaning.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
BUILD_SECONDS = 120
"""The time limit of a build, which takes 3 s on an idle core."""


@dataclass
class Kernel:
    """The loaded library. Arrays of int64 hold sizes and addresses, in the order in which `dense.cpp` reads them."""

    library: ctypes.CDLL
    digest: str
    """Identifies source, compiler, flags and CPU: equal digests compute equal bits, with any number of threads."""
    threads: int = 1
    """The threads that share the agents of a call, in this process."""

    def trace_size(self, words: array[int], addresses: array[int], rows: int) -> int:
        """Floats that a forward pass over `rows` keeps for its backward pass."""
        return int(self.library.dense_trace_size(words.buffer_info()[0], addresses.buffer_info()[0], rows))

    def dense(
        self,
        words: array[int],
        addresses: array[int],
        rows: int,
        parameters: Tensor,
        gradient: Tensor | None,
        trace: Tensor | None,
        *,
        backward: bool = False,
    ) -> None:
        """Run the forward or backward pass that `words` describe; the interpreter's lock is not held meanwhile."""
        flats = (parameters.data_ptr(), 0 if gradient is None else gradient.data_ptr())
        address = 0 if trace is None else trace.data_ptr()
        numbers = words.buffer_info()[0], addresses.buffer_info()[0], rows
        self.library.dense(*numbers, *flats, backward, address, self.threads)

    def squares(self, sizes: array[int], values: Tensor, sums: Tensor) -> None:
        """Write each agent's sum of squares of flat `values` to `sums` [P] of float64."""
        addresses = _address(values), _address(sums, torch.float64)
        self.library.squares(len(sizes), len(sums), sizes.buffer_info()[0], *addresses)

    def adam(
        self,
        sizes: array[int],
        flats: Sequence[Tensor],
        updates: Tensor,
        epsilon: float,
        learning_rate: Tensor,
        clip: Tensor | None,
        active: Tensor | None,
    ) -> None:
        """A step of Adam on `flats`: parameters, first and second moments, gradient.

        Numbers are per agent [P]; `updates` of float64 include this step.
        """
        addresses = *map(_address, flats), _address(updates, torch.float64)
        numbers = _address(learning_rate), _address(clip), _address(active)
        self.library.adam(len(sizes), len(learning_rate), sizes.buffer_info()[0], *addresses, epsilon, *numbers)

    def follow(self, sizes: array[int], target: Tensor, parameters: Tensor, tau: Tensor) -> None:
        """Move each agent's flat `target` to its `parameters` by a share `tau` [P]."""
        addresses = _address(target), _address(parameters), _address(tau)
        self.library.follow(len(sizes), len(tau), sizes.buffer_info()[0], *addresses)


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int:
    """The address that the kernel reads, 0 for none; anything but this type would be read as garbage."""
    if tensor is None:
        return 0
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise TypeError(f"the kernel reads contiguous {dtype}, not {tensor.dtype}")
    return tensor.data_ptr()


@functools.cache
def load_kernel() -> Kernel | str:
    """The kernel, from the cache or newly built; or a line that says why this machine cannot use it."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return "no C++ compiler (CXX, c++, g++, clang++)"
    native = "-mcpu=native" if platform.machine() == "arm64" else "-march=native"
    command = [compiler, *FLAGS, native, str(SOURCE)]
    try:
        digest = _digest(command)
        path = _cache() / f"dense-{digest}.so"
        if not path.is_file():
            _build(command, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: there is no home directory.
        return " ".join(str(error).split())[:200]
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.dense_trace_size.restype = number
    library.dense_trace_size.argtypes = [address, address, number]
    library.dense.restype = library.squares.restype = library.adam.restype = library.follow.restype = None
    library.dense.argtypes = [address, address, number, address, address, number, address, number]
    library.squares.argtypes = [number, number, address, address, address]
    library.adam.argtypes = [number, number, *[address] * 6, ctypes.c_double, *[address] * 3]
    library.follow.argtypes = [number, number, *[address] * 4]
    return Kernel(library, digest)


def usable_kernel(setting: object) -> Kernel | None:
    """The kernel if `run.kernel` is not false and this machine can build it, else None."""
    kernel = load_kernel() if setting is not False else None
    return kernel if isinstance(kernel, Kernel) else None


def missing_kernel(setting: object) -> str:
    """The reason why this machine cannot use the kernel, or "" if it can, or if `run.kernel` is false."""
    kernel = load_kernel() if setting is not False else ""
    return kernel if isinstance(kernel, str) else ""


def _digest(command: Sequence[str]) -> str:
    """Sixteen hexadecimal digits that change with the source, the compiler, its flags and the CPU's instructions."""
    version = subprocess.run([command[0], "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    cpu = platform.processor().encode()
    if (described := Path("/proc/cpuinfo")).is_file():
        lines = described.read_text().splitlines()
        cpu = "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        ).encode()
    parts = [SOURCE.read_bytes(), version, " ".join(command[:-1]).encode(), cpu]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache() -> Path:
    """The cache directory, which only this user may write. Raises OSError otherwise."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evorl"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not a directory that only you may write")
    return path


def _build(command: Sequence[str], path: Path) -> None:
    """Compile to a temporary name and rename, so that ranks which build at the same time do not disturb each other."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        result = subprocess.run(
            [*command, "-o", str(built)], capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS
        )
        if result.returncode != 0:
            first = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise OSError(f"{command[0]} failed: {first}")
        built.replace(path)
