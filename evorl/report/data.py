"""The data of a run for reports, from `metrics.jsonl` and `lineage.jsonl`.

A *life* is one agent in one generation. A run of few lives is drawn life by life; of a longer one, all lives are read
as arrays and aggregated in a `Crowd`: quantiles, a sample, the effects of mutations and the lines of descent. A run's
files may be untrusted, so types and sizes are validated here.

Axes: G generations, N lives, P agents of a generation, K shown generations, Q quantiles, M nodes of a tree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from evorl.config.errors import on_one_line
from evorl.config.fields import RATING
from evorl.league.standings import Standings
from evorl.runs.champion import Score
from evorl.runs.directory import LINEAGE, METRICS, STATE, Checkpoints
from evorl.runs.json_lines import JsonLines, Row
from evorl.runs.lineage import LINE, SAME, Stage, reader_of
from evorl.runs.progress import progress_of
from evorl.runs.read import read_overview
from evorl.system.files import CHECKPOINTS, reason
from evorl.types import NO_BASELINE, Architecture, Measured, Mutation, UserError

MOST_LIVES = 4_000
"""The maximum number of lives (agents over all generations) drawn individually; beyond it a `Crowd` is drawn."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SHOWN = 250
"""The number of generations at which quantiles, the elite's lineage and samples are drawn."""
SAMPLE = 1_000
"""The number of agents drawn individually on top of the quantiles."""
CHANGES = 300
"""The number of newest mutations in the elite's lineage that are listed."""
RECENT = 64
"""The number of newest generations with a hash index for parent lookup; older ones are searched linearly."""
LAST = 40
"""The number of agents of the last generation whose lines are drawn."""
TIMES, EACH = 30, 8
"""The number of earlier generations, and of agents in each, whose lines are drawn."""
Count = Annotated[int, Field(ge=0, le=10**15)]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LISTS: Mapping[str, set[type]] = {
    "agents": {int},
    "fitness": {float, int, type(None)},
    "parents": {int, type(None)},
    "parent_generations": {int, type(None)},
    "mutations": {str},
}
"""The lists [P] that are read from a line of `metrics.jsonl`, with the allowed types of their items."""


