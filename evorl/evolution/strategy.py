"""Search strategies of the user, such as CMA-ES, that choose hyperparameters by ask and tell.

They take the place of the hyperparameter mutation. Axes: N agents, D hyperparameters that have a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evorl.config import Evolution
from evorl.config.errors import shown
from evorl.evolution.mutation import Context, Mutate
from evorl.system.plugins import described, imported
from evorl.types import INITIAL, Agent, Mutation, UserError

KEY = "evolution.strategy"
KIND = "strategy"
"""The kind of mutation recorded for a child whose hyperparameters a strategy has chosen."""
MAX_NAME = 100
"""Maximum characters of the strategy's name in a lineage."""


class Range(NamedTuple):
    """The range of a hyperparameter; a strategy sees it mapped to the unit interval by its scale."""

    min: float
    max: float
    scale: str


class Strategy(Protocol):
    """A search strategy over the unit cube of hyperparameters, sorted by name, each on the scale of its range.

    It is constructed on the main process alone, by calling `evolution.strategy` with the ranges by name, in the order
    of the coordinates, and a seed below 2**32, from which all its randomness must come. Its state is not saved: a
    resumed run constructs it again and repeats all earlier calls of `tell` and `ask`.
    """

    def ask(self, count: int) -> Sequence[Sequence[float]]:
        """Propose `count` settings [N, D]; values beyond the unit interval are clipped to it."""

    def tell(self, settings: Sequence[Sequence[float]], fitness: Sequence[float]) -> None:
        """Learn the fitness [N] of all agents of a generation, and the settings [N, D] that they trained with.

        Both are in the order of the population. An agent without a fitness, because its values became non-finite, is
        given minus infinity.
        """


MakeStrategy = Callable[[Mapping[str, Range], int], Strategy]


class Member(Protocol):
    """The part of an agent, or of its line in the lineage, that a strategy is told."""

    @property
    def id(self) -> int: ...
    @property
    def hyperparameters(self) -> dict[str, float]: ...
    @property
    def fitness(self) -> float | None: ...
    @property
    def mutation(self) -> Mutation: ...


Kind = TypeVar("Kind", bound=Member)
Result = TypeVar("Result")


def load_strategy(name: str) -> MakeStrategy:
    """Import the strategy `package.module:NAME`. Raises UserError if it cannot be imported or called."""
    make: MakeStrategy = imported(KEY, name)
    return make


def mutations_of(settings: Evolution) -> dict[str, Mutate]:
    """Replacements for the mutations that a strategy takes over: they mark a child, whose settings `ask` chooses."""
    if settings.strategy is None:
        return {}
    record = Mutation(KIND, settings.strategy[:MAX_NAME])

    def wait(agent: Agent, context: Context, rng: np.random.Generator) -> Mutation:
        return record

    return {"hyperparameters": wait}


class Tuner:
    """The user's strategy on the main process, in terms of agents. Its errors become UserErrors that quote its line.

    After each generation it first learns the fitness of all agents, and then proposes settings for the new ones.
    """

    def __init__(self, settings: Evolution, seed: int) -> None:
        """Import and make the strategy of these settings. Raises UserError."""
        self._name = settings.strategy or ""
        self._label = self._name[:MAX_NAME]
        self._ranges = dict(sorted((settings.hyperparameters or {}).items()))
        self._newest_told = -1
        make = load_strategy(self._name)
        ranges = {name: Range(one.min, one.max, str(one.scale)) for name, one in self._ranges.items()}
        self._strategy: Strategy = self._called("the constructor", lambda: make(ranges, seed % 2**32))

    def begin(self, agents: Sequence[Agent]) -> None:
        """Give initial agents the hyperparameters that the strategy proposes, in place."""
        for agent in agents:
            agent.mutation = replace(INITIAL, target=self._label)
        self.settle(agents)

    def tell(self, members: Sequence[Member]) -> None:
        """Tell the strategy of a generation that has been evaluated."""
        points = [self._point(member) for member in members]
        fitness = [_comparable(member.fitness) for member in members]
        self._called("tell", lambda: self._strategy.tell(points, fitness))
        self._newest_told = max((member.id for member in members), default=self._newest_told)

    def settle(self, agents: Sequence[Agent]) -> None:
        """Give the children that drew the strategy's mutation the hyperparameters that it proposes, in place."""
        waiting = self._new(agents)
        for agent, chosen in zip(waiting, self._chosen(len(waiting)), strict=True):
            agent.hyperparameters |= chosen

    def catch_up(self, generations: Iterable[Sequence[Member]], agents: Sequence[Member]) -> bool:
        """Repeat the calls of `ask` and `tell` of these generations, and the `ask` for `agents`, which follow them.

        Returns False if the strategy now proposes other settings, because it is not a function of its seed and of the
        calls.
        """
        same = True
        for members in generations:
            same &= self._repeated(members)
            self.tell(members)
        return self._repeated(agents) and same

    def _repeated(self, members: Sequence[Member]) -> bool:
        new = self._new(members)
        return self._chosen(len(new)) == [{name: one.hyperparameters.get(name) for name in self._ranges} for one in new]

    def _new(self, members: Sequence[Kind]) -> list[Kind]:
        """The members that the strategy chose settings for since it was last told of any."""
        kinds = (INITIAL.kind, KIND)
        return [
            one
            for one in members
            if one.id > self._newest_told and one.mutation.kind in kinds and one.mutation.target == self._label
        ]

    def _chosen(self, count: int) -> list[dict[str, float]]:
        """The hyperparameters that the strategy chooses for `count` agents; `ask` is not called if that is 0."""
        if not count:
            return []
        given = self._called("ask", lambda: self._strategy.ask(count))
        points = self._called("ask", lambda: _points(given, (count, len(self._ranges))))
        return [
            {name: one.at(float(share)) for (name, one), share in zip(self._ranges.items(), point, strict=True)}
            for point in points
        ]

    def _point(self, member: Member) -> list[float]:
        """A member's hyperparameters [D] in the unit cube."""
        try:
            return [one.share_of(member.hyperparameters[name]) for name, one in self._ranges.items()]
        except KeyError as error:
            raise UserError(f"{KEY}: agent {member.id} of the lineage has no hyperparameter {error}") from error

    def _called(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:  # User code may raise anything.
            raise UserError(f"{KEY}: {what} of {self._name!r}: {described(error)}") from error


def _points(given: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    """The points [N, D] that a strategy returned, clipped to the unit cube. Raises ValueError if they are invalid."""
    points = np.asarray(given, dtype=np.float64)
    if points.shape != shape or not np.isfinite(points).all():
        raise ValueError(f"returned {shown(given)}; it must return {shape[0]} lists of {shape[1]} finite numbers")
    return points.clip(0.0, 1.0)


def _comparable(fitness: float | None) -> float:
    return -math.inf if fitness is None or math.isnan(fitness) else fitness
