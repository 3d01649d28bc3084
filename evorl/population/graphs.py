"""Whole updates as CUDA graphs, each of which takes the host one launch.

An update of small networks is some 160 launches, which take the host 3.3 ms where the GPU works for 0.33; captured by
hand it took 0.34 (docs/results/gpu.md). A graph repeats what was launched while it was captured, with the same tensors
and with the numbers that the host had then. So an update reads its batch from memory of its own, and there is a graph
for everything else that the host decides.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from evorl.system.plugins import described
from evorl.types.batches import Batch, UpdateResult
from evorl.types.outcomes import EvorlWarning, UserError

TRIED = 8
"""Updates of a kind that are launched singly before it is captured: a capture costs some of them, and rare kinds never
pay for it."""
MOST_GRAPHS = 16
"""Each keeps a batch of its own; batches of many sizes are not worth it."""


class Recorder:
    """Captures what a function launches on the current GPU; the random numbers come from `generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._stream = torch.cuda.Stream(generator.device)
        # Graphs run one after another, and what an update leaves is copied before the next, so they share memory.
        self._pool = torch.cuda.graph_pool_handle()

    def try_out(self, function: Callable[[], UpdateResult]) -> tuple[UpdateResult, str]:
        """Call the function on the capture's stream, where libraries allocate their workspaces on first use.

        Also returns the line in which the host waits for the GPU, which a capture does not allow, or "".
        """
        here, mode = torch.cuda.current_stream(self._generator.device), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(here)
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(self._stream)
        waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
        for warning in caught:
            if warning not in waits:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return result, f"{waits[0].filename}:{waits[0].lineno}" if waits else ""

    def capture(self, function: Callable[[], UpdateResult]) -> tuple[UpdateResult, Callable[[], None]]:
        """Return the function's result and a replay, each call of which writes that result's tensors anew."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        # A simulator's threads may allocate memory during a capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


class UpdateGraphs:
    """Captures updates, and replays those of a kind and with sizes of a batch that it has captured."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tried: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[Batch, UpdateResult, Callable[[], None]]] = {}
        self._waits = False

    def take(self, update: Callable[[Batch], UpdateResult], batch: Batch, kind: Hashable) -> UpdateResult:
        """Update with a batch; `kind` is all that `update` reads from the host. Raises UserError if a capture fails."""
        tensors = _tensors(batch)
        key = kind, tuple(batch.columns), tuple((each.shape, each.dtype, each.device) for each in tensors)
        if key in self._captured:
            static_batch, result, replay = self._captured[key]
            for mine, given in zip(_tensors(static_batch), tensors, strict=True):
                mine.copy_(given)
        elif self._waits or len(self._captured) == MOST_GRAPHS:
            return update(batch)
        elif self._tried[key] < TRIED:
            self._tried[key] += 1
            result, where = self._recorder.try_out(lambda: update(batch))
            if where:
                self._waits = True
                warnings.warn(
                    f"run.kernel: updates are not captured as CUDA graphs: the host waits for the GPU at {where}",
                    EvorlWarning,
                    stacklevel=2,
                )
            return result
        else:
            static_batch = batch.mapped(torch.clone)
            try:
                result, replay = self._recorder.capture(lambda: update(static_batch))
            except Exception as error:
                # What a broken capture leaves to the allocator and to generators is unknown.
                raise UserError(
                    "run.kernel: an update could not be captured as a CUDA graph "
                    f"({described(error.__context__ or error)}); use run.kernel=auto"
                ) from error
            self._captured[key] = static_batch, result, replay
        replay()
        return UpdateResult(_copied(result.active), _copied(result.errors))


def _tensors(batch: Batch) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.mapped(note)
    return tensors


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
