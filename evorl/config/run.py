"""The sections of the configuration on a run: environment, evaluation, league, length, trackers, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from evorl.config.fields import (
    Count,
    Finite,
    Importable,
    Plain,
    Seconds,
    Section,
    Size,
    Text,
    UserPath,
    Weight,
    from_home,
)
from evorl.types.messages import shown

THEN = ", then "
"""Stands in `run.branch_of` between the origin of a run and that of its branch."""


class RunSettings(Section):
    """The run's directory, and how its processes compute and wait."""

    name: Plain | None = None
    """The run's directory below `directory`; without it each run gets a fresh one."""
    directory: UserPath = Path("runs")
    """The folder of runs."""
    resume: Literal["never", "auto"] = "never"
    """`auto` resumes from the newest intact checkpoint, if there is one."""
    branch_of: Plain | None = None
    """The run and the generation that a run goes on from, as `evorl branch` notes them; those of a run that is a branch
    itself come before."""
    timeout: Seconds = 300.0
    """Seconds that a rank waits for the others before it gives up. Sharded ranks first meet at a generation's end,
    which slower ones must reach within this time."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of each rank; an actor has one. Null is OMP_NUM_THREADS if that is set and no launcher
    of several processes sets it; else an equal share of the machine's cores, also with each actor, but at most one for
    each agent if the C++ kernel computes the network; an equal share if agents see images of more than 64 x 64 pixels;
    else 1."""
    kernel: Literal["auto", "graph", False] = "auto"
    """On a CPU, compute hidden layers, heads and optimiser steps by C++ that the machine's compiler builds on first use
    (some seconds; kept in ~/.cache/evorl). False, or a machine without a C++ compiler: by torch. `graph` also
    replays updates of evorl's algorithms on a GPU as CUDA graphs, unless other ranks hold the same agents; that has not
    been run on a GPU yet."""

    @field_validator("name")
    @classmethod
    def _stays_below(cls, value: str | None) -> str | None:
        if value is not None and (not Path(value).parts or ".." in Path(value).parts or Path(value).is_absolute()):
            raise ValueError(f"{shown(value)} would not lie below run.directory; use a plain name")
        return value


class Environment(Section):
    """The environment that agents are trained in, and how it is stepped and seen."""

    id: Importable = "LunarLander-v3"
    """A name that Gymnasium knows, or `package.module:NAME`, a name, class or function of a module of your own."""
    num_envs: Size = 8
    """Copies for each agent on each process that steps environments: a rank, or an actor."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment. They count as the same task, so the file's target still applies."""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """`auto` takes the environment's own vector implementation where it has one, else `sync`."""
    observation_indices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """The indices of the entries of a vector observation that agents see; null: all."""
    life_loss_ends: bool = False
    """Atari: training episodes end with each life. Returns and evaluation count whole games. After a lost life FIRE
    is pressed, as it is in resets, where the game's actions include it."""
    carry_over: Literal["auto"] | bool = "auto"
    """Continue episodes from one generation to the next; a resumed run replays them, except those of actors. `auto`
    does so unless a generation has twice as many steps of each environment as the longest episode that the environment
    allows, or `actors.lockstep` is set."""