@dataclass(frozen=True)
class Generation:
    """The fields of a `metrics.jsonl` line that reports use."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    generation: Count
    agent_steps: Count
    global_steps: Count = 0
    wall_clock_seconds: Measured = 0.0
    ranks: Count = 1
    placement: str = ""
    env_steps_per_second: Measured = 0.0
    best_fitness: Measured | None = None
    mean_fitness: Measured | None = None
    elite_fitness: Measured | None = None
    elite_std: Measured | None = None
    elite_episodes: Count = 0
    elite_generation: Count | None = None
    selection_began: Count | None = None
    rank_correlation: Measured | None = None
    seconds: dict[str, Measured] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)


GENERATION = TypeAdapter(Generation)
NEEDED = (*Generation.__dataclass_fields__, *LISTS)


@dataclass(frozen=True)
class Lives:
    """All lives of a run as arrays [N], in file order, with 28 bytes per life.

    `origin` is the index of a life's predecessor: the same agent a generation earlier, or its parent; -1 if there is
    none. `mutation` indexes `mutations`, pairs of kind and target. `starts` [G + 1] has the index of each generation's
    first life, and N at the end.
    """

    id: Ints
    fitness: Floats
    origin: Ints
    mutation: NDArray[np.int32]
    mutations: Sequence[tuple[str, str]]
    starts: Ints

    def generation(self, lives: Ints) -> Ints:
        """Return the generation index, from 0, of each of these lives."""
        return np.searchsorted(self.starts, lives, side="right") - 1

    def ancestors(self, life: int) -> Ints:
        """Return the lineage of a life as indices, from its first ancestor to itself."""
        path = []
        while life >= 0:
            path.append(life)
            life = int(self.origin[life])
        return np.array(path[::-1], dtype=np.int64)


def read_lives(metrics: JsonLines) -> tuple[list[Generation], list[int], Lives]:
    """Read the generations of a run, the byte offsets of their lines, and all lives.

    Raises ValueError or KeyError for invalid lines.
    """
    generations, offsets, reading = [], [], _Reading()
    for offset, row in metrics.members_at(NEEDED):
        generations.append(GENERATION.validate_python(row))
        offsets.append(offset)
        reading.add(generations[-1].generation, {name: _list(row, name) for name in LISTS})
    return generations, offsets, reading.lives()


class _Reading:
    """Accumulates lives, one generation at a time."""

    def __init__(self) -> None:
        self._ids: list[Ints] = []
        self._fitness: list[Floats] = []
        self._origins: list[Ints] = []
        self._mutations: list[NDArray[np.int32]] = []
        self._starts = [0]
        self._codes = _Codes()
        self._recent: dict[int, dict[int, int]] = {}
        self._places: dict[int, int] = {}

    def add(self, generation: int, lists: Mapping[str, list[Any]]) -> None:
        """Add a generation. Raises ValueError if its lists [P] differ in length or a fitness is not finite."""
        agents, start, count = lists["agents"], self._starts[-1], len(lists["agents"])
        if any(len(values) != count for values in lists.values()):
            raise ValueError(f"generation {generation} has lists of different lengths")
        fitness = np.array(lists["fitness"], dtype=np.float64)
        if np.isfinite(fitness).sum() + lists["fitness"].count(None) < count:
            raise ValueError(f"generation {generation} has a fitness that is not finite")
        find = self._recent.get(generation - 1, {}).get
        same, parent = (
            np.fromiter(map(find, lists[name], repeat(-1)), np.int64, count) for name in ("agents", "parents")
        )
        born = np.array(lists["parent_generations"], dtype=np.float64)
        origin = np.where(same >= 0, same, np.where(born == generation - 1, parent, -1))
        for place in np.flatnonzero((same < 0) & (born < generation - 1)):
            origin[place] = self._older(int(born[place]), lists["parents"][place])
        self._ids.append(np.array(agents, dtype=np.int64))
        self._fitness.append(fitness)
        self._origins.append(origin)
        codes = [self._codes[text] for text, _, _ in map(str.partition, lists["mutations"], repeat(":"))]
        self._mutations.append(np.array(codes, dtype=np.int32))
        self._places[generation] = len(self._ids) - 1
        self._recent[generation] = dict(zip(agents, range(start, start + count), strict=True))
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._starts.append(start + count)

    def lives(self) -> Lives:
        """Concatenate all generations."""
        return Lives(
            id=np.concatenate(self._ids),
            fitness=np.concatenate(self._fitness),
            origin=np.concatenate(self._origins),
            mutation=np.concatenate(self._mutations),
            mutations=[*map(_mutation, self._codes)],
            starts=np.array(self._starts),
        )

    def _older(self, generation: int, agent: int | None) -> int:
        """Return the index of an agent's life in an earlier generation, or -1."""
        if generation in self._recent:
            return self._recent[generation].get(-1 if agent is None else agent, -1)
        place = self._places.get(generation)
        if place is None:
            return -1
        hits = np.flatnonzero(self._ids[place] == agent)
        return self._starts[place] + int(hits[0]) if hits.size else -1


def _list(row: Row, name: str) -> list[Any]:
    """Return a list of a line. Raises ValueError if it is not a list or has items of other types."""
    values = row[name]
    if not isinstance(values, list) or not set(map(type, values)) <= LISTS[name]:
        raise ValueError(f"{name} of generation {row['generation']} is not a list of the types that a run writes")
    return values


class _Codes(dict[str, int]):
    """Consecutive integer codes for texts, assigned in order of first appearance."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _mutation(text: str) -> tuple[str, str]:
    """Split a mutation's text before its colon, such as `kind (target`, into kind and target."""
    kind, _, target = text.partition(" (")
    return kind, target.removesuffix(")")


@dataclass(frozen=True)
class Tree:
    """Nodes [M] of the lines of descent: roots, forks and leaves. `up` is the index of a node's parent, -1 for roots.

    `id` and `fitness` are those of a node's agent, `generation` and `lane` its position; `trunk` marks the nodes in the
    elite's lineage.
    """

    id: list[int]
    fitness: list[float | None]
    generation: list[int]
    lane: list[float]
    up: list[int]
    trunk: list[bool]


