"""Aggregates of a run with too many agents to draw each: quantiles, a sample, and the lines of descent.

Everything is read from `metrics.jsonl`, once as a stream and then at a few generations. Axes: G generations, N lives
(a life is one agent in one generation), K shown generations, Q quantiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from evorl.records import RESTORED, Mutation
from evorl.report.generation import Generation
from evorl.report.lives import Lives, read_lives
from evorl.report.tree import Tree, tree_of
from evorl.runs.ancestry import SAME, Stage
from evorl.runs.elite import Measured
from evorl.runs.history import JsonLines, Row
from evorl.types import Architecture

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SHOWN = 250
"""The number of generations at which quantiles, the elite's lineage and samples are drawn."""
SAMPLE = 1_000
"""The number of agents drawn individually on top of the quantiles."""
CHANGES = 300
"""The number of newest mutations in the elite's lineage that are listed."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """The hyperparameters, architectures and mutations of the agents of a generation."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    hyperparameters: list[dict[str, Measured]]
    architectures: list[dict[str, Architecture]]
    mutations: list[Annotated[str, Field(max_length=10_000)]]


SETTINGS = TypeAdapter(Settings)


@dataclass(frozen=True)
class Crowd:
    """Aggregates of a run's agents: `bands` has the quantiles [K, Q] of each quantity at the `shown` generations.

    Quantities are `fitness`, `hyperparameters.NAME` and `units.NETWORK`. `sample` holds lives sampled at random from
    those generations, `path` the elite's ancestors there, and `changed` the newest of the `changes` mutations in the
    elite's lineage.
    """

    lives: int
    shown: Sequence[Generation]
    bands: Mapping[str, Floats]
    sample: Sequence[Stage]
    path: Sequence[Stage]
    changed: Sequence[Stage]
    changes: int
    effects: Mapping[tuple[str, str], Floats]
    tree: Tree


