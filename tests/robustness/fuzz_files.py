"""Hostile files: agents, checkpoints whose digests agree with them, and things that are no files at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_rooms import RUN, Case, Room
from fuzz_texts import Family, pick, sizes
from safetensors.torch import load, save

from evorl.runs.directory import MANIFEST, Checkpoints
from evorl.system.files import digest, entry, json_bytes

ELITE = "elite/agent.safetensors"
AGENTS, ELITE_KEPT, REPLAY = "agents.safetensors", "elite.safetensors", "replay-rank-000.safetensors"
EVALUATE = ("evaluate", RUN, "--episodes", "1")
RESUME = ("resume", RUN, "training.max_steps=100000")
DTYPES = ("F32", "F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "F4", "X", "", 3, None)
SHAPES: tuple[list[float], ...] = ([], [0], [1] * 70, [1] * 5000, [2**62, 2**62], [0, 2**64 - 1], [-1], [2**70], [0.5])
OFFSETS: tuple[list[int], ...] = ([0, 0], [0, 2**63], [-1, 4], [0], [], [0, 1, 2])
PLACES = ("x", "", "-1/q/parameters/w", "9/q/parameters/w", "0/q/x/y", "٣/q/parameters/w", "0/q/target/x")
EXTREME: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 2**16, 2**16 + 1, 2**31, 2**53, 2**63, 2**70, 10**400, -(2**70), 0.5, 1e300, float("nan"),
    float("inf"), -float("inf"), "", "x", "relu", "lstm", "gru", "all", "shared", "x" * 5000, "a\nb", "\x1b[2J",
    "\ud800", "3", "__import__('os')", [], [1], [0], [-1], [1, 2], [65536] * 2, [65536] * 300, [1000] * 3, [1] * 3,
    [0] * 9, [1000] * 1000, [[1]], [None], ["x"], {}, {"a": 1}, {"": None}, {"x\n" * 500: 1}, [1] * 20_000,
    [{}] * 20_000, [{"channels": 65536, "kernel": 65536, "stride": 1}] * 3, [{"channels": 1, "kernel": 1, "stride": 1}],
    [{"channels": 1, "kernel": 3, "stride": 1, "residual_layers": 1000}] * 9,
)  # fmt: skip


def taken_apart(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of safetensors, and the numbers behind it."""
    size = int.from_bytes(payload[:8], "little")
    header: dict[str, Any] = json.loads(payload[8 : 8 + size])
    return header, payload[8 + size :]