def tree_of(lives: Lives, winner: int, generations: Sequence[Generation]) -> Tree:
    """Return the lines of descent of the elite, and of evenly spaced agents of the last and some earlier generations.

    `winner` is the elite's life, or -1.
    """
    origin, starts = lives.origin, lives.starts
    count = len(starts) - 1
    ends = {winner} - {-1}
    for place in np.unique(np.linspace(0, count - 1, TIMES + 1).astype(int)):
        start, end = starts[place : place + 2]
        ends |= set(np.linspace(start, end - 1, LAST if place == count - 1 else EACH).astype(int).tolist())
    children: dict[int, set[int]] = defaultdict(set)
    for end in sorted(ends):
        life, up = end, int(origin[end])
        while up >= 0 and life not in children[up]:
            known = bool(children[up])
            children[up].add(life)
            if known:
                break
            life, up = up, int(origin[up])
    first = [life for life in set(children) | ends if origin[life] < 0]
    nodes = sorted(ends | set(first) | {life for life, born in children.items() if len(born) > 1})
    at = {life: place for place, life in enumerate(nodes)}
    above = [_next(int(origin[life]), origin, at) for life in nodes]
    trunk, place = [False] * len(nodes), at.get(winner, -1)
    while place >= 0:
        trunk[place] = True
        place = above[place]
    when = lives.generation(np.array(nodes, dtype=np.int64)).tolist()
    return Tree(
        id=lives.id[nodes].tolist(),
        fitness=[None if value != value else value for value in lives.fitness[nodes].tolist()],
        generation=[generations[place].generation for place in when],
        lane=_lanes(above, trunk, when),
        up=above,
        trunk=trunk,
    )


def _next(life: int, origin: Ints, at: dict[int, int]) -> int:
    """Return the nearest node in the lineage of a life, itself included, or -1."""
    while life >= 0 and life not in at:
        life = int(origin[life])
    return at.get(life, -1)


def _lanes(up: Sequence[int], trunk: Sequence[bool], when: Sequence[int]) -> list[float]:
    """Return the lane of each node: 0 on the trunk; other lines take the nearest lanes free over their generations."""
    below: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(up):
        below[parent].append(node)
    lanes = [0.0] * len(up)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    roots = [node for node, parent in enumerate(up) if not trunk[node] and (parent < 0 or trunk[parent])]
    for root in sorted(roots, key=lambda node: when[node]):
        line, leaves, stack = [], [], [root]
        while stack:
            node = stack.pop()
            line.append(node)
            stack += sorted(below[node], reverse=True)
            leaves += [node] if not below[node] else []
        begin, end = when[up[root]] if up[root] >= 0 else when[root], max(when[node] for node in line)
        height = _free(taken, len(leaves), begin, end)
        sign = 1 if height > 0 else -1
        for place, leaf in enumerate(leaves):
            lanes[leaf] = height + sign * place
            taken[height + sign * place].append((begin, end))
        for node in reversed(line):
            if below[node]:
                lanes[node] = sum(lanes[child] for child in below[node]) / len(below[node])
    return lanes


def _free(taken: dict[int, list[tuple[int, int]]], size: int, begin: int, end: int) -> int:
    """Return the lane nearest to the trunk, on either side, from which `size` lanes outwards are free in the period."""
    distance = 1
    while True:
        for sign in (1, -1):
            wanted = [sign * (distance + more) for more in range(size)]
            if not any(first <= end and begin <= last for lane in wanted for first, last in taken[lane]):
                return wanted[0]
        distance += 1


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


