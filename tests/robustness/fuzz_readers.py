"""Spoiled runs for every command that reads a run: configurations, logs, summaries, agents and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fuzz_ancestry import lineages
from fuzz_files import ELITE, EXTREME, HOSTILE, several
from fuzz_places import LINES, damaged, histories, manifests, more_nodes, states, strange_nodes
from fuzz_rooms import BESIDE, RUN, Case, Room
from fuzz_texts import ODD, Family, known, literal, pick, settings

import evorl
from evorl.commands.train import summary_lines
from evorl.export.onnx_file import write_onnx
from evorl.report.data import load as load_drawn
from evorl.report.page import page
from evorl.report.picture import draw
from evorl.runs import video

Spoil = Callable[[np.random.Generator, Room], None]
MIXED_KEYS = ("{1: 2, a: 3}", "{true: 1, b: 2}", "{null: 1, a: 2}", "{1.5: 2, a: {1: 2, b: 3}}", "{on: 1, x: [{3: 1}]}")
SHOWN = (
    "seed", "mine", "environment.id", "environment.kwargs", "algorithm.name", "training.target_fitness", "run.name",
    "population.size", "population", "environment.num_envs", "evolution.steps", "evaluation.episodes", "evolution",
)  # fmt: skip
"""Settings that lists, pages and pictures show without what validates a configuration."""
POINTED = (
    ".nan", ".inf", "-.inf", "1e308", "0x" + "f" * 4000, "9" * 4000, '"\\ud800"', '"\\e[2J"', "true", "[1]", "{a: 1}",
    "null", "'$x_{$'", "'<script>'", *MIXED_KEYS,
)  # fmt: skip


def read(run: Path) -> None:
    """Read a run into tables, as a notebook does."""
    record = evorl.read_run(run)
    for rows in (record.metrics, record.lineage):
        evorl.columns(rows)
    record.metric("best_fitness")


def tabulate(run: Path) -> None:
    """Print what `evorl train --seeds` prints of its runs."""
    print("\n".join(summary_lines([(1, run), (2, run.with_name("b"))])))


def load_best(run: Path) -> None:
    evorl.load(run).predict(np.zeros(4, np.float32))


def load_saved(run: Path) -> None:
    evorl.load(run, generation=3).predict(np.zeros(4, np.float32))


FILM, TRAINED = f"{RUN}/film.mp4", ("run.directory={run}/more", "run.name=new", "training.max_steps=40")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "list": ("list", "runs"),
    "evaluate": ("evaluate", RUN, "--episodes", "1"),
    "evaluate --json": ("evaluate", RUN, "--episodes", "1", "--json"),
    "lineage": ("lineage", RUN),
    "lineage --settings": ("lineage", RUN, "--settings"),
    "plot": ("plot", RUN, "-o", f"{RUN}/plot.png", "--hyperparameter", "learning_rate"),
    "plot of two": ("plot", RUN, BESIDE, "-o", f"{RUN}/plot.svg"),
    "report": ("report", RUN),
    "report of two": ("report", RUN, BESIDE, "-o", f"{RUN}/both.html"),
    "export": ("export", RUN),
    "watch": ("watch", RUN, "--video", FILM, "--episodes", "1"),
    "push": ("push", RUN, "me/agent"),
    "resume": ("resume", RUN, "training.max_steps=100000"),
    "clean": ("clean", RUN, "--yes"),
    "config": ("config", f"{RUN}/config.yaml"),
    "train from": ("train", f"{BESIDE}/config.yaml", f"population.from={RUN}", *TRAINED),
    "train from all": (
        "train", f"{BESIDE}/config.yaml", f"population.from={RUN}", "population.from_agents=population", *TRAINED,
    ),
}  # fmt: skip
"""A command line of each command that reads a run."""
ONLY_TEXTS = ("list", "plot", "plot of two", "report", "report of two", "config", "read_run", "the table of seeds")
WITH_CHECKPOINTS = ("resume", "clean", "train from all", "load of a generation")
GO_ON = ("resume", "train from", "train from all")
CALLS: Mapping[str, Callable[[Path], None]] = {
    "read_run": read, "load": load_best, "load of a generation": load_saved, "the table of seeds": tabulate,
}  # fmt: skip
"""What Python programs read a run by."""


def odd_settings(rng: np.random.Generator, room: Room) -> None:
    """Put odd values, also mappings of mixed keys, into the configuration."""
    data = settings(room.run)
    path = pick(rng, known(room.run)) if rng.random() < 0.3 else pick(rng, SHOWN)
    room.put("config.yaml", literal(data, path, pick(rng, ODD if rng.random() < 0.3 else POINTED)))


def other_settings(rng: np.random.Generator, room: Room) -> None:
    """Replace, remove, double or rename parts of the configuration."""
    room.put("config.yaml", yaml.safe_dump(several(rng, settings(room.run))).encode("utf-8", "surrogatepass"))


def spoiled_object(name: str) -> Spoil:
    """Spoil a file that holds one JSON object."""

    def spoil(rng: np.random.Generator, room: Room) -> None:
        path = room.run / name
        value = json.loads(path.read_bytes())
        if rng.random() < 0.2:
            room.put(name, pick(rng, (*LINES, json.dumps(pick(rng, EXTREME)).encode())))
        else:
            room.put(name, json.dumps(several(rng, value)).encode())

    return spoil


def spoiled_rows(name: str) -> Spoil:
    """Spoil lines of a log, each of which stays an object."""

    def spoil(rng: np.random.Generator, room: Room) -> None:
        rows = [json.loads(line) for line in (room.run / name).read_bytes().splitlines()]
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(len(rows)))
            key = pick(rng, list(rows[place]))
            rows[place] = {**rows[place], key: several(rng, rows[place][key]) if rng.random() < 0.5 else odd(rng)}
        room.put(name, b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    return spoil


def odd(rng: np.random.Generator) -> Any:
    """Draw a value that no run writes."""
    return pick(
        rng, (float("nan"), float("inf"), 1e300, -1e300, 10**400, "\ud800", "\x1b[2J", {"1": 2}, True, *EXTREME)
    )


def spoiled_agents(rng: np.random.Generator, room: Room) -> None:
    """Spoil the file of the best agent."""
    kind = pick(rng, list(HOSTILE))
    room.put(ELITE, HOSTILE[kind](rng, (room.run / ELITE).read_bytes()))


def closed_folder(rng: np.random.Generator, room: Room) -> None:
    """Take rights away from the run's directory itself."""
    room.run.chmod(pick(rng, (0, 0o111, 0o444, 0o200)))


