"""Whole updates as CUDA graphs, each of which the host launches at once.

An update of small networks is some 160 launches, which take the host 3.3 ms where the GPU works for 0.33; captured by
hand it took 0.34 (docs/results/gpu.md). A graph repeats what was launched while it was captured, with the same tensors
and with the numbers that the host had then. So an update reads its batch from memory of its own, and there is a graph
for everything else that the host decides.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from evorl.system.plugins import described
from evorl.types.batches import Batch, UpdateResult
from evorl.types.outcomes import EvorlWarning

Kind = TypeVar("Kind", bound=Hashable)
TRIED = 2
"""Updates of a kind that are launched singly before it is captured, so that everything that it keeps has its memory."""
MOST_GRAPHS = 16
"""Each holds the memory of an update; batches of many sizes are not worth it."""


class Recorder:
    """Captures what a function launches on the current GPU; the random numbers come from `generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._stream = torch.cuda.Stream(generator.device)
        # Graphs run one after another, and what an update leaves is copied before the next, so they share memory.
        self._pool = torch.cuda.graph_pool_handle()

    def try_out(self, function: Callable[[], UpdateResult]) -> UpdateResult:
        """Call the function on the stream on which it will be captured, where libraries then have their workspaces."""
        here = torch.cuda.current_stream(self._generator.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = function()
        here.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], UpdateResult]) -> tuple[UpdateResult, Callable[[], None]]:
        """What the function returns, whose tensors each call of the replay fills. Raises what the capture raises."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        return result, graph.replay


class UpdateGraphs(Generic[Kind]):
    """Calls `update`, or replays it where an update of the same kind, with a batch of the same sizes, was captured."""

    def __init__(self, update: Callable[[Batch, Kind], UpdateResult], recorder: Recorder) -> None:
        self._update, self._recorder = update, recorder
        self._tried: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[Batch, UpdateResult, Callable[[], None]]] = {}
        self._fails = False

    def __call__(self, batch: Batch, kind: Kind) -> UpdateResult:
        """Update by a batch; `kind` is all that `update` reads from the host."""
        tensors = _tensors(batch)
        key = kind, tuple(batch.columns), tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self._captured:
            own, result, replay = self._captured[key]
            for mine, given in zip(_tensors(own), tensors, strict=True):
                mine.copy_(given)
        elif self._fails or self._tried[key] < TRIED or len(self._captured) == MOST_GRAPHS:
            self._tried[key] += 1
            return self._recorder.try_out(lambda: self._update(batch, kind))
        else:
            own = batch.mapped(torch.clone)
            try:
                result, replay = self._recorder.capture(lambda: self._update(own, kind))
            except Exception as error:
                self._fails = True
                warnings.warn(
                    f"run.kernel: an update could not be captured as a CUDA graph ({described(error)}), so that the "
                    "GPU waits for launches; run.kernel=false does not try it",
                    EvorlWarning,
                    stacklevel=2,
                )
                return self._update(batch, kind)
            self._captured[key] = own, result, replay
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