def read_crowd(metrics: JsonLines, elite: Any, use: Callable[[str, float], float]) -> tuple[list[Generation], Crowd]:
    """Read the generations of a run and the aggregates of their agents; `elite` is the id of its best agent.

    `use` converts stored hyperparameters to the values training used.
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
    found = _at(metrics, offsets, lives, generations, shown, at, changed[-CHANGES:], use)
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
    use: Callable[[str, float], float],
) -> dict[str, Any]:
    """Second pass: read settings at the `shown` generations, and the full mutations of the lives in `changed`.

    `use` converts stored hyperparameters to the values training used.
    """
    at_changes = dict(zip(lives.generation(np.array(changed, dtype=np.int64)).tolist(), changed, strict=True))
    rng = np.random.default_rng(0)
    bands: dict[str, list[Floats]] = defaultdict(list)
    found: dict[str, list[Stage]] = {"sample": [], "path": [], "changed": []}
    each = max(1, SAMPLE // len(shown))
    drawn = set(shown)
    for place in sorted(drawn | at_changes.keys()):
        row = metrics.at(offsets[place], Settings.__dataclass_fields__ if place in drawn else ["mutations"])
        number, mutations = generations[place].generation, row["mutations"]
        start, end = (int(edge) for edge in lives.starts[place : place + 2])
        if place in at_changes:
            life = at_changes[place]
            found["changed"].append(_stage(lives, life, number, mutations[life - start]))
        if place not in drawn:
            continue
        settings = SETTINGS.validate_python(row)
        if not len(settings.hyperparameters) == len(settings.architectures) == end - start:
            raise ValueError(f"generation {number} has settings of another number of agents")
        members = [int(one) for one in rng.permutation(end - start)[:each]]
        found["sample"] += [_stage(lives, start + one, number, mutations[one], settings, one) for one in members]
        if place in path:
            one = path[place] - start
            found["path"].append(_stage(lives, path[place], number, mutations[one], settings, one))
        values = {"fitness": lives.fitness[start:end].tolist()}
        used = [{name: use(name, value) for name, value in each.items()} for each in settings.hyperparameters]
        values |= _columns("hyperparameters", used)
        values |= _columns("units", [units_of(each) for each in settings.architectures])
        for name in dict.fromkeys([*values, *bands]):
            known = [value for value in values.get(name, ()) if value == value]
            quantiles = np.quantile(known, QUANTILES) if known else np.full(len(QUANTILES), np.nan)
            bands[name] += [np.full(len(QUANTILES), np.nan)] * (shown.index(place) - len(bands[name]))
            bands[name].append(quantiles)
    return {**found, "bands": {name: np.array(rows) for name, rows in bands.items()}}


def _stage(
    lives: Lives, life: int, generation: int, mutation: object, settings: Settings | None = None, place: int = 0
) -> Stage:
    """A life of an agent as a stage of a lineage, with the settings at `place` of its generation's, if given."""
    origin = int(lives.origin[life])
    kind, _, detail = str(mutation).partition(" (")
    same = origin >= 0 and lives.id[origin] == lives.id[life]
    value = float(lives.fitness[life])
    return Stage(
        generation=generation,
        id=int(lives.id[life]),
        parent=int(lives.id[origin]) if origin >= 0 and not same else None,
        parent_generation=None,
        mutation=SAME if same else Mutation(kind, detail.removesuffix(")")),
        hyperparameters={} if settings is None else settings.hyperparameters[place],
        architectures={} if settings is None else settings.architectures[place],
        fitness=None if np.isnan(value) else value,
    )


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
        if own.size and Mutation(kind, target) not in NO_BASELINE:
            found[kind, ""].append(own)
            if kind == "hyperparameters":
                found[kind, target].append(own)
    return {key: np.concatenate(parts) for key, parts in found.items()}


@dataclass(frozen=True)
class Drawn:
    """A run: its generations, the record of each agent in each of them (`lives`), and the elite's lineage (`winner`).

    If there are too many agents to draw, `crowd` aggregates them, `lives` is a sample, and `winner` has only the shown
    generations.
    """

    name: str
    config: dict[str, Any]
    generations: Sequence[Generation]
    lives: Sequence[Stage]
    winner: Sequence[Stage]
    summary: dict[str, Any]
    crowd: Crowd | None = None
    standings: Standings | None = None
    """The league at the newest checkpoint, where the environment is a game and that checkpoint can be read."""

    @property
    def is_rated(self) -> bool:
        """True if fitness is a rating, so that the elite's score is on another scale."""
        return self.setting(f"evolution.fitness.{RATING}") is not None

    @property
    def score_name(self) -> str:
        """The label of the best agent's score, such as `mean return`; `mean fitness` for a weighted sum."""
        terms = self.setting("evolution.fitness")
        if self.is_rated:
            return "mean result"
        if not isinstance(terms, dict):
            return "mean return"
        return f"mean {on_one_line(str(next(iter(terms))), 40) if list(terms.values()) == [1.0] else 'fitness'}"

    @property
    def fitness_name(self) -> str:
        """The label of the agents' fitness, such as `mean return in evaluation`."""
        if self.is_rated:
            return "rating (Elo)"
        by = "training" if self.setting("evaluation.fitness") == "training" else "evaluation"
        return f"{self.score_name} in {by}"

    @property
    def steps(self) -> dict[int, int]:
        """Environment steps per agent at the end of each generation, by generation."""
        return {row.generation: row.agent_steps for row in self.generations}

    @property
    def best(self) -> Score | None:
        """The score of the best agent, or None."""
        last = self.generations[-1]
        if last.elite_fitness is None:
            return None
        return Score(max(1, last.elite_episodes), last.elite_fitness, last.elite_std)

    @property
    def described_best(self) -> str:
        """The best agent's mean ± standard error and number of episodes, as text."""
        return "–" if self.best is None else self.best.described(fresh=self.confirms)

    @property
    def confirms(self) -> bool:
        """True if the best agent's score comes from episodes that did not select it."""
        return bool(self.setting("evaluation.confirmation_episodes") != 0)

    @cached_property
    def use(self) -> Callable[[str, float], float]:
        """The function (name, stored value) -> value that training used."""
        return reader_of(self.config)

    def parents(self) -> dict[tuple[int, int], Stage]:
        """Return each life's predecessor by (generation, agent): the same agent a generation earlier, or its parent."""
        known = {(life.generation, life.id): life for life in self.lives}
        found = {}
        for life in self.lives:
            before = known.get((life.generation - 1, life.id))
            if before is None and life.parent is not None and life.parent_generation is not None:
                before = known.get((life.parent_generation, life.parent))
            if before is not None and before.generation < life.generation:
                found[life.generation, life.id] = before
        return found

    def setting(self, path: str) -> Any:
        """Return a setting by its dotted path, such as `environment.id`, or None if there is no such setting.

        Non-finite numbers also give None, since the configuration is not validated.
        """
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return None if isinstance(value, float) and not math.isfinite(value) else value