TEXTS: tuple[Spoil, ...] = (
    odd_settings, odd_settings, odd_settings, other_settings, lineages, spoiled_rows("lineage.jsonl"),
    spoiled_rows("metrics.jsonl"), spoiled_object("summary.json"), spoiled_object("elite/agent.json"), histories,
)  # fmt: skip
AGENTS: tuple[Spoil, ...] = (spoiled_agents, spoiled_object("environment.json"))
CHECKPOINTS: tuple[Spoil, ...] = (states, manifests, damaged)
NODES: tuple[Spoil, ...] = (more_nodes, strange_nodes, closed_folder)


def reader(command: str) -> Family:
    """Runs that are spoiled in any way, read by one command."""

    spoils = TEXTS + NODES
    spoils += () if command in ONLY_TEXTS else AGENTS * 2
    spoils += CHECKPOINTS * 2 if command in WITH_CHECKPOINTS else ()

    def family(rng: np.random.Generator, run: Path) -> Case:
        number = int(rng.integers(2**63))

        def spoil(room: Room) -> None:
            own = np.random.default_rng(number)
            for _ in range(1 if own.random() < 0.7 else 2):
                chosen = pick(own, spoils)
                try:
                    chosen(own, room)
                except Exception:  # What the first left may have no place for the second.
                    break
                if chosen in NODES:  # The second would wait for a pipe.
                    break

        return Case(
            command,
            COMMANDS.get(command, ()),
            spoil,
            goes_on=command in GO_ON,
            unprivileged=True,
            beside=True,
            call=CALLS.get(command),
            says=r"(?m)^b +CartPole-v1 +\S+ +3 " if command == "list" else "",
        )

    return family


READERS: tuple[Family, ...] = tuple(reader(command) for command in (*COMMANDS, *CALLS))


def warm(run: Path, folder: Path) -> None:
    """Import and cache what the commands do once in a process: children that are forked later share it."""
    drawn = load_drawn(run)
    for suffix in (".png", ".svg"):
        draw([drawn], folder / f"plot{suffix}")
    page([drawn])
    write_onnx(evorl.load(run), folder / "agent.onnx", {})
    loaded = evorl.load(run)
    images = ((image, rate) for image, _, rate in video.play(loaded, loaded.config.environment, [1], 3, "rgb_array"))
    video.write_video(folder / "film.mp4", ((image, rate) for image, rate in images if image is not None))
