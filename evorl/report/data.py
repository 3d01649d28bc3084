"""The data of a run for reports, from `metrics.jsonl` and `lineage.jsonl`.

A *life* is one agent in one generation. Of a run of more than `MOST_LIVES` lives only some generations, evenly spaced,
are drawn. A run's files may be untrusted, so types and sizes are validated here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from evorl.config import validate
from evorl.config.fields import RATING
from evorl.runs.agents.comparison import Pair
from evorl.runs.agents.elite import Score
from evorl.runs.reading.lineage import Stage, ancestors, stage_of
from evorl.runs.reading.read import read_overview
from evorl.runs.storage.directory import LINEAGE, METRICS
from evorl.runs.storage.json_lines import JsonLines
from evorl.system.files import read_lines, reason
from evorl.types.agents import Measured
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError

MOST_LIVES = 2_000
"""The number of lives that are drawn at most, unless a few generations have more."""
NOTHING = "no generation has ended yet, so there is nothing to draw"
Count = Annotated[int, Field(ge=0, le=10**15)]
Key = tuple[int, int]
"""The generation and agent id of a life."""


@dataclass(frozen=True)
class GenerationRow:
    """The fields of a `metrics.jsonl` line that reports use."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    generation: Count
    agent_steps: Count
    global_steps: Count = 0
    wall_clock_seconds: Measured = 0.0
    ranks: Count = 1
    placement: str = ""
    env_steps_per_second: Measured = 0.0
    elite_fitness: Measured | None = None
    elite_std: Measured | None = None
    elite_episodes: Count = 0
    elite_generation: Count | None = None
    agents: list[Count] = field(default_factory=list)
    train_return: list[Measured | None] = field(default_factory=list)
    """The mean return of each agent's training episodes; None of too few."""
    made_with: dict[str, str] = field(default_factory=dict)


GENERATION = TypeAdapter(GenerationRow)
PAIRS = TypeAdapter(Annotated[list[tuple[Measured | None, Measured | None]], Field(max_length=1_000)])


@dataclass(frozen=True)
class Lives:
    """The `lives` of the generations that are drawn, and the fitness changes from parent to child over all generations.

    `parents` has the predecessor of a drawn life: the same agent a generation earlier, or its parent; where generations
    are left out, the nearest such ancestor that is drawn. `changes` are by kind of mutation and, for hyperparameters,
    also by name.
    """

    lives: Sequence[Stage]
    parents: Mapping[Key, Stage]
    changes: Mapping[tuple[str, str], Sequence[float]]
    count: int
    """The number of all lives."""


def read_lives(stages: Iterable[Stage], generations: Container[int]) -> Lives:
    """Read all lives, in file order, of which those of some `generations` are drawn."""
    lives: list[Stage] = []
    parents: dict[Key, Stage] = {}
    changes: dict[tuple[str, str], list[float]] = defaultdict(list)
    past: dict[tuple[int | None, int | None], tuple[float | None, Stage | None]] = {}  # Fitness, drawn ancestor.
    for stage in stages:
        survives = (stage.generation - 1, stage.id) in past
        before = (stage.generation - 1, stage.id) if survives else (stage.parent_generation, stage.parent)
        fitness, ancestor = past.get(before, (None, None))
        # Survivors are no children: the elite is the best of its generation, so it regresses further than parents do.
        if not survives and fitness is not None and stage.fitness is not None:
            kind, change = stage.mutation.kind, stage.fitness - fitness
            changes[kind, ""].append(change)
            if kind == "hyperparameters":
                changes[kind, stage.mutation.target].append(change)
        if stage.generation in generations:
            lives.append(stage)
            if ancestor is not None and ancestor.generation < stage.generation:
                parents[stage.generation, stage.id] = ancestor
            ancestor = stage
        past[stage.generation, stage.id] = stage.fitness, ancestor
    return Lives(lives, parents, dict(changes), len(past))


