"""`dense` by the C++ kernel of `kernels/dense.cpp`, as one autograd function. Axes: P agents, B batch, N units."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.jit._trace import is_tracing

from evorl.kernels.library import Kernel
from evorl.networks.dense import DensePlan
from evorl.types import Tensors

ACTIVATIONS = ("relu", "tanh", "elu", "gelu", "silu")
"""In the order of the kernel's numbers."""


def fits(plan: DensePlan, sources: Sequence[Tensor]) -> bool:
    """True for float32 on a CPU with hidden layers and heads; torch computes everything else, and what it traces."""
    if plan.bf16 or not plan.layers or not plan.heads or is_tracing():
        return False
    return all(source.dtype == torch.float32 and source.device.type == "cpu" for source in sources)


def kernel_dense(kernel: Kernel, plan: DensePlan, p: Tensors, sources: Sequence[Tensor]) -> list[Tensor]:
    """See `dense`, whose results this equals up to rounding."""
    sources = [source if source.is_contiguous() else source.contiguous() for source in sources]
    if not torch.is_grad_enabled():
        return _forward(kernel, plan, p, sources, keep=False)[0]
    names = [name for name in plan.parameters if name in p]
    return list(_KernelDense.apply(kernel, plan, names, len(sources), *sources, *[p[name] for name in names]))


def _forward(
    kernel: Kernel, plan: DensePlan, p: Tensors, sources: Sequence[Tensor], *, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs, and with `keep` the activations that the backward pass reads."""
    agents, rows = sources[0].shape[:2]
    sizes = [p[f"{head}.weight"].shape[2] for head in plan.heads]
    sizes += [p[f"{plan.heads[0]}.weight"].shape[1]] if plan.features else []
    outputs = [sources[0].new_empty(agents, rows, size) for size in sizes]
    call = _Call(plan, p, sources, outputs)
    trace = sources[0].new_empty(kernel.trace_size(call.words)) if keep else None
    if trace is not None:
        call.words[_Call.TRACE] = trace.data_ptr()
    kernel.dense(call.words, torch.get_num_threads())
    return outputs, trace


class _Call:
    """The arguments of a call: `words` in the order in which the kernel reads them, and what they point to."""

    TRACE = 8

    def __init__(
        self,
        plan: DensePlan,
        p: Tensors,
        sources: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        gradients: Tensors | None = None,
        source_gradients: Sequence[Tensor | None] = (),
        trace: Tensor | None = None,
    ) -> None:
        """With `gradients` of parameters, a backward pass, in which `outputs` are the gradients of the outputs."""
        backward, into = gradients is not None, gradients or {}
        kinds = [ACTIVATIONS.index(name) for name, start, stop in plan.spans for _ in range(start, stop)]
        self._activations = array("q", kinds)
        agents, rows = sources[0].shape[:2]
        words = [int(backward), agents, rows, plan.branches, len(sources), len(plan.layers), len(plan.heads)]
        words += [self._activations.buffer_info()[0], _address(trace)]
        of_outputs = [(0, _address(each)) if backward else (_address(each), 0) for each in outputs]
        words += of_outputs[-1] if plan.features else (0, 0)
        for index, source in enumerate(sources):
            words += source.shape[2], source.data_ptr(), _address(source_gradients[index]) if backward else 0
        for layer in plan.layers:
            words += p[layer.parameters[-1]].shape[2], layer.branches
            for name in layer.parameters:
                words += _address(p.get(name)), _address(into.get(name))
        for head, output in zip(plan.heads, of_outputs, strict=False):
            words.append(p[f"{head}.weight"].shape[2])
            for name in (f"{head}.weight", f"{head}.bias"):
                words += p[name].data_ptr(), _address(into.get(name))
            words += output
        self.words = array("q", words)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _KernelDense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, plan: DensePlan, names: list[str], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        p = dict(zip(names, tensors[count:], strict=True))
        outputs, trace = _forward(kernel, plan, p, tensors[:count], keep=True)
        ctx.kernel, ctx.plan, ctx.names, ctx.count = kernel, plan, names, count
        ctx.save_for_backward(trace, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        trace, *tensors = ctx.saved_tensors
        sources, p = tensors[: ctx.count], dict(zip(ctx.names, tensors[ctx.count :], strict=True))
        needed = ctx.needs_input_grad[4:]
        incoming = [None if gradient is None else gradient.contiguous() for gradient in output_gradients]
        to_sources = [torch.empty_like(x) if need else None for x, need in zip(sources, needed, strict=False)]
        to_parameters = {
            name: torch.empty_like(value)
            for (name, value), need in zip(p.items(), needed[ctx.count :], strict=True)
            if need
        }
        call = _Call(ctx.plan, p, sources, incoming, to_parameters, to_sources, trace)
        ctx.kernel.dense(call.words, torch.get_num_threads())
        return None, None, None, None, *to_sources, *[to_parameters.get(name) for name in ctx.names]
