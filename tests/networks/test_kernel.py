"""The C++ kernel against torch: the same outputs and gradients up to rounding, for every kind of layer."""

import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.kernels import library
from evorl.kernels.library import load_kernel
from evorl.networks.dense import DenseLayer, DensePlan, dense, shares
from evorl.networks.flat import FirstBranches, FlatTensors, Weights
from evorl.networks.kernel import ACTIVATIONS, KernelPlan, fits, kernel_dense
from evorl.networks.optimizer import StackedAdam

TOLERANCE = 1e-5
"""Of the largest entry of a gradient."""


@pytest.fixture(scope="module")
def kernel():
    loaded = load_kernel()
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded


@st.composite
def networks(draw):
    """A plan, its parameters, and sources; sizes around the kernel's vectors and blocks."""
    agents, rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 17, 64, 128, 129, 300]))
    widths = draw(st.lists(st.sampled_from([0, 1, 3, 8, 17]), min_size=1, max_size=3))
    hidden = draw(st.lists(st.sampled_from([1, 7, 16, 33, 48, 64, 513]), min_size=1, max_size=3))
    heads = draw(st.lists(st.sampled_from([1, 4, 7, 16]), min_size=1, max_size=3))
    normed, masked, residual = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    branching = draw(st.sampled_from(["shared", "last", "all"]))
    activation = draw(st.sampled_from(list(ACTIVATIONS)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    p, layers, reads = {}, [], widths

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).requires_grad_()

    def add(layer, reads, units):
        members = agents * layer.branches
        layers.append(layer)
        for suffix, width in zip(layer.suffixes, reads, strict=True):
            p[f"{layer.name}.weight{suffix}"] = normal(members, width, units, scale=max(width, 1) ** -0.5)
        p[f"{layer.name}.bias"] = normal(members, 1, units)
        if normed:
            p[f"{layer.name}.gain"], p[f"{layer.name}.shift"] = normal(members, 1, units), normal(members, 1, units)
            active = (torch.rand(members, 1, units, generator=generator) < 0.7).double()
            active[..., 0] = 1
            if masked:
                p[f"{layer.name}.active_units"] = shares(active)
        if layer.residual:
            p[f"{layer.name}.scale"] = normal(members, 1, units)

    for index, units in enumerate(hidden):
        parted = len(heads) > 1 and (branching == "all" or (branching == "last" and index == len(hidden) - 1))
        branches = len(heads) if parted else 1
        suffixes = ("",) if index else tuple(f".{part}" for part in range(len(widths)))
        add(DenseLayer(f"hidden.{index}", suffixes, branches), reads, units)
        if residual:
            add(DenseLayer(f"hidden.{index}.residual.0", ("",), branches, residual=True), [units], units)
        reads = [units]
    for index, outputs in enumerate(heads):
        p[f"head{index}.weight"] = normal(agents, reads[0], outputs, scale=reads[0] ** -0.5)
        p[f"head{index}.bias"] = normal(agents, 1, outputs)
    branches = len(heads) if len(heads) > 1 and branching != "shared" else 1
    names = tuple(f"head{index}" for index in range(len(heads)))
    if first_head := draw(st.booleans()):
        layers, names, branches = [replace(layer, branches=1) for layer in layers], names[:1], 1
    plan = DensePlan(tuple(layers), names, branches, activation, normed, features=draw(st.booleans()))
    return plan, p, [normal(agents, rows, width) for width in widths], agents if first_head else None


def weights_of(p, first_branches_of=None):
    """The trained tensors of `p` in one flat leaf, the others as buffers."""
    trained = {name: value for name, value in p.items() if not name.endswith(".active_units")}
    flat = torch.cat([value.detach().flatten() for value in trained.values()]).requires_grad_()
    buffers = {name: value for name, value in p.items() if name not in trained}
    weights = Weights(flat, {name: tuple(value.shape) for name, value in trained.items()}, buffers)
    return weights if first_branches_of is None else FirstBranches(weights, first_branches_of)


def gradients(outputs, leaves):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    loss = sum((output * weight.to(output)).sum() for output, weight in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def single(tensors):
    return [tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in tensors]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(networks())
def test_outputs_and_gradients_equal_torchs(kernel, network):
    """Against float64. Layers of one unit under a norm amplify rounding, so torch's own error is allowed for."""
    plan, p, sources, first_branches_of = network
    p32, sources32 = dict(zip(p, single(p.values()), strict=True)), single(sources)
    weights, weights32 = weights_of(p, first_branches_of), weights_of(p32, first_branches_of)
    reference = gradients(dense(plan, weights, sources), [weights.flat, *sources])
    leaves32, prepared = [weights32.flat, *sources32], KernelPlan(plan, weights32, len(sources[0]))
    outputs = kernel_dense(kernel, prepared, weights32, sources32)
    largest = max(float(g.abs().max()) for g in reference if g.numel())
    torchs = gradients(dense(plan, weights32, sources32), leaves32)
    for exact, of_torch, of_kernel in zip(reference, torchs, gradients(outputs, leaves32), strict=True):
        error, torch_error = (
            (each - exact).abs().max().item() if each.numel() else 0 for each in (of_kernel, of_torch)
        )
        assert error <= TOLERANCE * largest + 4 * torch_error
    with torch.no_grad():
        again = kernel_dense(kernel, prepared, weights32, sources32)
    assert all(map(torch.equal, outputs, again))


def small_network(units=16, rows=200, agents=4, activation="tanh"):
    generator = torch.Generator().manual_seed(0)
    p = {
        "hidden.0.weight": torch.randn(agents, 5, units, generator=generator),
        "hidden.0.bias": torch.randn(agents, 1, units, generator=generator),
        "value.weight": torch.randn(agents, units, 1, generator=generator),
        "value.bias": torch.randn(agents, 1, 1, generator=generator),
    }
    plan = DensePlan((DenseLayer("hidden.0"),), ("value",), 1, activation, layer_norm=False)
    return plan, weights_of(p), torch.randn(agents, rows, 5, generator=generator)


@pytest.fixture
def shared_kernel(kernel):
    """The kernel with more threads than the three agents, and a pass through it that is long enough to be shared."""
    plan, weights, source = small_network(units=1000, rows=400, agents=3)
    words = KernelPlan(plan, weights, len(source))

    def results():
        outputs = kernel_dense(kernel, words, weights, [source])
        return [*outputs, *torch.autograd.grad(outputs[0].sum(), weights.flat)]

    alone = results()
    kernel.threads = 64
    yield lambda: all(map(torch.equal, results(), alone))
    kernel.threads = 1


def test_threads_do_not_change_a_bit(shared_kernel):
    assert all(shared_kernel() for _ in range(50))


def test_two_callers_may_share_the_threads(shared_kernel):
    with ThreadPoolExecutor(2) as callers:
        assert all(callers.map(lambda _: shared_kernel(), range(40)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_computes_with_threads_of_its_own(shared_kernel):
    assert shared_kernel()
    child = os.fork()
    if child == 0:
        same, tasks = shared_kernel(), Path("/proc/self/task")
        os._exit(0 if same and (not tasks.is_dir() or len([*tasks.iterdir()]) == 3) else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0), "it has other results, one thread, or waits for threads that it does not have"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_hidden(kernel, activation, value):
    plan, weights, source = small_network(activation=activation)
    source[1, 150, 2] = value
    (expected,) = dense(plan, weights, [source])
    (output,) = kernel_dense(kernel, KernelPlan(plan, weights, len(source)), weights, [source])
    assert torch.isfinite(output).equal(torch.isfinite(expected))
    assert torch.isfinite(output[[0, 2, 3]]).all()


def test_torch_computes_what_does_not_fit():
    plan, _, source = small_network()
    assert fits(plan, [source])
    assert not fits(plan, [source.double()])
    assert not fits(replace(plan, activation="softsign"), [source])
    assert not fits(DensePlan((), ("value",), 1, plan.activation, layer_norm=False), [source])
    assert not fits(DensePlan(plan.layers, ("value",), 1, plan.activation, layer_norm=False, bf16=True), [source])


def test_adam_clips_and_steps_and_targets_follow_as_by_torch(kernel):
    shapes, generator = {"a": (3, 5), "b": (17,)}, torch.Generator().manual_seed(0)
    start, tau = torch.randn(2 * 32, generator=generator), torch.tensor([0.1, 1.0])
    rate = torch.tensor([1e-2, 1e-3], dtype=torch.float64)  # As a schedule gives it.
    optimisers, targets = [], []
    for executor in (None, kernel):
        parameters, target = (FlatTensors(shapes, 2, torch.device("cpu"), start.clone()) for _ in range(2))
        optimisers.append(StackedAdam(parameters, torch.zeros(2 * 32), 1e-2, executor))
        targets.append(target)
    for step in range(5):
        gradient = torch.randn(2 * 32, generator=generator)
        active = torch.tensor([1.0, float(step % 2)]) if step > 1 else None
        clip = torch.tensor([0.5, 2.0]) if step % 2 else None
        for adam, target in zip(optimisers, targets, strict=True):
            adam.gradient.copy_(gradient)
            adam.step(rate, active, clip)
            adam.follow(target, tau)
        by_torch, by_kernel = optimisers
        assert torch.allclose(by_torch.parameters.flat, by_kernel.parameters.flat, rtol=1e-5, atol=1e-7)
        assert torch.allclose(targets[0].flat, targets[1].flat, rtol=1e-5, atol=1e-7)
        assert torch.equal(by_torch.updates, by_kernel.updates)
        assert torch.allclose(by_torch.norms(), by_kernel.norms()) or clip is not None or active is not None


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_kernel.cache_clear()
    yield tmp_path
    load_kernel.cache_clear()


def test_it_is_built_once_into_a_private_directory(own_cache, kernel):
    assert not isinstance(load_kernel(), str)
    (built,) = (own_cache / "evorl").iterdir()
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    load_kernel.cache_clear()
    written = built.stat().st_mtime_ns
    assert not isinstance(load_kernel(), str)
    assert built.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "fault", ["no compiler", "broken compiler", "stale compiler", "no home", "no cache", "cache of others"]
)
def test_without_a_compiler_or_a_cache_there_is_a_reason(own_cache, monkeypatch, fault):
    if fault == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    elif fault == "broken compiler":
        compiler = own_cache / "broken"
        compiler.write_text("#!/bin/sh\necho 'error: no such CPU' >&2\nexit 1\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
    elif fault == "stale compiler":
        compiler = own_cache / "stale"
        compiler.write_text("#!/nowhere/sh\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
    elif fault == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    elif fault == "no cache":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    else:
        (own_cache / "evorl").mkdir()
        (own_cache / "evorl").chmod(0o777)
    reason = load_kernel()
    assert isinstance(reason, str)
    assert reason
    assert "\n" not in reason
    assert library.usable_kernel("auto") is None