@dataclass(frozen=True)
class Drawn(Lives):
    """A run: its lives, its generations, and the elite's lineage (`winner`) in all generations."""

    name: str
    config: dict[str, Any]
    generations: Sequence[GenerationRow]
    winner: Sequence[Stage]
    summary: dict[str, Any]

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
        if self.setting("evaluation.fitness") != "training":
            return f"{self.score_name} in evaluation"
        return f"{self.score_name} in training" if self.is_training_return else self.score_name

    @property
    def is_training_return(self) -> bool:
        """True if fitness is the mean return in training, neither shifted nor, after few episodes, of evaluation."""
        return all(self.train_returns.get((life.generation, life.id)) == life.fitness for life in self.lives)

    @cached_property
    def path(self) -> Sequence[Stage]:
        """The elite's lineage in the generations that are drawn."""
        drawn = {life.generation for life in self.lives}
        return [life for life in self.winner if life.generation in drawn]

    @cached_property
    def train_returns(self) -> dict[Key, float]:
        """The mean return of an agent's training episodes in a generation, where there were any."""
        return {
            (row.generation, id): value
            for row in self.generations
            for id, value in zip(row.agents, row.train_return, strict=False)
            if value is not None
        }

    @cached_property
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

    @cached_property
    def pairs(self) -> list[Pair]:
        """The means of every island's best agent and of its twin's; empty without a comparison that can be read."""
        try:
            pairs = [(pair["evolved"], pair["control"]) for pair in self.summary["comparison"]["pairs"]]
            return PAIRS.validate_python(pairs, strict=True)
        except (KeyError, TypeError, ValueError):
            return []

    @property
    def described_best(self) -> str:
        """The best agent's mean ± standard error and number of episodes, as text."""
        return (
            "–"
            if self.best is None
            else self.best.described(fresh=self.confirms, repeats=self.summary.get("episodes_repeat") is True)
        )

    @property
    def confirms(self) -> bool:
        """True if the best agent's score comes from episodes that did not select it."""
        return bool(self.setting("evaluation.confirmation_episodes") != 0)

    @cached_property
    def use(self) -> Callable[[str, float], float]:
        """The function (name, stored value) -> value that training used; unchanged if the configuration is damaged."""
        try:
            return validate(self.config).effective_value
        except UserError:
            return lambda name, value: value

    @property
    def target(self) -> float | None:
        """The mean return that ends the run, or None; beside twins it is not tested."""
        target = self.setting("training.target_fitness")
        return float(target) if isinstance(target, int | float) and not self.setting("population.control") else None

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
    overview, lineage = read_overview(path), path / LINEAGE
    try:
        generations = [GENERATION.validate_python(row) for row in JsonLines(path / METRICS).rows()]
        count = sum(1 for _ in read_lines(lineage)) if lineage.exists() else 0
        if not generations or not count:
            raise UserError(f"{path}: {NOTHING}")
        numbers, stride = [row.generation for row in generations], -(-count // MOST_LIVES)
        recorded = set(numbers)
        born, elite = generations[-1].elite_generation, overview.elite.get("id")
        drawn = {numbers[0], born, *numbers[(len(numbers) - 1) % stride :: stride]}
        stages = (stage_of(row, lineage) for row in JsonLines(lineage).rows())
        lives = read_lives(stages, recorded & drawn)
        if not lives.lives:
            raise UserError(f"{path}: {NOTHING}")
        winner: list[Stage] = []
        with suppress(UserError):  # A damaged lineage is drawn as far as it goes.
            winner.extend(stage for stage in ancestors(path, born, elite) if stage.generation in recorded)
    except OSError as error:
        raise UserError(reason(error, path)) from error
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: its metrics cannot be read: {on_one_line(str(error))[:200]}") from error
    return Drawn(
        **vars(lives),
        name=path.resolve().name,
        config=overview.config,
        generations=generations,
        winner=winner[::-1],
        summary=overview.summary,
    )


def load_several(paths: Sequence[Path]) -> list[Drawn]:
    """Read several runs, each once, in the order of their first mention; where directories share a name by path."""
    places: dict[Path, Path] = {}
    for path in paths:
        # A run that a shell's pattern names once more would otherwise count as several seeds.
        places.setdefault(path.resolve(), path)
    names = Counter(place.name for place in places)
    return [
        load(path) if names[place.name] == 1 else replace(load(path), name=str(path)) for place, path in places.items()
    ]


def born_by(life: Stage, parent: Stage | None) -> str:
    """Return the kind of mutation that created a life; `none` if it continues the same agent."""
    return "none" if parent is not None and parent.id == life.id else life.mutation.kind
