"""Hostile directories: states and manifests with digests that agree, strange agents that fit, links, pipes, modules."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import corruption
import numpy as np
import torch
from fuzz_files import AGENTS, ELITE, ELITE_KEPT, EVALUATE, EXTREME, REPLAY, RESUME, forge, newest, several
from fuzz_rooms import EVIL, MODULES, Case, Room
from fuzz_texts import Family, pick, settings, sizes

from evorl.algorithms import SETTINGS, make_algorithm
from evorl.config import validate
from evorl.envs import Environments
from evorl.networks.stack import new_tensors
from evorl.runs.directory import MANIFEST
from evorl.system.files import digest, entry, json_bytes
from evorl.system.formats import decode_tensors, encode_agents, encode_tensors
from evorl.types import Agent, Architecture, Convolution, Mutation

NAMES = (
    "../../config.yaml", "/etc/passwd", "x\0", "", "config.yaml", "replay-rank-001.safetensors", "x" * 5000, "\x1b[2J",
    "replay-rank-999999.safetensors", "agents.safetensors/../state.json", "state.json\n", "\ud800", "manifest.json",
)  # fmt: skip
CHECKPOINTS = (
    "generation-999999", "generation-000004", "generation-999999999999", "generation-0000004", "generation-00000٤",
    "generation-1000000", "damaged-generation-000003", ".partial-generation-000004", "generation-", "generation-000000",
    "interim-000001", "x" * 255,
)  # fmt: skip
HIDDEN = (
    ".lock", "elite/.x", "elite/.agent.safetensors.partial", "elite/.agent.json.partial", ".config.yaml.partial",
    ".metrics.jsonl.partial", ".summary.json.partial", "summary.json", "tracking.json", ".tracking.json.partial",
)  # fmt: skip
TARGETS = ("../../../outside/thesis/text", "/etc/passwd", "/dev/zero", "/dev/null", "/proc/self/mem", ".", "..", "/")
LINES = (
    b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"[]", b"{}", b"null", b'{"generation": 1e400}', b'{"generation": "1"}',
    b'{"generation": 1, "global_steps": "x"}', b'{"generation": 2, "global_steps": 1e999}', b'{"generation": -1}',
    b'{"generation": 99999999999999999999, "global_steps": 3}', b'{"generation": 1}', b"\0" * 1000, b"{" * 50_000,
    b'{"generation": 2, "global_steps": 160, "agents": [{"id": "\\u001b[2J"}]}', b'{"a":' * 30_000, b"x" * 1_000_000,
    b'{"generation": true, "global_steps": null}', b'{"generation": 3, "global_steps": [], "agents": {}}',
)  # fmt: skip
WANDB = (
    "[default]\nbase_url = http://evil.example\n", "[default]\nbase_url: http://127.0.0.1:1\napi_key = x\n",
    "[default]\n", "[default]\nmode = online\nbase_url = https://evil.example\n", "[", "\xff",
    "[default]\nx_service_transport = x\nprogram = /etc/passwd\n", "[default]\nbase_url = x\n",
    "[default]\nhttps_proxy = http://evil.example:1\nhttp_proxy = http://evil.example:1\ngit_remote = evil\n",
    "[default]\nrun_id = evil\nsave_code = true\nnotes = evil\napp_url_override = http://evil.example\n",
    "[default]\nentity = evil\nproject = evil\nhost = \x1b[2J\n", "[default]\nbase_url = http://evil.example\n" * 2,
)  # fmt: skip


def prepared(
    name: str, command: tuple[str, ...], spoil: Callable[[np.random.Generator, Room], None], **options: Any
) -> Family:
    """Runs that are spoiled where they are tried, by a generator of their own."""

    def family(rng: np.random.Generator, run: Path) -> Case:
        number = int(rng.integers(2**63))
        return Case(name, command, lambda room: spoil(np.random.default_rng(number), room), **options)

    return family


def states(rng: np.random.Generator, room: Room) -> None:
    state = json.loads((newest(room.run) / "state.json").read_bytes())
    how = rng.random()
    if how < 0.2:
        payload = pick(
            rng, (b"", b"[" * 100_000, b"\xff", b"{}", b"null", b'{"a":' * 20_000, b" " * 10**6, b"9" * 10**6)
        )
    elif how < 0.4:
        payload = json_bytes(state | {pick(rng, list(state)): pick(rng, EXTREME)})
    elif how < 0.5:
        payload = json_bytes(state | {"ranks": pick(rng, (2, 3, 1000, 10**6, 10**7)), "replay": bool(rng.integers(2))})
    else:
        payload = json_bytes(several(rng, state))
    forge(room, {"state.json": payload})


def manifests(rng: np.random.Generator, room: Room) -> None:
    """Manifests that agree with themselves, and with the files where they list any that there are."""
    path = newest(room.run) / MANIFEST
    manifest = json.loads(path.read_bytes())
    told = {"generation": manifest["generation"], "files": manifest["files"]}
    how = rng.random()
    if how < 0.3:
        name = pick(rng, NAMES)
        told["files"] = {
            **told["files"],
            name: pick(rng, (entry(b"mine"), {"size": 0}, {}, {"size": 10**30}, {"x": []})),
        }
    elif how < 0.5:
        told["files"] = {f"replay-rank-{n:06d}.safetensors": entry(b"") for n in range(sizes(rng, 1, 30_000))}
    elif how < 0.9:
        told = several(rng, told)
    payload = json_bytes(told | {"sha256": digest(json_bytes(told))} if isinstance(told, dict) else told)
    if rng.random() < 0.1:
        payload = pick(rng, (b"[" * 100_000, b"\xff", b'{"files": {"a":' * 10_000, b" " * 10**7, b"9" * 10**6, b"{}"))
    path.write_bytes(payload)


def damaged(rng: np.random.Generator, room: Room) -> None:
    """Do what disks and hands do to a checkpoint."""
    checkpoint = newest(room.run)
    others = [path for path in checkpoint.parent.iterdir() if path != checkpoint]
    (room.run / "elsewhere").mkdir()
    shutil.copytree(checkpoint, room.run / "elsewhere", dirs_exist_ok=True)
    pick(rng, list(corruption.damages(checkpoint, others, rng, 1))).do(checkpoint)


def replays(rng: np.random.Generator, room: Room) -> None:
    rows, numbers = decode_tensors((newest(room.run) / REPLAY).read_bytes(), "the replay")
    rows = dict(sorted(rows.items()))
    for _ in range(int(rng.integers(1, 3))):
        if rng.random() < 0.6:
            numbers[pick(rng, list(numbers))] = int(
                pick(rng, (0, -1, 1, 7, 499, 500, 501, 10**6, 2**31, 2**62, -(2**62)))
            )
            continue
        name = pick(rng, list(rows))
        value = rows[name]
        odd = float(pick(rng, (float("nan"), float("inf"), -1.0, 99.0)))
        others = (
            value[:-1],
            value[:0],
            value.unsqueeze(-1),
            value.double(),
            value.fill_(odd) if value.is_floating_point() else value + 99,
        )
        rows[name] = pick(rng, others).contiguous()
    forge(room, {REPLAY: encode_tensors(rows, numbers)})


def strange_agents(rng: np.random.Generator, room: Room) -> None:
    """Agents of architectures that no run comes to, whose tensors fit them."""
    config = validate(settings(room.run), SETTINGS)
    environments = Environments(config.environment, 1, 1)
    algorithm = make_algorithm(config, environments.interface)
    environments.close()
    made, odd = [], rng.random(4) < (0.3, 0.15, 0.2, 0.1)
    for id in range(pick(rng, (1, 30)) if odd[3] else 4):
        shape = _strange_shape(rng, odd[0], odd[1])
        agent = Agent(id, dict.fromkeys(algorithm.networks, shape), algorithm.settings.first_hyperparameters(), {})
        agent.state.acting = algorithm.initial_state()
        try:
            new_tensors(algorithm.networks, agent, torch.Generator().manual_seed(id))
        except Exception:
            # No tensors fit such a shape; what they would have been is then the first architecture's.
            agent.architectures = {name: spec.architecture for name, spec in algorithm.networks.items()}
            new_tensors(algorithm.networks, agent, torch.Generator().manual_seed(id))
            agent.architectures = dict.fromkeys(algorithm.networks, shape)
        if odd[2]:
            _with_strange_numbers(rng, agent)
        agent.mutation = Mutation("none", pick(rng, ("", "\x1b[2J", "x" * 5000, "a\nb")), 1e300)
        agent.fitness = pick(rng, (None, 1e308, -1e308, 3.0))
        agent.fault = pick(rng, (None, None, "\x1b[2J", "x" * 5000))
        made.append(agent)
    room.put(ELITE, encode_agents(made[: 30 if rng.random() < 0.05 else 1]))
    forge(room, {AGENTS: encode_agents(made), ELITE_KEPT: encode_agents(made[:1])})


def _strange_shape(rng: np.random.Generator, deep: bool, odd: bool) -> Architecture:
    """Hidden layers of any widths; where it is `odd`, what the algorithm's networks do not have."""
    layers = sizes(rng, 1, 30)
    depths = tuple(int(depth) for depth in rng.integers(0, pick(rng, (2, 30)), layers)) if deep else (0,) * layers
    shape = Architecture(
        tuple(sizes(rng, 1, pick(rng, (8, 300))) for _ in range(layers)), depths, pick(rng, ("relu", "tanh", "gelu"))
    )
    if not odd:
        return shape
    changes: tuple[dict[str, Any], ...] = (
        {"activation": None}, {"layer_norm": True}, {"recurrent": "lstm", "recurrent_size": int(rng.integers(0, 20))},
        {"recurrent": "gru"}, {"recurrent_size": 7}, {"streams": "all"}, {"residual_layers": (*depths, 0)},
        {"residual_layers": (*depths, 1)}, {"residual_layers": depths[1:]}, {"hidden_sizes": (), "residual_layers": ()},
        {"convolutions": (Convolution(3, 3, 1),)}, {"activation": "softmax"}, {"residual_layers": ()},
    )  # fmt: skip
    return replace(shape, **pick(rng, changes))