def load(path: Path) -> Drawn:
    """Read the run in directory `path` for drawing. Raises UserError if it is unreadable or has no generation yet."""
    overview = read_overview(path)
    lineage, metrics = JsonLines(path / LINEAGE), JsonLines(path / METRICS)
    try:
        rows = list(islice(lineage.rows(), MOST_LIVES + 1))
        if not overview.last or not rows:
            raise UserError(f"{path}: no generation has ended yet, so there is nothing to draw")
        name = path.resolve().name
        if len(rows) > MOST_LIVES:
            generations, crowd = read_crowd(metrics, overview.elite.get("id"), reader_of(overview.config))
            sample, standings = crowd.sample, _standings(path)
            return Drawn(name, overview.config, generations, sample, crowd.path, overview.summary, crowd, standings)
        generations = [GENERATION.validate_python(row) for row in metrics.members(*Generation.__dataclass_fields__)]
        lives = [LINE.validate_python({name: row[name] for name in Stage.__dataclass_fields__}) for row in rows]
    except OSError as error:
        raise UserError(reason(error, path)) from error
    except (ValueError, KeyError, OverflowError) as error:
        raise UserError(f"{path}: its metrics or lineage cannot be read: {on_one_line(str(error))[:200]}") from error
    counted = {row.generation for row in generations}
    lives = [life for life in lives if life.generation in counted]
    drawn = Drawn(name, overview.config, generations, lives, (), overview.summary, standings=_standings(path))
    return replace(drawn, winner=_winner(drawn, overview.elite.get("id", -1)))


def load_several(paths: Sequence[Path]) -> list[Drawn]:
    """Read several runs, each once, in the order of their first mention.

    Runs whose directories share a name are named by the shortest distinct ends of their paths.
    """
    places: dict[Path, Path] = {}
    for path in paths:
        # A run that a shell's pattern names once more would otherwise count as several seeds.
        places.setdefault(path.resolve(), path)
    return [replace(load(path), name=_name(place, list(places))) for place, path in places.items()]


def _name(place: Path, places: Sequence[Path]) -> str:
    """Return the shortest end of a path that no other of `places` has."""
    for count in range(1, len(place.parts)):
        end = place.parts[-count:]
        if all(other == place or other.parts[-count:] != end for other in places):
            break
    return "/".join(place.parts[-count:])


def _standings(path: Path) -> Standings | None:
    """The league of the newest checkpoint; None without one, or without a checkpoint that can be read."""
    checkpoints = Checkpoints(path / CHECKPOINTS, keep=1)
    newest = max(checkpoints.generations(), default=0)
    try:
        return progress_of(checkpoints.read(newest, STATE), str(path)).league if newest else None
    except UserError:
        return None


def born_by(life: Stage, parent: Stage | None) -> str:
    """Return the kind of mutation that created a life; `none` if it continues the same agent."""
    return "none" if parent is not None and parent.id == life.id else life.mutation.kind


def _winner(drawn: Drawn, elite: Any) -> list[Stage]:
    """Return the lineage of the elite, from its first ancestor to itself."""
    known = {(life.generation, life.id): life for life in drawn.lives}
    parents = drawn.parents()
    life = known.get((drawn.generations[-1].elite_generation or 0, elite))
    path: list[Stage] = []
    while life is not None:
        path.append(life)
        life = parents.get((life.generation, life.id))
    return path[::-1]
