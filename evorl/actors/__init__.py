"""Actor processes: they act for the learner of their rank and send it what they did, through memory that they share."""

from evorl.actors.actors import Actors

__all__ = ["Actors"]
