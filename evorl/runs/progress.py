"""The progress of a run, as stored in its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.distributed import Placement
from evorl.runs.elite import Elite, Number
from evorl.system.processes import made_with
from evorl.types import Agent, UserError, Words


@dataclass
class Progress:
    """The progress of a run. `generation` is the last one recorded, 0 before the first.

    The fields from `ranks` on describe the setup at the newest checkpoint; `replay` is True if that contains all parts
    of the replay.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    generation: Number = 0
    agent_steps: Number = 0
    global_steps: Number = 0
    next_id: Number = 0
    elite: Elite = field(default_factory=Elite)
    solved: bool = False
    wall_clock_seconds: Annotated[float, Field(ge=0)] = 0.0
    ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    placement: Words = "replicated"
    vectorization: Words | None = None
    replay: bool = True
    shortened_by: Number | None = None
    """The `training.max_steps` that cut the last generation short, or None."""
    drifts: Number = 0
    """The number of generations after which replicas differed between ranks and took the agents of rank 0."""
    made_with: Annotated[dict[Words, Words], Field(max_length=100)] = field(default_factory=dict)

    def copy(self) -> Progress:
        """Return an independent snapshot."""
        return replace(self, elite=replace(self.elite))

    def note_setup(self, config: AnyConfig, placement: Placement) -> None:
        """Record the setup that must be unchanged for a resume to be bit-exact."""
        self.ranks, self.placement = placement.ranks.size, placement.kind
        self.vectorization = config.environment.vectorization
        self.made_with = made_with(placement.ranks.device)

    def is_solved(self, config: AnyConfig) -> bool:
        """Return True if the configuration's target is reached; it may have been raised since the checkpoint."""
        target, bound = config.training.target_fitness, self.elite.lower_bound
        return self.solved and target is not None and bound is not None and bound >= target

    def moved(self, config: AnyConfig, placement: Placement) -> bool:
        """Return True if ranks, placement or vectorisation of the environments differ from the recorded setup."""
        here = placement.ranks.size, placement.kind, config.environment.vectorization
        return (self.ranks, self.placement, self.vectorization) != here

    def changes_of_setup(self, config: AnyConfig, placement: Placement) -> Iterator[str]:
        """Yield a description of each change since the setup was recorded."""
        ranks, here, vectorization = placement.ranks.size, placement.kind, config.environment.vectorization
        if self.ranks != ranks:
            yield f"the number of ranks changed from {self.ranks} to {ranks}"
        if self.placement != here:
            yield f"the placement changed from {self.placement} to {here}"
        if self.vectorization not in (None, vectorization):
            yield f"environment.vectorization changed from {self.vectorization} to {vectorization}"
        versions = made_with(placement.ranks.device)
        for name, value in self.made_with.items():
            if value != versions.get(name):
                yield f"{name} changed from {value} to {versions.get(name)}"

    def contradiction(self) -> str | None:
        """Describe an inconsistency between fields, or return None."""
        if (self.elite.generation or 0) > self.generation:
            return f"elite.generation {self.elite.generation} comes after generation {self.generation}"
        if self.agent_steps > self.global_steps:
            return f"agent_steps {self.agent_steps} are more than global_steps {self.global_steps}"
        return None

    def contradicts(self, agents: Sequence[Agent]) -> str | None:
        """Describe why these agents are inconsistent with this progress, or return None."""
        for agent in agents:
            if agent.id >= self.next_id:
                return f"agent {agent.id} is not below next_id {self.next_id}"
            if (agent.parent_generation or 0) > self.generation:
                return f"agent {agent.id} has a parent of generation {agent.parent_generation}, after {self.generation}"
        return None


PROGRESS = TypeAdapter(Progress)


def progress_of(payload: bytes, where: str) -> Progress:
    """Parse a checkpoint's `state.json`; errors name it as `where`. Raises UserError if it is invalid."""
    try:
        progress = PROGRESS.validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        place = on_one_line(".".join(map(str, first["loc"])), 200)
        raise UserError(f"{where}: {place}: {on_one_line(first['msg'], 200)}") from error
    given = json.loads(payload)
    for place, section, kind in (("", given, Progress), ("elite.", given.get("elite", {}), Elite)):
        for each in fields(kind):
            # Defaults describe a new run, and would be wrong for one that has been trained.
            if each.name not in section:
                raise UserError(f"{where}: lacks {place}{each.name}, which every checkpoint of this version has")
    if problem := progress.contradiction():
        raise UserError(f"{where}: {problem}")
    return progress
