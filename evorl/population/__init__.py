"""Populations of agents: initialisation, policies, learners and evaluation."""

from evorl.population.initial import check_agents, check_memory, initial_population
from evorl.population.learner import Learner
from evorl.population.policy import Policy

__all__ = ["Learner", "Policy", "check_agents", "check_memory", "initial_population"]
