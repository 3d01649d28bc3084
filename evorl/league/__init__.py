"""A league: agents of the population and frozen past agents that play each other in two-player games."""
