"""Evolution of the population: selection and mutation."""

from evorl.evolution.mutation import MUTATIONS, Context, mutate
from evorl.evolution.selection import SELECTIONS, Offspring, evolve

__all__ = ["MUTATIONS", "SELECTIONS", "Context", "Offspring", "evolve", "mutate"]
