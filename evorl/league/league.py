"""The league of a run: who fills the other seats, the payoff matrix, ratings, and the archive of past agents.

Axes: P agents of the population, A of the archive, K = P + A entrants, E environments of each agent.

All ranks hold the same league. Opponents are frozen as they were when the generation began, and each environment keeps
its opponent for the whole generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evorl.algorithms import Algorithm
from evorl.config import AnyConfig
from evorl.config.run import LeagueSettings
from evorl.distributed import Placement
from evorl.envs import SteppedEnvironments
from evorl.league.matches import Arena, Fixture
from evorl.league.players import Players, match_policy
from evorl.league.rating import Standings, expected, opponent_probabilities, ratings, rows
from evorl.population import Policy
from evorl.seeding import numpy_generator, torch_generator
from evorl.system.formats import decode_agents, encode_agents
from evorl.types.agents import Agent

Floats = NDArray[np.float64]


class Rated(NamedTuple):
    """Ratings of a generation: of its agents [P], their standard errors [P] and games [P], and the elite's rating.

    `results` [P] are mean results against all others. The elite's is NaN if there is none.
    """

    ratings: Floats
    errors: Floats
    games: Floats
    results: Floats
    elite: float


class League:
    """The agents that the population plays against. Those in `archive` [A] are frozen; the oldest has rating 0."""

    def __init__(self, config: AnyConfig, placement: Placement, algorithm: Algorithm) -> None:
        self.settings = config.league or LeagueSettings()
        self.standings = Standings()
        self.archive: list[Agent] = []
        self._config, self._placement, self._algorithm = config, placement, algorithm
        self._arena = Arena(config.environment, algorithm.interface, config.evaluation.max_steps)
        self._steps = 0

    def close(self) -> None:
        self._arena.close()

    def pop_steps(self) -> int:
        """Moves of all seats in matches since the last call, over all ranks."""
        steps, self._steps = self._steps, 0
        return steps

    @property
    def payload(self) -> bytes:
        """The archive as a file of agents; empty without any."""
        return encode_agents(self.archive) if self.archive else b""

    def restore(self, standings: Standings, archive: Sequence[Agent]) -> None:
        self.standings, self.archive = standings, list(archive)

    def set_opponents(self, environments: SteppedEnvironments, agents: Sequence[Agent], generation: int) -> None:
        """Fill the other seat of every environment of this rank, for a generation that begins with `agents` [P].

        With `league.learn_from: both` the agents play both seats themselves.
        """
        if self.settings.learn_from == "both":
            environments.play_both_seats()
            return
        pool = [*agents, *self.archive]
        chosen = self._draw(agents, environments.num_envs, generation)
        entrants = sorted({*chosen.tolist()})
        ranks, device = self._placement.ranks, self._placement.ranks.device
        generator = torch_generator(
            self._config.seed, generation=generation, rank=ranks.rank, purpose="opponents", device=device
        )
        policy = Policy([pool[entrant] for entrant in entrants], self._algorithm, generator)
        places = np.searchsorted(entrants, chosen)
        environments.set_opponents(self._players(policy, places))

    def evaluate(self, trained: Sequence[Agent], generation: int, elite: Sequence[Agent] = ()) -> Rated:
        """Let all pairs of `trained` agents [P], archive and `elite` (none or one) play; all ranks share the games.

        All pairs play the same seeds, each from both seats. Results between archived agents are kept.
        """
        entrants = [*trained, *self.archive, *elite]
        first, count = len(trained), len(entrants)
        points, games = np.zeros((count, count)), np.zeros((count, count))
        before, past = self.standings, len(self.archive)
        if past:
            archived = slice(len(before.population), None)
            for matrix, earlier in zip((points, games), before.matrices(), strict=True):
                matrix[first : first + past, first : first + past] = earlier[archived, archived]
        fixtures = self._fixtures(games, generation)
        results = self._results(entrants, fixtures, generation)
        for fixture, result in zip(fixtures, results, strict=True):
            points[fixture.first, fixture.second] += result
            points[fixture.second, fixture.first] += 1 - result
            games[fixture.first, fixture.second] += 1
            games[fixture.second, fixture.first] += 1
        total, played = points.sum(1), games.sum(1)
        mean = np.divide(total, played, out=np.full(count, 0.5), where=played > 0)
        # Without an archive the best agent is about to become its first member, unless its numbers are not finite.
        able = [index for index, agent in enumerate(trained) if agent.fault is None] or range(first)
        anchor = first if past else max(able, key=lambda index: (mean[index], -index))
        elo, errors = ratings(points, games, anchor)
        here = slice(0, first + past)
        self.standings = Standings(
            population=tuple(agent.id for agent in trained),
            archive=before.archive,
            archived=before.archived,
            points=rows(points[here, here]),
            games=rows(games[here, here]),
            ratings=tuple(elo[here].tolist()),
            errors=tuple(errors[here].tolist()),
        )
        of_elite = float(elo[-1]) if elite else np.nan
        return Rated(elo[:first], errors[:first], played[:first], mean[:first], of_elite)

    def admit(self, trained: Sequence[Agent], generation: int) -> bool:
        """Archive the generation's best agent if it beats the archive by the margin; return whether it did.

        The first archived agent stays; beyond the limit the lowest rated of the others leave. In an archive of one the
        new agent replaces the first.
        """
        now, settings = self.standings, self.settings
        first, past = len(now.population), len(now.archive)
        eligible = [index for index, agent in enumerate(trained) if agent.fault is None]
        if not eligible or not settings.archive:
            return False
        best = max(eligible, key=lambda index: (now.ratings[index], -index))
        points, games = now.matrices()
        if past and points[best, first:].sum() < (0.5 + settings.margin) * games[best, first:].sum():
            return False
        remaining = list(range(first + past))
        while len(remaining) - first >= settings.archive:
            rest = remaining[first + 1 :] or remaining[first:]
            remaining.remove(min(rest, key=lambda index: (now.ratings[index], index)))
        self.archive = [self.archive[index - first] for index in remaining[first:]]
        self.archive += decode_agents(encode_agents([trained[best]]), "the archive")
        chosen = [*remaining, best]
        points, games = (matrix[np.ix_(chosen, chosen)] for matrix in (points, games))
        self.standings = Standings(
            population=now.population,
            archive=(*(now.archive[index - first] for index in remaining[first:]), trained[best].id),
            archived=(*(now.archived[index - first] for index in remaining[first:]), generation),
            points=rows(points),
            games=rows(games),
            ratings=tuple(now.ratings[index] for index in chosen),
            errors=tuple(now.errors[index] for index in chosen),
        )
        return True

    def _players(self, policy: Policy, places: NDArray[Any]) -> Players:
        return Players(policy, self._config.environment, self._algorithm.interface, places)

    def _draw(self, agents: Sequence[Agent], num_envs: int, generation: int) -> NDArray[np.intp]:
        """The opponents of this rank's environments, by index in population and archive [P of this rank * E]."""
        result = self._expected(agents)
        placement = self._placement
        copy = placement.copy
        drawn = []
        for index in range(*placement.local.indices(len(agents))):
            # By the agent's index in the whole population, so that its opponents do not depend on the rank it is on.
            rng = numpy_generator(self._config.seed, generation=generation, rank=index, purpose="matchmaking")
            chances = opponent_probabilities(self.settings.matchmaking, result[index], index, len(agents))
            everyones = rng.choice(len(chances), size=(placement.copies, num_envs), p=chances)
            drawn.append(everyones[copy])
        return np.concatenate(drawn).astype(np.intp)

    def _expected(self, agents: Sequence[Agent]) -> Floats:
        """The expected results [P, K] of agents that begin a generation: their parents' where they are new."""
        now = self.standings
        points, games = now.matrices()
        predicted = expected(points, games)
        places = [now.place_of(agent) for agent in agents]
        places += [len(now.population) + index for index in range(len(self.archive))]
        result = np.full((len(agents), len(places)), 0.5)
        for row in range(len(agents)):
            for column, other in enumerate(places):
                if (agent := places[row]) is not None and other is not None:
                    result[row, column] = predicted[agent, other]
        return result

    def _fixtures(self, games: Floats, generation: int) -> list[Fixture]:
        """The games of all pairs that have not played, from both seats on each seed."""
        rng = numpy_generator(self._config.seed, generation=generation, rank=0, purpose="league matches")
        seeds = rng.integers(2**31, size=self.settings.games // 2).tolist()
        pairs = [pair for pair in zip(*np.triu_indices(len(games), 1), strict=True) if games[pair] == 0]
        return [
            Fixture(int(one), int(other), seed) for pair in pairs for seed in seeds for one, other in (pair, pair[::-1])
        ]

    def _results(self, entrants: Sequence[Agent], fixtures: Sequence[Fixture], generation: int) -> Floats:
        """The results of the fixtures for their first seats, on all ranks; each plays every R-th. Counts the steps."""
        ranks = self._placement.ranks
        mine = fixtures[ranks.rank :: ranks.size]
        generator = torch_generator(
            self._config.seed, generation=generation, rank=ranks.rank, purpose="league matches", device=ranks.device
        )
        longest = -(-len(fixtures) // ranks.size)
        # The last column has the steps.
        local = np.full(longest + 1, np.nan)
        if mine:
            policy = match_policy(entrants, self._algorithm, generator)
            local[: len(mine)] = self._arena.play(lambda seats: self._players(policy, np.zeros(seats)), mine)
        local[-1] = self._arena.pop_steps()
        everyones = ranks.gather(local, "the other ranks' matches")
        self._steps += int(everyones[:, -1].sum())
        return np.asarray(everyones[:, :-1].T.reshape(-1)[: len(fixtures)])
