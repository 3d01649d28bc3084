"""A stopwatch: wall-clock seconds by name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the seconds spent in named blocks; time in an inner block is not counted again in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def shares(self, total: float) -> dict[str, float]:
        """Return each block's share of `total` seconds."""
        return {name: seconds / total for name, seconds in self.seconds.items()} if total > 0 else {}

    def clear(self) -> None:
        self.seconds.clear()