def raw(header: bytes | object, data: bytes = b"") -> bytes:
    """Safetensors with any header, as no library would write it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(rng: np.random.Generator, value: Any, others: tuple[Any, ...] = EXTREME) -> Any:
    """A copy of what JSON has, with one value inside it replaced, removed, doubled or given another name."""
    if isinstance(value, Mapping) and value and rng.random() < 0.9:
        key = pick(rng, list(value))
        how = rng.random()
        if how < 0.1:
            return {name: part for name, part in value.items() if name != key}
        if how < 0.2:
            return {**value, pick(rng, ("x", "", "a/b", "../x", "\x1b[2J", "x" * 5000, key + "x")): value[key]}
        return {**value, key: changed(rng, value[key], others)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = int(rng.integers(len(value)))
        how = rng.random()
        if how < 0.2:
            return value[:place] + value[place + 1 :]
        if how < 0.4:
            return value[:place] + [value[place]] * sizes(rng, 1, 300) + value[place:]
        return [*value[:place], changed(rng, value[place], others), *value[place + 1 :]]
    return pick(rng, others)


def several(rng: np.random.Generator, value: Any) -> Any:
    for _ in range(int(rng.integers(1, 4))):
        value = changed(rng, value)
    return value


def long_headers(rng: np.random.Generator, payload: bytes) -> bytes:
    """Headers that are long or deep, up to what the format allows."""
    header, data = taken_apart(payload)
    text, told = json.dumps(header).encode(), header["__metadata__"]
    count = sizes(rng, 10, 300_000) if rng.random() < 0.9 else sizes(rng, 1e6, 9.5e7)
    name = next(iter(told))
    first = json.dumps({"__metadata__": told}).encode()

    def with_told(key: str, value: str) -> bytes:
        return json.dumps({**header, "__metadata__": {**told, key: value}}).encode()

    def among(text: bytes, entry: bytes) -> bytes:
        """As many further tensors, or other entries, as come to so many bytes."""
        return text[:-1] + b"".join(entry % number for number in range(count // len(entry))) + b"}"

    tensor = b', "%d/q/parameters/w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    makers = (
        lambda: b"[" * count, lambda: b'{"a":' * (count // 5), lambda: b" " * count, lambda: b'"' + b"a" * count,
        lambda: text + b" " * count, lambda: b"[" + b"{}," * (count // 3), lambda: b"9" * count,
        lambda: b"[" + b"[]," * (count // 3) + b"[]]", lambda: b'{"__metadata__": {}, "a": ' + b"1" * count + b"}",
        lambda: among(text, tensor), lambda: among(first, tensor), lambda: among(text, b', "%d": {}'),
        lambda: among(first[:-1], b', "k%d": "v"') + b"}", lambda: among(text, b', "x%d": [[],[],[]]'),
        lambda: with_told(name, told[name] + " " * count), lambda: with_told(name, "[" * count),
        lambda: with_told(name, "[" + "{}," * (count // 3) + "{}]"), lambda: with_told("x" * count, ""),
        lambda: with_told(name, "[" + "9" * count + "]"), lambda: with_told(name, f'[{{"{"x" * count}": 1}}]'),
        lambda: json.dumps({**header, "0/q/" + "x" * count: {}}).encode(),
        lambda: text[:-1] + b', "__metadata__": {}' * (count // 20) + b"}",
    )  # fmt: skip
    return raw(pick(rng, makers)(), data)


def lying_headers(rng: np.random.Generator, payload: bytes) -> bytes:
    """Headers whose lengths, shapes, types or places are not those of the tensors."""
    header, data = taken_apart(payload)
    how = rng.random()
    if how < 0.15:
        size = pick(rng, (0, 1, 7, len(payload) - 8, len(payload) - 7, 2**31, 2**63, 2**64 - 1, 10**8, 10**8 + 1))
        return size.to_bytes(8, "little") + payload[8:]
    if how < 0.3:
        return raw(several(rng, header), data)
    tensors = [name for name in header if name != "__metadata__"]
    for _ in range(int(rng.integers(1, 4))):
        name, end = pick(rng, tensors), len(data)
        told = dict(header[name]) if isinstance(header.get(name), dict) else {}
        start = int(rng.integers(-2, end + 2))
        told |= pick(
            rng,
            (
                {"dtype": pick(rng, DTYPES)},
                {"shape": pick(rng, SHAPES)},
                {"shape": [end // 4], "data_offsets": [0, end]},
                {"data_offsets": pick(rng, ([start, end], [end, start], *OFFSETS))},
                {"data_offsets": header[pick(rng, tensors)]["data_offsets"]},
                {"x": 1},
            ),
        )
        header = {**header, name: told}
    return raw(header, data)


def described(rng: np.random.Generator, payload: bytes) -> bytes:
    """Agents that say something else of themselves than their tensors do; where there are none, other numbers."""
    header, data = taken_apart(payload)
    told = header["__metadata__"]
    name = next(iter(told))
    value = json.loads(told[name])
    how = rng.random()
    if name == "agents" and how < 0.5:
        place = int(rng.integers(len(value)))
        part = pick(rng, ("architectures", "state", "hyperparameters"))
        value[place] = {**value[place], part: several(rng, value[place][part])}
        if part == "architectures" and rng.random() < 0.3:
            known = value[place][part]
            network = next(iter(known), "") if isinstance(known, dict) else ""
            if network and isinstance(known[network], dict) and isinstance(known[network].get("residual_layers"), list):
                depths = known[network]["residual_layers"] + [0] * sizes(rng, 1, 3000)
                value[place][part] = {**known, network: {**known[network], "residual_layers": depths}}
    elif name == "agents" and how < 0.6:
        value = value * sizes(rng, 2, 3000)
        value = [{**each, "id": place} for place, each in enumerate(value)] if rng.random() < 0.5 else value
    else:
        value = several(rng, value)
    text = json.dumps(value)
    return raw({**header, "__metadata__": {name: text}}, data)


def other_tensors(rng: np.random.Generator, payload: bytes) -> bytes:
    """Tensors that are not those of the description, or hold what no number should be."""
    header, _ = taken_apart(payload)
    tensors = dict(sorted(load(payload).items()))
    for _ in range(int(rng.integers(1, 4))):
        name = pick(rng, list(tensors) or ["0/q/parameters/w"])
        value = tensors.get(name, torch.zeros(1))
        odd = pick(rng, (float("nan"), float("inf"), -1e38, 3e38, 1e-45, 0.0))
        kind = pick(rng, (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
        makers = (
            lambda value=value, odd=odd: torch.full_like(value, odd) if value.is_floating_point() else value,
            lambda value=value, kind=kind: value.to(kind),
            lambda value=value: value.reshape(-1),
            lambda value=value: value.unsqueeze(0),
            lambda value=value: value[:0] if value.dim() else value,
            lambda value=value: torch.cat([value, value]) if value.dim() else value,
            lambda: torch.zeros(0, 2**40),
            lambda: torch.zeros(sizes(rng, 1, 1e6)),
        )
        made = pick(rng, makers)()
        where = pick(rng, (name,) * 6 + PLACES)
        tensors[where] = made.contiguous().clone()  # Two names of one tensor cannot be saved.
        if rng.random() < 0.2:
            tensors.pop(pick(rng, list(tensors)))
    return save(tensors, metadata=header["__metadata__"])


def letters(rng: np.random.Generator, payload: bytes) -> bytes:
    """A file in which some letters have changed, most of them in its header, or that was cut short."""
    spoiled = bytearray(payload)
    for _ in range(int(rng.integers(1, 12))):
        end = 8 + int.from_bytes(payload[:8], "little") if rng.random() < 0.8 else len(payload)
        spoiled[int(rng.integers(min(end, len(spoiled))))] = pick(rng, b'0123456789"{}[]:,-.eE\\ \0\xff')
    return bytes(spoiled[: int(rng.integers(len(spoiled)))]) if rng.random() < 0.1 else bytes(spoiled)


HOSTILE = {
    "long headers": long_headers, "lying headers": lying_headers, "descriptions": described, "tensors": other_tensors,
    "letters changed": letters,
}  # fmt: skip


def elite(kind: str) -> Family:
    """Runs whose best agent is a hostile file of this kind."""

    def family(rng: np.random.Generator, run: Path) -> Case:
        # Made where it is tried, so that what a large file takes is not the fuzzer's own memory.
        number = int(rng.integers(2**63))

        def prepare(room: Room) -> None:
            room.put(ELITE, HOSTILE[kind](np.random.default_rng(number), (run / ELITE).read_bytes()))

        return Case(f"elite: {kind}", EVALUATE, prepare)

    return family


def forge(room: Room, payloads: Mapping[str, bytes]) -> None:
    """Put files into the newest checkpoint, whose manifest agrees with them."""
    checkpoints = Checkpoints(room.run / "checkpoints", keep=9)
    newest = checkpoints.generations()[-1]
    listed = {**checkpoints.files(newest), **{name: entry(payload) for name, payload in payloads.items()}}
    told = {"generation": newest, "files": listed}
    for name, payload in payloads.items():
        (checkpoints.path(newest) / name).write_bytes(payload)
    (checkpoints.path(newest) / MANIFEST).write_bytes(json_bytes(told | {"sha256": digest(json_bytes(told))}))


def newest(run: Path) -> Path:
    """The newest checkpoint, apart from what only bears the name of one."""
    return max(path.parent for path in (run / "checkpoints").glob(f"generation-*/{AGENTS}"))


def checkpoint(kind: str) -> Family:
    """Runs whose newest checkpoint has a hostile file of this kind, which its manifest lists as it is."""

    def family(rng: np.random.Generator, run: Path) -> Case:
        number = int(rng.integers(2**63))

        def prepare(room: Room) -> None:
            own = np.random.default_rng(number)
            name = pick(own, (AGENTS, AGENTS, ELITE_KEPT, REPLAY))
            forge(room, {name: HOSTILE[kind](own, (newest(run) / name).read_bytes())})

        return Case(f"checkpoint: {kind}", RESUME, prepare, goes_on=True)

    return family


FILES: tuple[Family, ...] = (*map(elite, HOSTILE), *map(checkpoint, HOSTILE))
