"""The `actors` section: actor processes for asynchronous algorithms, and their maximum staleness."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from evorl.config.fields import Count, Seconds, Section


class ActorSettings(Section):
    """Processes beside each rank that only act, each in `environment.num_envs` environments for every agent."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Actors of each rank."""
    queue: Annotated[int, Field(ge=1, le=256)] = 2
    """Rollouts of an actor that may wait for the learner or be under way; when all of them do, it waits, too."""
    fetch_steps: Count = 1
    """Steps of each environment after which an actor fetches the learner's parameters, at its next rollout."""
    max_staleness: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Updates by which a rollout's parameters may be behind when it is received; what is older is discarded. Null is
    twice as many as full queues can cause."""
    lockstep: bool = False
    """For tests and debugging: actors take turns with the learner and each other, so that a run can be repeated."""
    timeout: Seconds = 60.0
    """Seconds without a step after which an actor that has something to do is replaced, and seconds without an answer
    after which the process that starts actors is."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6)] = 3
    """Replacements of an actor, or of the process that starts them, one after the other without a rollout in between,
    before the run gives up."""
