"""Evolve a population of reinforcement-learning agents on every process that Accelerate starts."""

__version__ = "0.1.0"
