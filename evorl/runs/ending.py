"""The end of a run: in one word, with its reason, and as `summary.json` has it."""

from __future__ import annotations

from typing import Any

from evorl.config import AnyConfig
from evorl.config.errors import on_one_line
from evorl.distributed import Ranks
from evorl.runs.agents.comparison import comparison_of, episodes_of
from evorl.runs.storage.progress import Progress
from evorl.system.plugins import described
from evorl.system.signals import Interrupted
from evorl.types.outcomes import FINISHED, STOPPED, RunFailed, UserError


def summary_of(progress: Progress, config: AnyConfig, ranks: int, ended: str, because: str) -> dict[str, Any]:
    """The summary for `summary.json` and the trackers.

    `progress` is that of the last recorded generation. `ended` is one word from `end_of`, `because` the reason or "".
    """
    score = progress.elite.score
    return {
        "solved": None if config.training.target_fitness is None else progress.solved,
        "best_fitness": score.mean if score else None,
        "best_fitness_std": score.std if score else None,
        "best_fitness_episodes": score.episodes if score else 0,
        "best_fitness_lower_bound": progress.elite.lower_bound,
        "episodes_repeat": bool(progress.elite.repeats),
        "generations": progress.generation,
        "global_steps": progress.global_steps,
        "agent_steps": progress.agent_steps,
        "evaluation_steps": progress.evaluation_steps,
        "wall_clock_seconds": progress.wall_clock_seconds,
        "ranks": ranks,
        "comparison": comparison_of(progress.pairs, episodes_of(config)) if progress.pairs else None,
        "ended": ended,
        "because": because or None,
    }


def end_of(error: BaseException | None, unsaved: str, stopped: str = "") -> str:
    """The end of a run: `finished`, `stopped`, `unsaved`, or the name of the signal or exception."""
    if error is None:
        return "unsaved" if unsaved else STOPPED if stopped else FINISHED
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    return error.name if isinstance(error, Interrupted) else type(error).__name__


def exchange_reasons(error: BaseException, ranks: Ranks) -> str:
    """Say in one line why a run ends, and publish this rank's reason unless another rank reports the error."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        # A launcher kills all ranks once one has exited, so the reason may be another rank's.
        return ranks.first_reason()
    expected = isinstance(error, UserError | RunFailed)
    because = on_one_line(str(error) if expected else described(error))
    if isinstance(error, UserError) and error.reported_elsewhere:
        return because
    if ranks.end(because) and isinstance(error, UserError) and error.reported_elsewhere is None:
        error.reported_elsewhere = True
    return because