def _with_id(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


class EvaluationEnvironment(Section):
    """Settings of `environment` that differ in evaluation, where rewards are shaped in training only, say."""

    id: Importable | None = None
    """Another environment with the same observations and actions; null is that of training."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments; those of training that are not named here stay, unless `id` is another environment."""


class Evaluation(Section):
    """The evaluation of agents, in episodes without exploration."""

    fitness: Literal["evaluation", "training"] = "evaluation"
    """`training`: an agent's fitness is the mean return of its training episodes, with exploration, and only the best
    agent and the elite are evaluated. In a generation in which an agent has fewer than `episodes` of them, all agents
    are evaluated. Not in games."""
    episodes: Size = 10
    """Episodes that make an agent's fitness, over all ranks; the same ones for all agents of a generation, but for the
    moves that a run's agent samples in games, and for a simulator of your own or an environment that is registered with
    a `vector_entry_point` alone, which take one seed for all copies."""
    environment: Annotated[EvaluationEnvironment | None, BeforeValidator(_with_id)] = None
    """The environment of evaluation episodes, also of videos and `evorl evaluate`, where it is not that of training.
    An id alone is short for a section with it. Not in games."""
    max_steps: Count | None = None
    """Truncate evaluation episodes after this many steps, and matches after this many moves of both seats together;
    without it the environment decides."""
    confirmation_episodes: Annotated[int, Field(ge=0, le=2**20)] = 60
    """The maximum number of fresh episodes in which the best agent of a generation challenges the elite, since the best
    of several noisy means is biased upwards. The winner's score is the mean over separate episodes, `episodes` more in
    each generation until there are as many. The test of the target may use eight times this number in a generation, or,
    with more than four agents, twice this number for each agent. 0 decides and scores by the generation's
    `episodes`, so scores are biased upwards."""

    @model_validator(mode="after")
    def _confirms_by_more(self) -> Self:
        if 0 < self.confirmation_episodes < self.episodes:
            raise ValueError(
                f"confirmation_episodes: {self.confirmation_episodes} are fewer than the {self.episodes} of `episodes` "
                f"that they are to confirm; use at least {self.episodes}, or 0 for none"
            )
        return self


class LeagueSettings(Section):
    """Matchmaking and archive of the league in a two-player game; other environments have none."""

    matchmaking: Text = "pfsp"
    """The choice of an opponent for each environment and generation: `pfsp` prefers those that the agent loses to
    (prioritised fictitious self-play, Vinyals et al. 2019), `uniform` takes all alike, from the population and the
    archive; `population` takes the population alone, and `latest` the agent itself. All are as they were when the
    generation began."""
    learn_from: Literal["own", "both"] = "own"
    """`own`: the agent plays one seat of each environment and learns from that seat's turns. `both`: with `latest`, it
    plays both seats and learns from the turns of both, which doubles the experience of a game. The value of the next
    turn is then the other seat's and counts negatively, so this requires zero-sum games in which seats move in turn,
    perfect information and feed-forward networks; and a `train_return` adds what each seat gained by its own moves."""
    archive: Annotated[int, Field(ge=0, le=1_024)] = 8
    """The maximum number of frozen past agents. The first always stays, since its rating defines 0; if the archive is
    full, the lowest rated of the others leaves. With 1, each newly archived agent replaces the one before; fitness by
    rating requires 2 or more. In a branch, a lower limit takes effect when the next agent is archived."""
    margin: Annotated[float, Field(ge=-0.5, le=0.5)] = 0.05
    """A generation's best agent is archived if its mean result against the archive, from 0 to 1, is above a half by
    this much. With -0.5 every generation's best agent is archived, as fictitious play needs: there the average of all
    past agents matters, and the newest may well lose to some."""
    benchmark: Annotated[Plain, AfterValidator(from_home)] = "random"
    """The opponent in evaluation episodes; with `evolution.fitness: rating` the elite's score and the target are mean
    results against it. `random`; the directory of a run, whose best agent samples its moves; or
    `package.module:player`, a function that takes an observation and its action mask (or None) and returns a move.
    Such a function should be deterministic, or runs cannot be repeated. A run's agent is read when training begins or
    resumes, for which another path may be given; a resumed run warns if it has changed since. `evorl evaluate` uses the
    same opponent."""
    games: Annotated[int, Field(ge=2, le=10_000, multiple_of=2)] = 8
    """Games of each pair of agents in a generation's evaluation, on the same seeds for all pairs, half from either
    seat. Agents act in them as at the end of training, not greedily."""


class Training(Section):
    """The length of a run, and when it ends early."""

    max_steps: Count = 1_000_000
    """Environment steps of each agent, over all ranks. The last generation has as many as are left, in whole rollouts;
    less than a tenth of a generation is left untrained. A shipped file's number is for its own environment."""
    target_fitness: Finite | None = None
    """The mean fitness at which the run ends, once the elite's is above it with 95 % confidence, over the whole run and
    for every distribution of returns that are not below the worst return of the run, or 0 if that is lower; with
    `evaluation.confirmation_episodes: 0`, once a mean is above it. Null sets none. The
    target in a file is for its own environment; in another one it is the reward threshold that Gymnasium has there.
    With `evolution.fitness: rating` it is a mean result, above 0 and below 1."""


class Tracking(Section):
    """Experiment trackers, which record a run in addition to its own files."""

    backends: tuple[Text, ...] = ("wandb",)
    """`wandb`, `tensorboard` and `trackio`: one, a list of them, or none."""
    project: Text = "evorl"
    """W&B and Trackio: the project that the run is in. W&B's entity, group, job type, notes and tags are what its own
    variables say: WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_JOB_TYPE, WANDB_NOTES and WANDB_TAGS. It is online if there is a
    key, unless WANDB_MODE says otherwise."""
    video: bool = False
    """Film an episode of each new best agent, up to 5,000 steps of it: `videos/` in the run's directory, and W&B shows
    it. Needs the extra `video`."""
    exclude: tuple[Text, ...] = ()
    """Settings that are not sent to trackers, by their paths, such as `environment.kwargs` or
    `environment.kwargs.token`; all others are sent. Those that agents carry, such as `algorithm.learning_rate` and
    `network.hidden_sizes`, cannot be left out."""

    @field_validator("backends", mode="before")
    @classmethod
    def _one_or_none(cls, value: Any) -> Any:
        if value in ("none", None, False):
            return ()
        return (value,) if isinstance(value, str) and "," not in value else value


class Checkpoint(Section):
    """The checkpoints that a run can be resumed from."""

    keep: Size = 2
    """The number of newest checkpoints that stay; that of the generation with the best agent stays too."""
    max_replay_mb: Weight = 1024.0
    """Replays larger than this many MB, over all ranks, are not saved, and a resumed run is then not bit-exact. A
    million frames of Atari take 7,100."""
    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Also save within a generation, at this interval; null saves there only when a signal ends the run. Not with
    actors."""
