"""`dense` by the C++ kernel of `kernels/dense.cpp`, as one autograd function. Axes: P agents, B batch, N units."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.jit._trace import is_tracing

from evorl.kernels.library import Kernel
from evorl.networks.dense import DensePlan
from evorl.networks.flat import Weights

ACTIVATIONS = ("relu", "tanh", "elu", "gelu", "silu")
"""In the order of the kernel's numbers."""


def fits(plan: DensePlan, sources: Sequence[Tensor]) -> bool:
    """True for what the kernel computes: float32 on a CPU, hidden layers with its activations, and heads.

    Torch computes everything else, and what it traces.
    """
    if plan.bf16 or not plan.layers or not plan.heads or plan.activation not in ACTIVATIONS or is_tracing():
        return False
    return all(source.dtype == torch.float32 and source.device.type == "cpu" for source in sources)


class KernelPlan:
    """A plan as the kernel reads it: `words` of sizes and of places in the flat buffer of parameters, -1 for none."""

    def __init__(self, plan: DensePlan, weights: Weights, agents: int) -> None:
        shapes = weights.shapes
        *starts, end = accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
        offsets = dict(zip(shapes, starts, strict=True))
        first = plan.layers[0]
        widths = [shapes[f"{first.name}.weight{suffix}"][1] for suffix in first.suffixes]
        words = [agents, plan.branches, len(widths), len(plan.layers), len(plan.heads), int(plan.features)]
        words += [ACTIVATIONS.index(plan.activation), *widths]
        for layer in plan.layers:
            vectors = [f"{layer.name}.{part}" for part in ("bias", "gain", "shift", "scale")]
            matrices = [f"{layer.name}.weight{suffix}" for suffix in layer.suffixes]
            stored, _, units = shapes[vectors[0]]
            words += [units, layer.branches, stored // agents, *(offsets.get(name, -1) for name in vectors + matrices)]
        for head in plan.heads:
            words += [shapes[f"{head}.bias"][2], offsets[f"{head}.weight"], offsets[f"{head}.bias"]]
        self.words = array("q", words)
        self.masks = [f"{layer.name}.active_units" for layer in plan.layers]
        """The names of the layers' shares of units."""
        outputs = [(agents, shapes[f"{head}.bias"][2]) for head in plan.heads]
        self.outputs = [*outputs, (agents, shapes[f"{plan.heads[0]}.weight"][1])] if plan.features else outputs
        """P and the last axis of each output."""
        self.trace_sizes: dict[int, int] = {}
        """Floats that a forward pass keeps, by rows."""
        self.covers_all = end == sum(math.prod(shapes[name]) for name in plan.parameters if name in shapes)
        """True if no other layers share the flat buffer."""


def kernel_dense(kernel: Kernel, plan: KernelPlan, weights: Weights, sources: Sequence[Tensor]) -> Sequence[Tensor]:
    """See `dense`, whose results this equals up to rounding."""
    sources = [source if source.is_contiguous() else source.contiguous() for source in sources]
    masks = [weights.buffers.get(name) for name in plan.masks]
    if not torch.is_grad_enabled():
        return _forward(kernel, plan, masks, weights.flat, sources, keep=False)[0]
    outputs: tuple[Tensor, ...] = _KernelDense.apply(kernel, plan, masks, weights.flat, *sources)
    return outputs


def _forward(
    kernel: Kernel,
    plan: KernelPlan,
    masks: Sequence[Tensor | None],
    flat: Tensor,
    sources: Sequence[Tensor],
    *,
    keep: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs, and with `keep` the activations that the backward pass reads."""
    rows = sources[0].shape[1]
    outputs = [flat.new_empty(agents, rows, size) for agents, size in plan.outputs]
    addresses = _addresses(masks, sources, [None] * len(sources), outputs, [None] * len(outputs))
    if keep and rows not in plan.trace_sizes:
        plan.trace_sizes[rows] = kernel.trace_size(plan.words, addresses, rows)
    trace = flat.new_empty(plan.trace_sizes[rows]) if keep else None
    kernel.dense(plan.words, addresses, rows, flat, None, trace)
    return outputs, trace


def _addresses(
    masks: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    source_gradients: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    output_gradients: Sequence[Tensor | None],
) -> array[int]:
    """The addresses of a call's tensors in the order in which the kernel reads them, 0 for none."""
    pairs = (*zip(sources, source_gradients, strict=True), *zip(outputs, output_gradients, strict=True))
    tensors = [tensor for pair in pairs for tensor in pair]
    tensors[2 * len(sources) : 2 * len(sources)] = masks
    return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class _KernelDense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        plan: KernelPlan,
        masks: Sequence[Tensor | None],
        flat: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, trace = _forward(kernel, plan, masks, flat, sources, keep=True)
        ctx.kernel, ctx.plan, ctx.masks = kernel, plan, masks
        ctx.save_for_backward(trace, flat, *sources)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        trace, flat, *sources = ctx.saved_tensors
        *_, flat_needed = ctx.needs_input_grad[:4]
        incoming = [None if gradient is None else gradient.contiguous() for gradient in output_gradients]
        to_sources = [
            torch.empty_like(source) if needed else None
            for source, needed in zip(sources, ctx.needs_input_grad[4:], strict=True)
        ]
        allocate = torch.empty_like if ctx.plan.covers_all else torch.zeros_like
        to_flat = allocate(flat) if flat_needed else None
        addresses = _addresses(ctx.masks, sources, to_sources, [None] * len(incoming), incoming)
        rows = sources[0].shape[1]
        ctx.kernel.dense(ctx.plan.words, addresses, rows, flat, to_flat, trace, backward=True)
        return None, None, None, to_flat, *to_sources
