"""Compilation of a loss gradient for the layout of a stack. Axes: P agents, B batch, D all values of a network.

On a CPU, the widths of hidden layers are symbols in compiled code if mutations change them, so that such mutations
need no recompilation. Batch sizes and numbers of agents are constants.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from evorl.algorithms import Objective
from evorl.config import AnyConfig
from evorl.networks.stack import Layout, Stack, StackedNetwork
from evorl.system.console import say
from evorl.types import Agent, Batch, EvorlWarning, Loss, Tensors, message_of

Function = Callable[..., tuple[Tensor, ...]]
FIRST_WIDTH = 48
"""The width of the first hidden layer in the example used for tracing; each further layer is 16 wider."""
AUTO_UPDATES = 50_000
"""Updates after which `training.compile: auto` compiles. By then they have taken about as long as compiling does."""


class WidthsTrace:
    """A loss gradient that was traced with symbols for the widths of hidden layers.

    The example used for tracing has other widths, so that the trace does not depend on the stack's.
    """

    def __init__(self, gradient: Function, stack: Stack, batch: Batch) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # Importing it takes 0.3 s.

        self._symbols = ShapeEnv(duck_shape=False)
        self._example = _example(self._symbols, stack, batch)
        self._graph = make_fx(gradient, tracing_mode="symbolic")(*self._example)

    @cached_property
    def function(self) -> Function:
        """The compiled function."""
        return _optimised(self._graph, self._example)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """True if these inputs take the branches that trace and compilation took for the example."""
        guards = self._symbols.produce_guards_expression(self._example)
        return guards is None or bool(self._symbols.evaluate_guards_expression(guards, inputs))


class Compiler:
    """Caches compiled functions per objective and layout of a stack, across generations.

    A function computes the flat gradient of a loss, the loss per sample and its errors, if any; averaging over ranks,
    the optimiser step and target updates follow outside. Losses that sample random numbers, recurrent batches, and
    updates whose metrics are reported are not compiled. Inductor caches compiled code on disk for later runs.

    On a CPU, layouts that differ only in the widths of hidden layers share a function if `any_widths`. Which one a
    layout gets does not depend on those compiled before, so a resumed run computes the same as an uninterrupted one.
    """

    def __init__(self, mode: Literal["auto"] | bool, speaks: bool = True, any_widths: bool = True) -> None:
        """With `auto`, compile only where it pays off, and warn only if the machine could compile before."""
        self.enabled = mode is not False
        self._is_auto = mode == "auto"
        self._speaks = speaks
        self._any_widths = any_widths
        self._functions: dict[object, Function | None] = {}
        self._traces: dict[object, WidthsTrace | None] = {}

    @classmethod
    def of(cls, config: AnyConfig, speaks: bool = True) -> Compiler:
        """The compiler of a run. Functions for any width are slower, so only runs that mutate widths use them."""
        return cls(config.training.compile, speaks, any_widths=config.evolution.mutation.architecture > 0)

    def compiles(self, network: StackedNetwork, name: str, agents: Sequence[Agent]) -> bool:
        """True if the losses of network `name` of these agents are compiled until the generation ends.

        The choice depends on the agents alone, so a resumed run makes the same one.
        """
        if not self._is_auto:
            return self.enabled
        shape, device = network.layout.architecture, network.parameters.flat.device
        pays = device.type == "cpu" and bool(shape.hidden_sizes) and not shape.convolutions
        return self.enabled and pays and all(agent.state.updates[name] >= AUTO_UPDATES for agent in agents)

    def function(self, objective: Objective, stack: Stack, batch: Batch) -> Function | None:
        """Compile the loss for this stack and batch, or look it up.

        None for losses that are not compiled, and if this machine cannot compile.
        """
        key = _key(objective, stack, batch)
        if key not in self._functions:
            self._functions[key] = self._compiled(objective, stack, batch) if self.enabled else None
        return self._functions[key]

    def _compiled(self, objective: Objective, stack: Stack, batch: Batch) -> Function | None:
        started = time.perf_counter()
        try:
            function, is_new = self._found(objective, stack, batch)
        except Exception as error:  # Compilers may raise anything.
            self.enabled = False
            reason = message_of(error, 200)
            has_compiled = any(known is not None for known in self._functions.values())
            if self._speaks and (has_compiled or not self._is_auto):
                message = f"training.compile: this machine cannot compile, so updates run without it ({reason})"
                later = "; a resume that can compile will not be bit-exact" if has_compiled else ""
                warnings.warn(message + later, EvorlWarning, stacklevel=2)
            return None
        if self._speaks and is_new:
            agents, seconds = len(batch.weight), time.perf_counter() - started
            say(f"training.compile: compiled the update of {objective.network} of {agents} agents in {seconds:.0f} s")
        return function

    @torch.no_grad()
    def _found(self, objective: Objective, stack: Stack, batch: Batch) -> tuple[Function | None, bool]:
        """A function for all widths or for these alone, and whether it is new; None for a loss that is not compiled."""
        inputs = [value for group in (*_of_batch(batch), *_of_stack(stack)) for value in group.values()]
        generator = torch.Generator(batch.weight.device)

        def gradient(*values: Tensor) -> tuple[Tensor, ...]:
            return _gradient(objective, *_rebuilt(stack, batch, iter(values)), generator)

        before = generator.get_state()
        objective.loss(stack, batch, generator)
        if not torch.equal(generator.get_state(), before):
            return None, False
        is_general = self._any_widths and batch.weight.device.type == "cpu"
        trace = self._trace(gradient, objective, stack, batch) if is_general else None
        if trace is not None and trace.holds(inputs):
            is_new = "function" not in vars(trace)
            trace.function(*inputs)
            if trace.holds(inputs):
                return trace.function, is_new
        function = _optimised(make_fx(gradient)(*inputs), inputs)
        function(*inputs)
        return function, True

    def _trace(self, gradient: Function, objective: Objective, stack: Stack, batch: Batch) -> WidthsTrace | None:
        """The trace for these inputs with any widths; None if the code needs concrete widths."""
        key = _key(objective, stack, batch, any_widths=True)
        if key not in self._traces:
            try:
                self._traces[key] = WidthsTrace(gradient, stack, batch)
            except Exception:  # Code of others, such as a custom network's, may raise anything.
                self._traces[key] = None
        return self._traces[key]


def _key(objective: Objective, stack: Stack, batch: Batch, any_widths: bool = False) -> object:
    """All that a function depends on; with `any_widths`, regardless of the widths of hidden layers."""
    layouts = [network.layout for network in stack.networks.values()]
    layouts = [_with_widths(layout, FIRST_WIDTH) for layout in layouts] if any_widths else layouts
    groups = [*_of_batch(batch), *_of_stack(stack)]
    names = tuple(name for group in groups for name in group)
    numbers = [value for group in (*_of_batch(batch), *_of_numbers(stack)) for value in group.values()]
    return objective.network, tuple(layouts), names, *((value.shape, value.stride()) for value in numbers)


def _with_widths(layout: Layout, first: int) -> Layout:
    """The layout with hidden layers of `first` units, `first` + 16, and so on."""
    widths = tuple(first + 16 * index for index in range(len(layout.architecture.hidden_sizes)))
    return replace(layout, architecture=replace(layout.architecture, hidden_sizes=widths))


def _example(symbols: Any, stack: Stack, batch: Batch) -> list[Any]:
    """Inputs without values: those of stack and batch, with symbols for the widths of hidden layers."""
    from torch._dynamo.source import ConstantSource  # Importing these takes 2 s.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    # Losses may contain tensors of their own, such as bounds of actions; these become constants.
    mode = FakeTensorMode(shape_env=symbols, allow_non_fake_inputs=True)
    numbers = [value for group in (*_of_batch(batch), *_of_numbers(stack)) for value in group.values()]
    example = [mode.from_tensor(value, static_shapes=True) for value in numbers]
    for network in _networks(stack):
        layouts = [_with_widths(network.layout, first) for first in (FIRST_WIDTH, FIRST_WIDTH + 16)]
        shapes, others = map(network.shapes_of, layouts)
        for name in shapes:
            sizes = zip(shapes[name], others[name], strict=True)
            kinds = [DimDynamic.STATIC if size == other else DimDynamic.DYNAMIC for size, other in sizes]
            context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
            source = ConstantSource(f"input{len(example)}")
            example.append(mode.from_tensor(torch.empty(shapes[name]), source=source, symbolic_context=context))
    return example


def _optimised(traced: GraphModule, inputs: Sequence[Tensor]) -> Function:
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
        self._tensors = [value for network in _networks(stack) for value in network.with_all_shares().values()]
        self._functions: dict[object, Function | None] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch, gradient: Tensor) -> Loss | None:
        """Write the flat gradient [D] and return the loss without its metrics, or None if it is not compiled."""
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
        # Acting may replace the tensors of the state, so they are looked up here.
        numbers = [value for group in _of_numbers(self._stack) for value in group.values()]
        found, per_sample, *errors = function(*values, *numbers, *self._tensors)
        gradient.copy_(found)
        if errors and found.is_cuda:
            # The next call of any compiled function may reuse the memory that a CUDA graph writes to.
            errors = [errors[0].clone()]
        return Loss(per_sample, errors=errors[0] if errors else None)


def _of_batch(batch: Batch) -> list[Mapping[str, Tensor]]:
    weights = {"weight": batch.weight, "due": batch.due}
    return [batch.observation, batch.next_observation, batch.columns, weights]


def _of_numbers(stack: Stack) -> list[Mapping[str, Tensor]]:
    return [stack.hyperparameters, stack.state]


def _networks(stack: Stack) -> list[StackedNetwork]:
    return [*stack.networks.values(), *stack.target_networks.values()]


def _of_stack(stack: Stack) -> list[Mapping[str, Tensor]]:
    return [*_of_numbers(stack), *(network.with_all_shares() for network in _networks(stack))]


def _rebuilt(stack: Stack, batch: Batch, values: Iterator[Tensor]) -> tuple[Stack, Batch]:
    """Rebuild the stack and the batch around `values`, in order."""

    def taken(groups: list[Mapping[str, Tensor]]) -> list[Tensors]:
        return [{name: next(values) for name in group} for group in groups]

    observation, following, columns, weights = taken(_of_batch(batch))
    hyperparameters, state, *networks = taken(_of_stack(stack))
    given = iter(networks)
    online, targets = (
        {name: _computing_with(network, next(given)) for name, network in group.items()}
        for group in (stack.networks, stack.target_networks)
    )
    return (
        Stack(stack.members, online, hyperparameters, state, targets),
        Batch(observation, following, columns, weights["weight"], weights["due"], all_due=batch.all_due),
    )


def _computing_with(network: StackedNetwork, tensors: Tensors) -> StackedNetwork:
    """The network with other tensors, whose parameters are leaves of a new graph."""
    leaves = {name: tensors[name].detach().requires_grad_(leaf.requires_grad) for name, leaf in network.leaves.items()}
    other = network.computing_with(tensors | leaves)
    other.leaves = leaves
    return other


def _gradient(objective: Objective, stack: Stack, batch: Batch, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The flat gradient [D] of the loss of a batch, the loss per sample [P, B], and its errors [P, B] if any."""
    network = stack.networks[objective.network]
    with torch.enable_grad():
        loss = objective.loss(stack, batch, generator)
    flat = network.gradient(loss.per_sample, batch.weight)
    return tuple(values.detach() for values in (flat, loss.per_sample, loss.errors) if values is not None)
