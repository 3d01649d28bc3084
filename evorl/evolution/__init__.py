"""Evolution of the population: selection and mutation."""

from evorl.evolution.mutation import MUTATIONS, Context, mutate
from evorl.evolution.selection import SELECTIONS, NextAgent, evolve

__all__ = ["MUTATIONS", "SELECTIONS", "Context", "NextAgent", "evolve", "mutate"]