def _with_strange_numbers(rng: np.random.Generator, agent: Agent) -> None:
    numbers = (1e38, -1e38, 1e15, 1e16, 1e-300, 0.0, -1.0, 1.0, 2.0**53, 65536.0, 1e6)
    for _ in range(int(rng.integers(0, 3))):
        place: dict[str, float] = pick(rng, (agent.state.acting, agent.state.updates, agent.hyperparameters))
        place[pick(rng, list(place))] = pick(rng, numbers)
    for roles in agent.tensors.values():
        named = roles[pick(rng, ("parameters", "target", "mean", "square"))]
        if named and rng.random() < 0.5:
            named[pick(rng, list(named))].fill_(pick(rng, (3e38, -3e38, 1e-45, -1.0, 1e20)))


def _nodes(run: Path) -> list[Path]:
    """What a run consists of, without what the fuzzer has put there."""
    there = [run, *sorted(run.rglob("*"))]
    return [path for path in there if path.suffix != ".py" and "__pycache__" not in path.parts]


def strange_nodes(rng: np.random.Generator, room: Room) -> None:
    """Put something else in the place of a file or a directory: a link, a pipe, a socket, nothing, no rights."""
    path = pick(rng, _nodes(room.run)[1:])
    if rng.random() < 0.4:
        path = room.run / pick(rng, ("config.yaml", "elite", ELITE))
    how = pick(rng, ("link", "link", "moved", "pipe", "socket", "directory", "empty", "huge", "rights", "file", "gone"))
    if how == "huge" and path.is_file():
        os.truncate(path, pick(rng, (2**26, 2**33, 2**40)))
    elif how == "rights":
        path.chmod(pick(rng, (0, 0o111, 0o444, 0o200)))
    elif how == "moved":
        path.rename(room.outside.parent / "moved")
        path.symlink_to(room.outside.parent / "moved")
    elif how != "huge":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "link":
            path.symlink_to(pick(rng, (*TARGETS, path.name, str(room.outside / "thesis"), "nowhere")))
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                os.chdir(path.parent)
                made.bind(path.name[:90])
        elif how == "directory":
            path.mkdir()
        elif how in ("empty", "file"):
            path.write_bytes(b"" if how == "empty" else rng.bytes(sizes(rng, 1, 1e5)))


