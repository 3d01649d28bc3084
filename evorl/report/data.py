"""The data of a run for reports. Its files may be untrusted, so types and sizes are validated here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from evorl.config.errors import on_one_line
from evorl.report.crowd import Crowd, read_crowd
from evorl.report.generation import GENERATION, Generation
from evorl.runs.ancestry import LINE, Stage, reader_of
from evorl.runs.elite import Score
from evorl.runs.history import JsonLines
from evorl.runs.read import read_overview
from evorl.system.files import reason
from evorl.types import UserError

MOST_LIVES = 4_000
"""The maximum number of lives (agents over all generations) drawn individually; beyond it a `Crowd` is drawn."""


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
        return Score(max(1, last.elite_episodes), last.elite_fitness, last.elite_std or 0.0)

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
    lineage, metrics = JsonLines(path / "lineage.jsonl"), JsonLines(path / "metrics.jsonl")
    try:
        rows = list(islice(lineage.rows(), MOST_LIVES + 1))
        if not overview.last or not rows:
            raise UserError(f"{path}: no generation has ended yet, so there is nothing to draw")
        name = path.resolve().name
        if len(rows) > MOST_LIVES:
            generations, crowd = read_crowd(metrics, overview.elite.get("id"))
            return Drawn(name, overview.config, generations, crowd.sample, crowd.path, overview.summary, crowd)
        generations = [GENERATION.validate_python(row) for row in metrics.members(*Generation.__dataclass_fields__)]
        lives = [LINE.validate_python({name: row[name] for name in Stage.__dataclass_fields__}) for row in rows]
    except OSError as error:
        raise UserError(reason(error, path)) from error
    except (ValueError, KeyError, OverflowError) as error:
        raise UserError(f"{path}: its metrics or lineage cannot be read: {on_one_line(str(error))[:200]}") from error
    counted = {row.generation for row in generations}
    lives = [life for life in lives if life.generation in counted]
    drawn = Drawn(name, overview.config, generations, lives, (), overview.summary)
    return replace(drawn, winner=_winner(drawn, overview.elite.get("id", -1)))


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
