"""Actor processes: they collect experience for their rank's learner and send it through shared memory."""

from evorl.actors.actors import Actors

__all__ = ["Actors"]
