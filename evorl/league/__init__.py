"""A league: agents of the population and frozen past agents that play each other in two-player games."""

from evorl.league.league import League, league_of

__all__ = ["League", "league_of"]
