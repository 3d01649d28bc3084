"""The progress of a run, as a checkpoint's `state.json` keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evorl.config import AnyConfig
from evorl.distributed import Placement
from evorl.kernels.library import usable_kernel
from evorl.league.rating import Standings
from evorl.runs.agents.elite import Elite
from evorl.system.files import digest
from evorl.system.processes import made_with
from evorl.types.agents import Number, Words
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError

Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Position:
    """Progress within a generation: the vector steps that each rank has done, and the seconds they took.

    `seconds` are those of the parts of the loop.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    steps: Annotated[list[Number], Field(min_length=1, max_length=1_000_000)]
    training_seconds: Seconds = 0.0
    seconds: Annotated[dict[Words, Seconds], Field(max_length=100)] = field(default_factory=dict)


@dataclass
class Island:
    """The state of one island's evolution.

    `selection_began` is the first generation that selection followed, or None before it; `rank_correlation` that of its
    agents' ranks in the last generation with those in the one before, where it is used.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    selection_began: Number | None = None
    rank_correlation: Annotated[float, Field(ge=-1.01, le=1.01)] | None = None


@dataclass
class Progress:
    """The progress of a run. `generation` is the last one recorded, 0 before the first.

    `ranks`, `placement`, `vectorization` and `made_with` describe the setup at the newest checkpoint; `replay` is True
    if that contains all parts of the replay.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    generation: Number = 0
    agent_steps: Number = 0
    global_steps: Number = 0
    evaluation_steps: Number = 0
    """The steps of all agents in evaluation, matches included."""
    next_id: Number = 0
    elite: Elite = field(default_factory=Elite)
    solved: bool = False
    wall_clock_seconds: Seconds = 0.0
    ranks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    placement: Words = "replicated"
    vectorization: Words | None = None
    replay: bool = True
    shortened_by: Number | None = None
    """The `training.max_steps` that cut the last generation short, or None."""
    islands: list[Island] = field(default_factory=lambda: [Island()])
    pairs: list[tuple[float | None, float | None]] = field(default_factory=list)
    """The comparison of every island with its twin, once the steps are used up."""
    drifts: Number = 0
    """The number of generations after which replicas differed between ranks and took the agents of rank 0."""
    benchmark: Words = ""
    """The SHA-256 of the agent of `league.benchmark`, or "" if that is no run."""
    league: Standings | None = None
    """Of a game: payoff matrix, ratings and archive, whose agents have a file of their own."""
    made_with: Annotated[dict[Words, Words], Field(max_length=100)] = field(default_factory=dict)
    position: Position | None = None
    """Of a checkpoint within a generation: how far that is."""

    def __post_init__(self) -> None:
        self.archive: bytes = b""
        """The agents of the league's archive, encoded; empty without any."""

    @classmethod
    def of_new_run(cls, config: AnyConfig) -> Progress:
        """The progress of a run before its first generation."""
        population = config.population
        return cls(next_id=population.agents, islands=[Island() for _ in range(population.islands)])

    @property
    def selection_began(self) -> int | None:
        """The first generation that selection followed in all islands, or None before it."""
        began = [island.selection_began for island in self.islands if island.selection_began is not None]
        return max(began) if len(began) == len(self.islands) else None

    @property
    def rank_correlation(self) -> float | None:
        """The mean of the islands' correlations of ranks, or None."""
        values = [island.rank_correlation for island in self.islands if island.rank_correlation is not None]
        return sum(values) / len(values) if values else None

    def copy(self) -> Progress:
        """A snapshot of the fields of `state.json` alone, without the agents of the elite and the archive."""
        return replace(self, elite=replace(self.elite))

    def note_setup(self, config: AnyConfig, placement: Placement) -> None:
        """Record the setup that must be unchanged for a resume to be bit-exact."""
        self.ranks, self.placement = placement.ranks.size, placement.kind
        self.vectorization = config.environment.vectorization
        self.made_with = _made_with(config, placement)

    def is_solved(self, config: AnyConfig) -> bool:
        """True if the configuration's target, which may have changed since the checkpoint, is reached."""
        return (self.solved or not self.measured_otherwise(config)) and self.elite.has_reached(config)

    def measured_otherwise(self, config: AnyConfig) -> bool:
        """True if the elite's returns are of other episodes than the configuration's: see `_episodes_of_elite`."""
        return any(self.made_with.get(name, now) != now for name, now in _episodes_of_elite(config).items())

    def moved(self, config: AnyConfig, placement: Placement) -> bool:
        """True if ranks, placement, vectorisation or the kind of device differ from the recorded setup."""
        here = placement.ranks.size, placement.kind, config.environment.vectorization, placement.ranks.device.type
        return (self.ranks, self.placement, self.vectorization, self.device) != here

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: they have different random generators, and agents are grouped into stacks differently."""
        return "cpu" if self.made_with.get("device", "cpu") == "cpu" else "cuda"

    def regrouped(self, placement: Placement) -> bool:
        """True if ranks held other parts of the population or of the replay than they do now."""
        return (self.ranks, self.placement) != (placement.ranks.size, placement.kind)

    def changes_of_setup(self, config: AnyConfig, placement: Placement) -> list[str]:
        """A description of each change since the setup was recorded."""
        now = Progress()
        now.note_setup(config, placement)
        settings = {
            "the number of ranks": (self.ranks, now.ranks),
            "the placement": (self.placement, now.placement),
            "environment.vectorization": (self.vectorization, now.vectorization),
            **{name: (value, now.made_with.get(name)) for name, value in self.made_with.items()},
        }
        return [f"{name} changed from {was} to {value}" for name, (was, value) in settings.items() if was != value]


def _made_with(config: AnyConfig, placement: Placement) -> dict[str, str]:
    """The conditions of bit-exact results, by name: versions, machine, precision, executor, episodes of evaluation."""
    kernel = usable_kernel(config.run.kernel) if placement.ranks.device.type == "cpu" else None
    return made_with(placement.ranks.device) | {
        "precision": "bfloat16" if config.network.bf16 else "float32",
        "run.kernel": "torch" if kernel is None else kernel.digest,
        **_episodes_of_elite(config),
    }


def _episodes_of_elite(config: AnyConfig) -> dict[str, str]:
    """The settings on which the elite's returns depend, by name: their length, their environment, and whether they are
    fresh or have selected it.

    Of the environment's settings, which may be secret, only a digest is here: metrics and pages have these values too.
    """
    evaluation = config.evaluation
    environment = "null"
    if evaluation.environment is not None:
        environment = f"{evaluation.environment.id} {digest(evaluation.environment.model_dump_json().encode())[:12]}"
    return {
        "evaluation.max_steps": json.dumps(evaluation.max_steps),
        "evaluation.environment": on_one_line(environment, 1_000),
        "evaluation.confirmation_episodes": "above 0" if evaluation.confirmation_episodes else "0",
    }


PROGRESS = TypeAdapter(Progress)


def progress_of(payload: bytes, where: str) -> Progress:
    """Parse a checkpoint's `state.json`; errors name it as `where`. Raises UserError if it is invalid."""
    try:
        progress = PROGRESS.validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        key = on_one_line(".".join(map(str, first["loc"])), 200)
        raise UserError(f"{where}: {key}: {on_one_line(first['msg'], 200)}") from error
    saved = json.loads(payload)
    for prefix, section, kind in (("", saved, Progress), ("elite.", saved.get("elite", {}), Elite)):
        for attribute in fields(kind):
            # Defaults describe a new run, and would be wrong for one that has been trained.
            if attribute.name not in section:
                raise UserError(f"{where}: lacks {prefix}{attribute.name}, which every checkpoint of this version has")
    return progress
