"""ONNX export of an agent, verified against the agent's `predict` before the file is written.

Axes: B observations, A actions.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from evorl.algorithms import make_algorithm
from evorl.envs.spaces import batched, choices
from evorl.export.network import ACTION, NEXT_STATE, ActingAgent
from evorl.runs.reading.loaded import LoadedAgent
from evorl.system.extras import require
from evorl.system.files import write_atomically
from evorl.system.plugins import described
from evorl.types.outcomes import UserError

OPSET = 17
BATCH, STEPS = 16, 4
"""Batch size, and number of steps for recurrent agents, with which a file is verified."""
TOLERANCE = 1e-5
WIDEST = 1e3
"""Observations with which a file is verified are within this, unless their space is unbounded."""


def in_float32(loaded: LoadedAgent) -> LoadedAgent:
    """Return an agent trained in bfloat16 as one that computes in float32: no runtime supports bfloat16 on CPUs."""
    if not loaded.config.network.bf16:
        return loaded
    network = loaded.config.network.model_copy(update={"bf16": False})
    config = loaded.config.model_copy(update={"network": network})
    return LoadedAgent(loaded.agent, config, make_algorithm(config, loaded.algorithm.interface), loaded.reader)


def write_onnx(loaded: LoadedAgent, output: Path, facts: Mapping[str, str]) -> float:
    """Export an agent with `facts` as metadata, and return the largest difference from `predict` (see `compare`).

    Raises UserError, and writes no file, if that exceeds 1e-5.
    """
    require("onnx", "an export")
    indices = loaded.config.environment.observation_indices
    acting = ActingAgent(loaded.agent, loaded.algorithm, loaded.observation_space, indices)
    example = acting.forward_inputs(*_sampled(acting, loaded, 2, np.random.default_rng(0)), None)
    payload = _exported(acting, example, facts, loaded.action_space.dtype)
    difference = compare(acting, loaded, payload)
    if not difference <= TOLERANCE:
        raise UserError(f"{output}: was not written, because its outputs differ from the agent's by {difference:.2g}")
    write_atomically(output, payload)
    return difference


def _exported(
    acting: ActingAgent, example: list[torch.Tensor], facts: Mapping[str, str], dtype: np.dtype[Any] | None
) -> bytes:
    """Return the ONNX model, traced with the inputs `example`, whose actions have this dtype."""
    import onnx

    buffer, names = io.BytesIO(), (*acting.inputs, *acting.outputs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            # Export by tracing (dynamo=False), with a dynamic batch axis.
            torch.onnx.export(
                acting,
                tuple(example),
                buffer,  # type: ignore[arg-type]
                input_names=list(acting.inputs),
                output_names=list(acting.outputs),
                dynamic_axes={name: {0: "batch"} for name in names},
                opset_version=OPSET,
                dynamo=False,
            )
        except Exception as error:  # A module of the user's own may raise anything, in torch's exporter too.
            raise UserError(f"export: ONNX cannot express this agent's network: {described(error)}") from error
    model = onnx.load_from_string(buffer.getvalue())
    _cast_actions(model.graph, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    onnx.helper.set_model_props(model, dict(facts))
    onnx.checker.check_model(model)
    payload: bytes = model.SerializeToString()
    return payload


def _cast_actions(graph: Any, dtype: int) -> None:
    """Append a cast of the actions to an ONNX type; torch's exporter does not know all unsigned ones."""
    import onnx

    (output,) = (value for value in graph.output if value.name == ACTION)
    uncast = f"{ACTION}.uncast"
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [uncast if name == ACTION else name for name in names]
    graph.node.append(onnx.helper.make_node("Cast", [uncast], [ACTION], to=dtype))
    output.type.tensor_type.elem_type = dtype


def compare(acting: ActingAgent, loaded: LoadedAgent, payload: bytes) -> float:
    """Return the largest difference between the file's outputs and `predict`: absolute, or relative for values above 1.

    Observations are sampled from the space, with batch sizes 1 and 16; a recurrent agent plays 4 steps.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    largest = 0.0
    read = {name.partition(".")[0] for name in acting.parts}
    for batch in (1, BATCH):
        state: NDArray[np.float32] | None = None
        own_state: NDArray[np.float32] | None = None
        rng = np.random.default_rng(batch)
        for _ in range(STEPS if acting.state_shape[0] else 1):
            observation, mask = _sampled(acting, loaded, batch, rng)
            inputs = acting.forward_inputs(observation, mask, own_state)
            # Without what only critics read: they have states of their own in a recurrent network.
            is_mapping = isinstance(observation, Mapping)
            seen = {key: observation[key] for key in observation if key in read} if is_mapping else observation
            action, after = loaded.predict(seen, state, action_mask=mask)
            expected = {ACTION: action}
            if after is not None:
                # The state of a loaded agent is padded to more units.
                expected[NEXT_STATE] = after[..., : acting.state_shape[1]]
            named = {name: value.numpy() for name, value in zip(acting.inputs, inputs, strict=True)}
            actual = dict(zip(acting.outputs, session.run(None, named), strict=True))
            # Unlike Python's `max`, `np.max` propagates NaN.
            differences = [_difference(np.asarray(expected[name]), output) for name, output in actual.items()]
            largest = float(np.max([largest, *differences]))
            state, own_state = after, actual.get(NEXT_STATE)
    return largest


def _sampled(
    acting: ActingAgent, loaded: LoadedAgent, batch: int, rng: np.random.Generator
) -> tuple[Any, NDArray[np.bool_] | None]:
    """Sample observations [B, ...] and, if actions are masked, a mask [B, A]."""
    space = _cut(loaded.observation_space)
    space.seed(int(rng.integers(2**31)))
    observation = batched(space, [space.sample() for _ in range(batch)])
    mask = None
    if acting.masked:
        mask = rng.random((batch, acting.masked)) < 0.7
        for choice in np.split(mask, np.cumsum(choices(loaded.action_space))[:-1], axis=1):
            choice |= ~choice.any(1, keepdims=True)  # A view: each choice must have an allowed action.
    return observation, mask


def _cut(space: gym.Space[Any]) -> gym.Space[Any]:
    """A space whose finite bounds are at most `WIDEST`: networks overflow on numbers as wide as their type."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({name: _cut(inner) for name, inner in space.spaces.items()})
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([_cut(inner) for inner in space.spaces])
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    low, high = (
        np.where(np.isfinite(bound), np.clip(bound, -WIDEST, WIDEST), bound) for bound in (space.low, space.high)
    )
    return gym.spaces.Box(low, high, dtype=space.dtype.type)


def _difference(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return float("inf")
    scale = np.maximum(1.0, np.abs(expected.astype(np.float64)))
    return float((np.abs(expected.astype(np.float64) - actual) / scale).max(initial=0.0))
