"""Compilation of a loss gradient for the layout of a stack. Axes: P agents, B batch, D all values of a network."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from evorl.algorithms import Objective
from evorl.networks.dense import Tape
from evorl.networks.stack import Stack
from evorl.system.console import say
from evorl.types import Batch, EvorlWarning, Loss, Tensors

Function = Callable[..., tuple[Tensor, ...]]


class Compiler:
    """Caches a compiled function per objective and stack layout, across generations.

    A function computes the flat gradient of a loss and its errors for priorities, if any; averaging over ranks, the
    optimiser step and target updates follow outside. Losses that sample random numbers, recurrent batches, and updates
    whose metrics are reported are not compiled. Inductor caches compiled code on disk for later runs.
    """

    def __init__(self, enabled: bool, speaks: bool = True) -> None:
        self.enabled = enabled
        self._speaks = speaks
        self._functions: dict[object, Function | None] = {}

    def bind(self, objective: Objective, stack: Stack) -> CompiledLoss:
        """Bind the loss of an objective to a stack, to be compiled for each batch layout it is called with."""
        return CompiledLoss(self, objective, stack)

    def function(self, objective: Objective, stack: Stack, batch: Batch) -> Function | None:
        """Compile the loss for this stack and batch, or look it up.

        None if it samples random numbers or this machine cannot compile.
        """
        inputs = [*_of_batch(batch), *_of_stack(stack)]
        names = [name for group in inputs for name in group]
        values = [value for group in inputs for value in group.values()]
        layouts = tuple(network.layout for network in stack.networks.values())
        key = objective.network, layouts, tuple(names), *((value.shape, value.stride()) for value in values)
        if key not in self._functions:
            self._functions[key] = self._compiled(objective, stack, batch, values) if self.enabled else None
        return self._functions[key]

    def _compiled(self, objective: Objective, stack: Stack, batch: Batch, inputs: list[Tensor]) -> Function | None:
        generator = torch.Generator(inputs[0].device)
        before, started = generator.get_state(), time.perf_counter()

        def gradient(*values: Tensor) -> tuple[Tensor, ...]:
            return _gradient(objective, *_rebuilt(stack, batch, iter(values)), generator)

        try:
            traced = make_fx(gradient)(*inputs)
            if not torch.equal(generator.get_state(), before):
                return None
            with torch.no_grad():
                function = _optimised(traced, inputs)
                function(*inputs)
        except Exception as error:  # Compilers may raise anything.
            self.enabled = False
            reason = " ".join(str(error).split())[:200]
            if self._speaks:
                message = f"training.compile: this machine cannot compile, so updates run without it ({reason})"
                warnings.warn(message, EvorlWarning, stacklevel=2)
            return None
        if self._speaks:
            agents, seconds = len(batch.weight), time.perf_counter() - started
            say(f"training.compile: compiled the update of {objective.network} of {agents} agents in {seconds:.0f} s")
        return function


def _optimised(traced: GraphModule, inputs: list[Tensor]) -> Function:
    """Compile a graph: with CUDA graphs on a GPU; on a CPU without input checks, which take 40 us."""
    if inputs[0].device.type == "cuda":
        options: Any = {"triton.cudagraphs": True}
        captured: Function = torch.compile(traced, fullgraph=True, dynamic=False, options=options)
        return captured
    from torch import _inductor  # Importing it takes 2 s.

    function: Function = _inductor.compile(traced, list[Any](inputs))
    return function


class CompiledLoss:
    """The loss of a stack, compiled for each batch size."""

    def __init__(self, compiler: Compiler, objective: Objective, stack: Stack) -> None:
        self._compiler = compiler
        self._objective = objective
        self._stack = stack
        self._inputs = [value for group in _of_stack(stack) for value in group.values()]
        self._functions: dict[object, Function | None] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, gradient: Tensor) -> Loss | None:
        """Write the flat gradient [D] and return the loss without its elements, or None if it is not compiled."""
        if batch.recurrent is not None:
            return None
        values = [value for group in _of_batch(batch) for value in group.values()]
        # Compiled code is specific to the batch size and the memory layout.
        layout = batch.weight.shape, *[value.stride() for value in values]
        if layout not in self._functions:
            self._functions[layout] = self._compiler.function(self._objective, self._stack, batch)
        function = self._functions[layout]
        if function is None:
            return None
        found, *errors = function(*values, *self._inputs)
        gradient.copy_(found)
        return Loss(found[:0], errors=errors[0] if errors else None)


def _of_batch(batch: Batch) -> list[Mapping[str, Tensor]]:
    weights = {"weight": batch.weight, "due": batch.due}
    return [batch.observation, batch.next_observation, batch.columns, weights]


def _of_stack(stack: Stack) -> list[Mapping[str, Tensor]]:
    groups: list[Mapping[str, Tensor]] = [stack.hyperparameters, stack.state]
    networks = [*stack.networks.values(), *stack.targets.values()]
    return groups + [network.tensors for network in networks]


def _rebuilt(stack: Stack, batch: Batch, values: Iterator[Tensor]) -> tuple[Stack, Batch]:
    """Rebuild the stack and the batch around `values`, in order."""

    def taken(groups: list[Mapping[str, Tensor]]) -> list[Tensors]:
        return [{name: next(values) for name in group} for group in groups]

    observation, following, columns, weights = taken(_of_batch(batch))
    hyperparameters, state, *networks = taken(_of_stack(stack))
    given = iter(networks)
    online, targets = (
        {name: network.computing_with(next(given)) for name, network in group.items()}
        for group in (stack.networks, stack.targets)
    )
    return (
        Stack(stack.members, online, hyperparameters, state, targets),
        Batch(observation, following, columns, weights["weight"], weights["due"], all_due=batch.all_due),
    )


def _gradient(objective: Objective, stack: Stack, batch: Batch, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The flat gradient [D] of the loss of a batch, and its errors [P, B] for priorities if it has any."""
    network, found = stack.networks[objective.network], Tensors()
    with torch.enable_grad():
        network.tape = Tape()
        loss = objective.loss(stack, batch, generator)
        network.tape.gradient(loss, batch.weight, network.leaves, found)
    flat = torch.cat([found[name].reshape(-1) for name in network.leaves])
    return (flat,) if loss.errors is None else (flat, loss.errors.detach())