def read_crowd(metrics: JsonLines, elite: Any) -> tuple[list[Generation], Crowd]:
    """Read the generations of a run and the aggregates of their agents; `elite` is the id of its best agent.

    Raises ValidationError, KeyError or ValueError for invalid lines.
    """
    generations, offsets, lives = read_lives(metrics)
    count = len(generations)
    stride = -(-count // SHOWN)
    shown = list(range((count - 1) % stride, count, stride))
    place_of = {row.generation: place for place, row in enumerate(generations)}
    winner = _place(lives, place_of.get(generations[-1].elite_generation or 0), elite)
    path = lives.ancestors(winner)
    shown = sorted({0, *shown, *lives.generation(path[-1:]).tolist()})
    changed = [life for life in path[1:].tolist() if lives.mutations[lives.mutation[life]][0] != "none"
               and lives.id[life] != lives.id[lives.origin[life]]]  # fmt: skip
    at = dict(zip(lives.generation(path).tolist(), path.tolist(), strict=True))
    found = _at(metrics, offsets, lives, generations, shown, at, changed[-CHANGES:])
    effects = _effects(lives)
    tree = tree_of(lives, winner, generations)
    crowd = Crowd(
        lives=len(lives.id), shown=[generations[place] for place in shown], changes=len(changed), effects=effects,
        tree=tree, **found,
    )  # fmt: skip
    return generations, crowd


def _place(lives: Lives, place: int | None, agent: Any) -> int:
    """Return the index of an agent's life in the generation at index `place`, or -1."""
    if place is None or not isinstance(agent, int):
        return -1
    start, end = lives.starts[place : place + 2]
    hits = np.flatnonzero(lives.id[start:end] == agent)
    return int(start + hits[0]) if hits.size else -1


def _at(
    metrics: JsonLines,
    offsets: Sequence[int],
    lives: Lives,
    generations: Sequence[Generation],
    shown: Sequence[int],
    path: Mapping[int, int],
    changed: Sequence[int],
) -> dict[str, Any]:
    """Second pass: read settings at the `shown` generations, and the full mutations of the lives in `changed`."""
    at_changes = dict(zip(lives.generation(np.array(changed, dtype=np.int64)).tolist(), changed, strict=True))
    rng = np.random.default_rng(0)
    bands: dict[str, list[Floats]] = defaultdict(list)
    found: dict[str, list[Stage]] = {"sample": [], "path": [], "changed": []}
    each = max(1, SAMPLE // len(shown))
    drawn = set(shown)
    for place in sorted(drawn | at_changes.keys()):
        row = metrics.at(offsets[place], Settings.__dataclass_fields__ if place in drawn else ["mutations"])
        start, end = (int(edge) for edge in lives.starts[place : place + 2])

        def stage(
            life: int, settings: Settings | None, row: Row = row, start: int = start, place: int = place
        ) -> Stage:
            origin = int(lives.origin[life])
            kind, _, detail = str(row["mutations"][life - start]).partition(" (")
            same = origin >= 0 and lives.id[origin] == lives.id[life]
            value = float(lives.fitness[life])
            return Stage(
                generation=generations[place].generation,
                id=int(lives.id[life]),
                parent=int(lives.id[origin]) if origin >= 0 and not same else None,
                parent_generation=None,
                mutation=SAME if same else Mutation(kind, detail.removesuffix(")")),
                hyperparameters={} if settings is None else settings.hyperparameters[life - start],
                architectures={} if settings is None else settings.architectures[life - start],
                fitness=None if np.isnan(value) else value,
            )

        if place in at_changes:
            found["changed"].append(stage(at_changes[place], None))
        if place not in drawn:
            continue
        settings = SETTINGS.validate_python(row)
        if not len(settings.hyperparameters) == len(settings.architectures) == end - start:
            raise ValueError(f"generation {generations[place].generation} has settings of another number of agents")
        found["sample"] += [stage(start + int(one), settings) for one in rng.permutation(end - start)[:each]]
        if place in path:
            found["path"].append(stage(path[place], settings))
        values = {"fitness": lives.fitness[start:end].tolist()}
        values |= _columns("hyperparameters", settings.hyperparameters)
        units = [
            {name: float(sum(one.hidden_sizes)) for name, one in agent.items()} for agent in settings.architectures
        ]
        values |= _columns("units", units)
        for name in dict.fromkeys([*values, *bands]):
            known = [value for value in values.get(name, ()) if value == value]
            quantiles = np.quantile(known, QUANTILES) if known else np.full(len(QUANTILES), np.nan)
            bands[name] += [np.full(len(QUANTILES), np.nan)] * (shown.index(place) - len(bands[name]))
            bands[name].append(quantiles)
    return {**found, "bands": {name: np.array(rows) for name, rows in bands.items()}}


def units_of(architectures: Mapping[str, Architecture]) -> dict[str, float]:
    """Return the total number of hidden units of each network."""
    return {name: float(sum(one.hidden_sizes)) for name, one in architectures.items()}


def _columns(section: str, agents: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each key over agents, under `SECTION.KEY`."""
    found: dict[str, list[float]] = defaultdict(list)
    for agent in agents:
        for name, value in agent.items():
            found[f"{section}.{name}"].append(value)
    return found


def _effects(lives: Lives) -> dict[tuple[str, str], Floats]:
    """Return the fitness changes from parent to child, by kind of mutation and by mutated hyperparameter."""
    children = np.flatnonzero((lives.origin >= 0) & (lives.id != lives.id[lives.origin]))
    change = lives.fitness[children] - lives.fitness[lives.origin[children]]
    children, change = children[np.isfinite(change)], change[np.isfinite(change)]
    by_code = lives.mutation[children]
    found: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    for code, (kind, target) in enumerate(lives.mutations):
        own = change[by_code == code]
        if own.size and (kind, target) != (RESTORED.kind, RESTORED.target):
            found[kind, ""].append(own)
            if kind == "hyperparameters":
                found[kind, target].append(own)
    return {key: np.concatenate(parts) for key, parts in found.items()}
