"""The progress of a run, as its checkpoints hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.runs.elite import Elite, Number
from evorl.system.provenance import made_with
from evorl.types import UserError


@dataclass
class Progress:
    """The progress of a run. `generation` is the last one that was recorded, 0 before the first.

    The last fields say how its newest checkpoint was made; `replay` is whether that holds all parts of the replay.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    generation: Number = 0
    agent_steps: Number = 0
    global_steps: Number = 0
    next_id: Number = 0
    elite: Elite = field(default_factory=Elite)
    solved: bool = False
    wall_clock_seconds: float = 0.0
    ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    placement: str = "replicated"
    vectorization: str | None = None
    replay: bool = True
    shortened_by: Number | None = None
    """The `training.max_steps` that left the last generation fewer steps than the others have, if any did."""
    drifts: Number = 0
    """Generations after which ranks that should have held the same agents did not, and took those of rank 0."""
    made_with: dict[str, str] = field(default_factory=dict)

    def note_setup(self, config: AnyConfig, placement: Placement) -> None:
        """Note what a resumed run must share to be bit-exact."""
        self.ranks, self.placement = placement.ranks.size, placement.kind
        self.vectorization = config.environment.vectorization
        self.made_with = made_with(placement.ranks.device)

    def is_solved(self, config: AnyConfig) -> bool:
        """Return whether the target is reached, which may have been raised since."""
        target, bound = config.training.target_fitness, self.elite.lower_bound
        return self.solved and target is not None and bound is not None and bound >= target

    def moved(self, config: AnyConfig, placement: Placement) -> bool:
        """Return whether the environments were shared out among ranks, or vectorised, otherwise than here."""
        here = placement.ranks.size, placement.kind, config.environment.vectorization
        return (self.ranks, self.placement, self.vectorization) != here

    def changes_of_setup(self, config: AnyConfig, placement: Placement) -> Iterator[str]:
        """Yield in words what has changed since the setup was noted."""
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


PROGRESS = TypeAdapter(Progress)


def progress_of(payload: bytes, where: str) -> Progress:
    """Return the progress in a checkpoint's `state.json`; errors say `where` it is. Raises UserError."""
    try:
        return PROGRESS.validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
