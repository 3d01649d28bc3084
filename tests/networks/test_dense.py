"""Dense layers against the plainest form of the same layers, agent by agent."""

from dataclasses import replace

import pytest
import torch

from evorl.networks.dense import ACTIVATIONS, DenseLayer, DensePlan, dense, shares

P, B = 3, 7
LAYERS = {
    "one": (DenseLayer("a", (".x", ".y")),),
    "deep": (DenseLayer("a", (".x", ".y")), DenseLayer("b"), DenseLayer("b.r", residual=True), DenseLayer("c")),
    "last": (DenseLayer("a", (".x", ".y")), DenseLayer("b", branches=2), DenseLayer("b.r", branches=2, residual=True)),
    "all": (DenseLayer("a", (".x", ".y"), branches=2), DenseLayer("b", branches=2)),
}


def made(layers, activation, layer_norm, counted, units=6):
    """A plan, its parameters and two sources."""
    generator = torch.Generator().manual_seed(1)
    plan = DensePlan(LAYERS[layers], ("first", "second"), LAYERS[layers][-1].branches, activation, layer_norm)
    p = {}
    for layer in plan.layers:
        rows = P * layer.branches
        widths = {".x": 4, ".y": 2}
        for suffix in layer.suffixes:
            p[f"{layer.name}.weight{suffix}"] = torch.randn(
                rows, widths.get(suffix, units), units, generator=generator, dtype=torch.float64
            )
        small = ("bias", *(("gain", "shift") if layer_norm else ()), *(("scale",) if layer.residual else ()))
        for name in small:
            p[f"{layer.name}.{name}"] = torch.randn(rows, 1, units, generator=generator, dtype=torch.float64)
        if layer_norm and counted:
            number = torch.randint(3, units + 1, (rows, 1, 1), generator=generator)
            p[f"{layer.name}.active_units"] = shares((torch.arange(units) < number).double())
    for head, width in zip(("first", "second"), (3, 1), strict=True):
        p[f"{head}.weight"] = torch.randn(P, units, width, generator=generator, dtype=torch.float64)
        p[f"{head}.bias"] = torch.randn(P, 1, width, generator=generator, dtype=torch.float64)
    sources = [torch.randn(P, B, width, generator=generator, dtype=torch.float64) for width in (4, 2)]
    trained = {name: value.requires_grad_() for name, value in p.items() if "active_units" not in name}
    return plan, p | trained, sources


def plainly(plan, p, sources):
    """The heads' outputs, agent by agent."""
    outputs = []
    for agent in range(P):
        branches = []
        for head in range(2):
            x = torch.cat([source[agent] for source in sources], -1)
            for layer in plan.layers:
                row = agent * layer.branches + (head if layer.branches == 2 else 0)
                weight = torch.cat([p[f"{layer.name}.weight{suffix}"][row] for suffix in layer.suffixes])
                y = x @ weight + p[f"{layer.name}.bias"][row]
                if plan.layer_norm:
                    share = p.get(f"{layer.name}.active_units")
                    share = torch.full((6,), 1 / 6, dtype=torch.float64) if share is None else share[row, :, 0]
                    mean = (y * share).sum(-1, keepdim=True)
                    variance = ((y - mean).square() * share).sum(-1, keepdim=True)
                    y = (y - mean) / (variance + 1e-5).sqrt() * p[f"{layer.name}.gain"][row] + p[f"{layer.name}.shift"][
                        row
                    ]
                y = ACTIVATIONS[plan.activation](y)
                x = x + p[f"{layer.name}.scale"][row] * y if layer.residual else y
            name = plan.heads[head]
            branches.append(x @ p[f"{name}.weight"][agent] + p[f"{name}.bias"][agent])
        outputs.append(branches)
    return [torch.stack(each) for each in zip(*outputs, strict=True)]


@pytest.mark.parametrize("norm", ["none", "norm", "counted"])
@pytest.mark.parametrize("layers", LAYERS)
def test_outputs_are_those_of_plain_layers(layers, norm):
    plan, p, sources = made(layers, "gelu", norm != "none", norm == "counted")
    for output, expected in zip(dense(plan, p, sources), plainly(plan, p, sources), strict=True):
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("norm", ["none", "norm", "counted"])
@pytest.mark.parametrize("layers", LAYERS)
def test_products_in_bfloat16_give_nearly_the_same_gradients(layers, norm):
    plan, p, sources = made(layers, "silu", norm != "none", norm == "counted")
    p = {name: value.detach().float().requires_grad_(value.requires_grad) for name, value in p.items()}
    sources = [source.float().requires_grad_() for source in sources]
    leaves = {name: value for name, value in p.items() if value.requires_grad}
    weight, rounding = torch.ones(P, B), replace(plan, bf16=True)

    def total(outputs):
        return sum(output.sum(-1) for output in outputs)

    def found(plan):
        return torch.autograd.grad(total(dense(plan, p, sources)), [*leaves.values(), *sources], weight)

    exact, rounded = found(plan), found(rounding)
    for one, other in zip(rounded, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.1 * other.norm()
    assert any((one != other).any() for one, other in zip(rounded, exact, strict=True))