def more_nodes(rng: np.random.Generator, room: Room) -> None:
    """Add what does not belong there to a run and its checkpoints."""
    for _ in range(int(rng.integers(1, 4))):
        path = room.run / pick(rng, (*(f"checkpoints/{name}" for name in CHECKPOINTS), *HIDDEN))
        if path.exists() or path.is_symlink():
            continue
        how = rng.random()
        if how < 0.3:
            path.symlink_to(pick(rng, (room.outside / "thesis" / "text", room.outside / "thesis", Path("/nowhere"))))
        elif how < 0.4:
            os.mkfifo(path)
        elif how < 0.7:
            shutil.copytree(newest(room.run), path) if rng.random() < 0.5 else path.mkdir()
        else:
            path.write_bytes(pick(rng, LINES))


def histories(rng: np.random.Generator, room: Room) -> None:
    """Spoil the files that a run appends to or keeps for itself, and sometimes let TensorBoard read them."""
    for _ in range(int(rng.integers(1, 3))):
        name = pick(rng, ("metrics.jsonl", "metrics.jsonl", "lineage.jsonl", "tracking.json", "summary.json", ".lock"))
        lines = (room.run / name).read_bytes().splitlines() if (room.run / name).exists() else []
        rows = [line for line in lines if line.startswith(b'{"generation"') and line not in LINES]
        if rows and rng.random() < 0.4:
            lines.append(json.dumps(several(rng, json.loads(pick(rng, rows)))).encode())
        else:
            lines.insert(int(rng.integers(len(lines) + 1)), pick(rng, LINES))
        room.put(name, b"\n".join(lines) + b"\n" * int(rng.integers(2)))
    if rng.random() < 0.1:
        configure(room, tracking={"backends": ["tensorboard"]})
        room.put("tensorboard/events.out.tfevents.1.host.1.0", rng.bytes(sizes(rng, 1, 1e5)))


