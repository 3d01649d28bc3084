"""The default network: encoders, hidden layers, an optional recurrent cell and heads; and the same with noisy weights.

Axes: P agents, times branches; B observations (T * S of them for S sequences of T steps), K numbers per
recurrent unit, N units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from evorl.config import Network as NetworkSettings
from evorl.config.fields import Initialisation
from evorl.envs.spaces import ObservationSpec, ObservationSpecs, as_numbers
from evorl.networks.dense import DenseLayer, DensePlan, dense
from evorl.networks.flat import FirstBranches, Weights
from evorl.networks.image import ImageEncoder
from evorl.networks.kernel import KernelPlan, fits, kernel_dense
from evorl.networks.parameters import HIDDEN_GAIN, NEAR_ZERO_GAIN, Fill, ParameterSpec, Specs
from evorl.networks.recurrent import CELLS, recur
from evorl.networks.stack import SIGMA, Layout, Network, layer_of
from evorl.types.agents import FEATURES, Architecture, Head
from evorl.types.batches import RecurrentInput
from evorl.types.tensors import Observation, Tensors

Axes = tuple[str | int, ...]
CLIP = 10.0
"""Normalised observations are clipped to this many standard deviations."""


class StandardNetwork(Network):
    """Encodes and concatenates the observation parts, followed by hidden layers, a recurrent cell and heads.

    With separate branches, heads have hidden layers of their own, of the same shape: the last one (`last`, as in
    a dueling network, arXiv 1511.06581) or all of them (`all`). Biases and other vectors are stored as [1, N] per
    agent, so that they broadcast over the batch: unsqueezing them took 3.6 % of a profile.
    """

    def __init__(
        self,
        parts: ObservationSpecs,
        heads: Sequence[Head],
        normalized: Collection[str],
        initialisation: Initialisation,
        bf16: bool = False,
    ) -> None:
        """Without `parts` there are constant heads only.

        Vectors in `normalized` are standardised by each agent's running statistics. With `bf16`, convolutions and
        hidden layers multiply in bfloat16; recurrent cells do not, because rounding errors accumulate in their state.

        With orthogonal `initialisation` the gains are sqrt 2 for hidden layers and convolutions, 1 for cells and heads,
        and 0.01 for heads initialised near zero (arXiv 2006.05990); biases are zero except a cell's own.
        """
        self.parts = parts
        self.heads = heads
        self.computed_heads = [head for head in heads if head.computed]
        self._gives_features = any(head.name == FEATURES for head in heads)
        self.initialisation = initialisation
        images = {name: part for name, part in parts.items() if part.kind == "image"}
        self.bf16 = bf16
        self.images = {name: ImageEncoder(name, part, initialisation, bf16) for name, part in images.items()}
        self._plans: dict[Layout, tuple[DensePlan, DensePlan]] = {}
        self._kernel_plans: dict[Layout, KernelPlan] = {}
        self.normalized = normalized
        self._unread: dict[str, list[int]] = {}

    def hide(self, unread: Mapping[str, Collection[str]]) -> None:
        """Let heads not read the parts `unread`, given by head.

        Their weights in the first hidden layer stay, and count as zero: nothing else depends on which heads read what.
        """
        names = [head.name for head in self.computed_heads]
        for part in self.parts:
            if hidden := [branch for branch, name in enumerate(names) if part in unread.get(name, ())]:
                self._unread[part] = hidden

    def specs(self, architecture: Architecture) -> Specs:
        specs: Specs = {}
        for name in self.normalized:
            specs |= _statistics_specs(f"normal.{name}", self.parts[name].width)
        for image in self.images.values():
            specs |= image.specs(architecture)
        sources = {f".{name}": self._reads(architecture, name) for name in self.parts}
        for index in range(len(architecture.hidden_sizes)):
            group, branches = f"hidden.{index}", self._branches(architecture, index)
            specs |= self._layer_specs(group, sources, group, architecture, branches)
            sources = {"": (group,)}
            for depth in range(architecture.residual_layers[index]):
                inner = f"{group}.residual.{depth}"
                specs |= self._layer_specs(inner, sources, group, architecture, branches)
                specs[f"{inner}.scale"] = ParameterSpec((1,), (group,), "zeros", branches=branches)
        if architecture.recurrent:
            branches, biases = self._branches(architecture), CELLS[architecture.recurrent].biases
            gates = (len(biases), "recurrent")
            specs["recurrent.input"] = ParameterSpec(sources[""], gates, self.initialisation, branches=branches)
            specs["recurrent.weight"] = ParameterSpec(("recurrent",), gates, self.initialisation, branches=branches)
            specs["recurrent.bias"] = ParameterSpec((1,), gates, biases, branches=branches)
            sources = {"": ("recurrent",)}
        return specs | _head_specs(self.heads, sources.get("", ()), self.initialisation)

    def cost(self, architecture: Architecture) -> float:
        # Convolutions multiply each weight many times, and noise scales multiply weights instead of observations.
        sizes, apart = architecture.sizes(), ("encoder.", SIGMA)
        specs = self.specs(architecture)
        dense = [spec for name, spec in specs.items() if spec.trained and not name.startswith(apart)]
        matrices = [spec.matrix(sizes) for spec in dense]
        return sum(image.cost(architecture) for image in self.images.values()) + sum(
            branches * read * produced for branches, read, produced in matrices
        )

    def recurrent_shape(self, architecture: Architecture) -> tuple[int, int]:
        if not architecture.recurrent:
            return 0, 0
        branches = self._branches(architecture) or 1
        return branches * CELLS[architecture.recurrent].slots, architecture.recurrent_size

    def forward(
        self, layout: Layout, p: Weights, x: Observation, recurrent: RecurrentInput | None
    ) -> tuple[Tensors, Tensor | None]:
        if not self.computed_heads:
            return self._constants(p), None
        (before, plan), cell, state = self._plans_of(layout), layout.architecture.recurrent, None
        if self._unread:
            p = self._with_hidden_parts(p)
        if layout.first_head:
            p = FirstBranches(p, layout.agents)
        sources = [self._encoded(layout, p, name, x[name]) for name in self.parts]
        if recurrent is not None and cell:
            (hidden,) = dense(before, p, sources)
            hidden, state = recur(CELLS[cell], plan.branches, p, hidden, recurrent)
            sources = [hidden]
        names = (*plan.heads, FEATURES) if plan.features else plan.heads
        if self.kernel is not None and fits(plan, sources):
            prepared = self._kernel_plans.get(layout)
            if prepared is None:
                prepared = self._kernel_plans[layout] = KernelPlan(plan, p, layout.agents)
            outputs = kernel_dense(self.kernel, prepared, p, sources)
        else:
            outputs = dense(plan, p, sources)
        return dict(zip(names, outputs, strict=True)) | self._constants(p), state

    def _with_hidden_parts(self, p: Weights) -> Weights:
        """The weights, with zeros in the branches that do not read a part."""
        seen = {}
        for part, branches in self._unread.items():
            name = f"hidden.0.weight.{part}"
            rows = p[name].view(-1, len(self.computed_heads), *p[name].shape[1:]).unbind(1)
            read = [torch.zeros_like(row) if branch in branches else row for branch, row in enumerate(rows)]
            seen[name] = torch.stack(read, 1).view_as(p[name])
        return p.replaced(seen)

    def _branches(self, architecture: Architecture, index: int | None = None) -> int | None:
        """The number of branches of hidden layer `index`, or the recurrent cell if None; None if all heads share it."""
        last = len(architecture.hidden_sizes) - 1
        parted = architecture.branches == "all" or (architecture.branches == "last" and index in (last, None))
        return len(self.computed_heads) if parted and len(self.computed_heads) > 1 else None

    def _reads(self, architecture: Architecture, part: str) -> Axes:
        convolved = part in self.images and architecture.convolutions
        return self.images[part].reads(architecture) if convolved else (self.parts[part].width,)

    def _layer_specs(
        self, name: str, sources: Mapping[str, Axes], group: str, architecture: Architecture, branches: int | None
    ) -> Specs:
        def one(fill: Fill, newborn: Fill | None = None, trained: bool = True) -> ParameterSpec:
            return ParameterSpec((1,), (group,), fill, newborn, trained, branches)

        fill, gain = self.initialisation, HIDDEN_GAIN[self.initialisation]
        specs = {
            f"{name}.weight{source}": ParameterSpec(axes, (group,), fill, branches=branches, gain=gain)
            for source, axes in sources.items()
        }
        specs[f"{name}.bias"] = one("zeros")
        if architecture.layer_norm:
            specs[f"{name}.gain"], specs[f"{name}.shift"] = one("ones"), one("zeros")
            specs[f"{name}.active_units"] = replace(one("ones", newborn="zeros", trained=False), mask=True)
        return specs

    def _encoded(self, layout: Layout, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        """Encode one observation part: [P, B, ...] -> [P, B, features]."""
        part = self.parts[name]
        if part.kind == "image" and layout.architecture.convolutions:
            return self.images[name].forward(layout, p, x)
        if part.kind == "categories":
            return _one_hot(part, x)
        x = as_numbers(x, part)
        x = x if len(part.shape) == 1 else x.reshape(*x.shape[:2], part.width)
        if name not in self.normalized:
            return x
        scale = torch.rsqrt(p[f"normal.{name}.variance"] + 1e-8)
        return ((x - p[f"normal.{name}.mean"]) * scale).clamp(-CLIP, CLIP)

    def _constants(self, p: Mapping[str, Tensor]) -> Tensors:
        constants = {head.name: p[f"{head.name}.bias"] for head in self.heads if head.constant}
        return constants | {head.name: p[f"{head.name}.weight"] for head in self.heads if head.per_feature}

    def _plans_of(self, layout: Layout) -> tuple[DensePlan, DensePlan]:
        """The plans of the layers before a recurrent cell, if there is one, and of all that follows or else of all."""
        if layout not in self._plans:
            architecture = layout.architecture
            layers: list[DenseLayer] = []
            for index, depth in enumerate(architecture.residual_layers):
                name, branches = f"hidden.{index}", 1 if layout.first_head else self._branches(architecture, index) or 1
                suffixes = ("",) if index else tuple(f".{part}" for part in self.parts)
                layers.append(DenseLayer(name, suffixes, branches))
                layers += [DenseLayer(f"{name}.residual.{each}", ("",), branches, True) for each in range(depth)]
            heads = tuple(head.name for head in self.computed_heads[: 1 if layout.first_head else None])
            branches = 1 if layout.first_head else self._branches(architecture) or 1
            flags = architecture.layer_norm, self.bf16, self._gives_features
            plan = DensePlan(tuple(layers), heads, branches, architecture.activation or "", *flags)
            after = replace(plan, layers=()) if architecture.recurrent else plan
            self._plans[layout] = replace(plan, heads=()), after
        return self._plans[layout]


def _one_hot(part: ObservationSpec, x: Tensor) -> Tensor:
    """Encode integers [P, B, ...] as concatenated one-hot vectors [P, B, width]."""
    columns = x.reshape(*x.shape[:2], len(part.sizes)).unbind(-1)
    return torch.cat(
        [functional.one_hot(column, size) for column, size in zip(columns, part.sizes, strict=True)], -1
    ).float()


def _statistics_specs(name: str, width: int) -> Specs:
    """Running mean, variance and count of a vector, for normalisation."""
    return {
        f"{name}.mean": ParameterSpec((1,), (width,), "zeros", trained=False),
        f"{name}.variance": ParameterSpec((1,), (width,), "ones", trained=False),
        f"{name}.number": ParameterSpec((1,), (1,), "zeros", trained=False),
    }


def _head_specs(heads: Sequence[Head], source: Axes, fill: Fill) -> Specs:
    """Weight and bias of the heads that read `source`; constant heads have no weight, per-feature ones no bias."""
    specs: Specs = {}
    for head in heads:
        if head.per_feature:
            specs[f"{head.name}.weight"] = ParameterSpec(source, (head.outputs,), "zeros", of_noise=True)
        if head.per_feature or head.name == FEATURES:
            continue
        if not head.constant:
            gain = NEAR_ZERO_GAIN if head.near_zero else 1.0
            specs[f"{head.name}.weight"] = ParameterSpec(source, (head.outputs,), fill, gain=gain)
        specs[f"{head.name}.bias"] = ParameterSpec((1,), (head.outputs,), "ones", gain=head.bias)
    return specs


class NoisyNetwork(StandardNetwork):
    """A standard network with noisy heads and a noisy last hidden layer, with its residual layers (arXiv 1706.10295).

    In image networks with one hidden layer, these are all fully connected layers, as in the paper. Noise scales
    are ordinary parameters: they are padded, grown and trained as the weights are, and outgoing weights of new units
    start with a scale of zero. `StackedNetwork.with_noise` adds the noise to the weights before a call; without it the
    network computes with the mean weights.
    """

    def __init__(
        self,
        parts: ObservationSpecs,
        heads: Sequence[Head],
        normalized: Collection[str],
        initialisation: Initialisation,
        bf16: bool = False,
        *,
        sigma: float,
    ) -> None:
        """Noise is factorised, and its initial scale is `sigma` / sqrt(number of inputs)."""
        super().__init__(parts, heads, normalized, initialisation, bf16)
        self.sigma = sigma

    def specs(self, architecture: Architecture) -> Specs:
        """The parameters of a standard network, followed by the noise scales of its noisy layers."""
        specs, sizes = super().specs(architecture), architecture.sizes()
        last, heads = f"hidden.{len(architecture.hidden_sizes) - 1}", {head.name for head in self.computed_heads}
        layers: dict[str, Specs] = defaultdict(dict)
        for name, spec in specs.items():
            layer = layer_of(name)
            if layer != name and (layer in heads or layer == last or layer.startswith(f"{last}.")):
                layers[layer][name] = spec
        scales: Specs = {}
        for layer_specs in layers.values():
            inputs = sum(spec.matrix(sizes)[1] for name, spec in layer_specs.items() if ".weight" in name)
            gain = self.sigma / math.sqrt(inputs)
            for name, spec in layer_specs.items():
                scales[SIGMA + name] = replace(spec, fill="ones", gain=gain, of_noise=True)
        return specs | scales


def standard_network(
    settings: NetworkSettings,
    parts: ObservationSpecs,
    heads: Sequence[Head],
    normalized: Collection[str],
    noise: float | None,
) -> StandardNetwork:
    """The standard network that a configuration asks for, noisy if an algorithm asks for `noise`."""
    common = parts, heads, normalized, settings.initialisation or "uniform", bool(settings.bf16)
    return StandardNetwork(*common) if noise is None else NoisyNetwork(*common, sigma=noise)