def configure(room: Room, **sections: dict[str, Any]) -> None:
    """Change settings of a run, in all sections that are given."""
    data = settings(room.run)
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    room.put("config.yaml", json_bytes(data))


def curves(rng: np.random.Generator, room: Room) -> None:
    """Let a run send its curves to W&B, with settings for it lying there."""
    configure(room, tracking={"backends": ["wandb"], "timeout": 1.0})
    for directory in ("wandb", ".wandb"):
        if rng.random() < 0.6:
            room.put(f"{directory}/settings", pick(rng, WANDB).encode("latin-1"))
    if rng.random() < 0.5:
        room.put(
            "tracking.json", pick(rng, (b'{"wandb": "../x"}', b'{"wandb": 3}', b"[" * 50_000, b'{"wandb": "abc"}'))
        )


def modules(rng: np.random.Generator, room: Room) -> None:
    """Put modules where the user stands, under names that programs import, as files and as packages."""
    for name in (pick(rng, MODULES) for _ in range(3)):
        (room.run / name).mkdir(exist_ok=True)
        evil = EVIL.format(name=name).replace('".."', '"..", ".."', 1)
        (room.run / name / "__init__.py").write_text(evil)
        (room.run / f"{name}.pth").write_text(f"import {name}\n")
    how = rng.random()
    if how < 0.3:
        configure(
            room, environment={"id": pick(rng, ("ALE/Pong-v5", "ALE/Nothing-v5", "ALE/../x", "Ant-v5", "Ant-v4"))}
        )
    elif how < 0.5:
        configure(
            room,
            environment={
                "id": pick(rng, ("LunarLander-v3", "FrozenLake-v1", "GymV21Environment-v0", "phys2d/CartPole-v1"))
            },
        )
    elif how < 0.8:
        state = json.loads((newest(room.run) / "state.json").read_bytes())
        forge(room, {"state.json": json_bytes(state | {"ranks": 2})})


FOLDERS: tuple[Family, ...] = (
    prepared("checkpoint: state.json", RESUME, states, goes_on=True),
    prepared("checkpoint: manifest.json", RESUME, manifests, goes_on=True),
    prepared("checkpoint: damage", RESUME, damaged, goes_on=True),
    prepared("checkpoint: replay", RESUME, replays, goes_on=True),
    prepared("agents that fit: evaluate", EVALUATE, strange_agents),
    prepared("agents that fit: resume", RESUME, strange_agents, goes_on=True),
    prepared("no files: evaluate", EVALUATE, strange_nodes, unprivileged=True),
    prepared("no files: resume", RESUME, strange_nodes, goes_on=True, unprivileged=True),
    prepared("too many files", RESUME, more_nodes, goes_on=True),
    prepared("histories", RESUME, histories, goes_on=True),
    prepared("W&B's settings", RESUME, curves, goes_on=True, inside=True),
    prepared("modules: evaluate", EVALUATE, modules, inside=True),
    prepared("modules: resume", RESUME, modules, inside=True),
)
