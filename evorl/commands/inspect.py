"""`evorl list`, `lineage` and `config`: list runs, print ancestors and configurations."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evorl.commands.command import file_and_assignments
from evorl.runs.reading.hub import is_on_hub
from evorl.runs.reading.read import RunOverview, read_overview
from evorl.runs.storage.directory import CONFIG
from evorl.system.console import aligned, digits
from evorl.system.files import is_locked, size_of
from evorl.types.messages import on_one_line
from evorl.types.outcomes import UserError

if TYPE_CHECKING:
    from evorl.config.docs import Setting
    from evorl.runs.reading.lineage import Stage

WIDEST = 80
"""The maximum number of characters in a cell of `evorl list`, except the run's name."""
RUN_HEADINGS = ("run", "environment", "algorithm", "seed", "best", "steps", "state", "size", "origin")
LINEAGE_HEADINGS = ("agent", "generations", "fitness", "mutation")
TASK_HEADINGS = ("task", "algorithm", "file", "command")


def list_runs(parsed: argparse.Namespace) -> None:
    # The first run creates the default directory; any other directory that does not exist is a mistake.
    absent = parsed.run == Path("runs") and not parsed.run.exists()
    rows = [] if absent else rows_of_runs(parsed.run)
    if not rows:
        print(f"there are no runs in {parsed.run}")
        return
    table = [RUN_HEADINGS, *rows]
    if not any(row[-1] for row in rows):  # All are plain new runs, without an origin.
        table = [row[:-1] for row in table]
    print("\n".join(map(on_one_line, aligned(table))))


def rows_of_runs(directory: Path) -> list[tuple[str, ...]]:
    """Return one table row per run in a directory, oldest first, or that of the run itself. Raises OSError.

    A run that was named GROUP/NAME is in a directory of its group.
    """
    if _began(directory) is not None:
        return [_row(directory, directory.resolve().name)]
    inside = [path for path in directory.iterdir() if not path.is_symlink()]
    for group in [path for path in inside if path.is_dir() and _began(path) is None]:
        with contextlib.suppress(OSError):
            inside += [path for path in group.iterdir() if not path.is_symlink()]
    began = sorted((time, path) for path in inside if (time := _began(path)) is not None)
    return [_row(path, path.relative_to(directory).as_posix()) for _, path in began]


def _began(path: Path) -> float | None:
    """Return the modification time of a run's configuration, None if there is no run or if it is not accessible."""
    with contextlib.suppress(OSError):
        if (path / CONFIG).is_file():
            return (path / CONFIG).stat().st_mtime
    return None


def _row(path: Path, name: str) -> tuple[str, ...]:
    size = f"{size_of(path) / 1e6:,.1f} MB"
    try:
        run = read_overview(path)
    except (UserError, OSError):
        return (name, "?", "?", "?", "-", "-", "cannot be read", size, "")
    best, steps = run.last.get("elite_fitness"), run.last.get("agent_steps")
    cells = (
        _setting(run, "environment", "id"),
        _setting(run, "algorithm", "name"),
        str(run.config.get("seed", "?")),
        digits(best) if isinstance(best, int | float) else "-",
        f"{steps:,}" if isinstance(steps, int) else "-",
        state_of(run),
        size,
        origin_of(run),
    )
    # One very long value would push the columns of all other runs off the screen.
    return name, *(on_one_line(cell, WIDEST) for cell in cells)


def state_of(run: RunOverview) -> str:
    """Return a run's state: `training`, `begun`, `killed`, `solved`, or how its summary says it ended."""
    if is_locked(run.path):
        return "training"
    if not run.summary:
        return "killed" if run.last else "begun"
    ended = "solved" if run.summary.get("solved") is True else run.summary.get("ended")
    return str(ended)


def origin_of(run: RunOverview) -> str:
    """The run that its agents are from; empty for a plain new run."""
    if (begun := _setting(run, "run", "branch_of")) not in ("None", "?"):
        return f"branch of {begun}"
    source = _setting(run, "population", "from")
    if source in ("None", "?"):
        return ""
    return f"agents of {source if is_on_hub(source) else Path(source).name}"


def _setting(run: RunOverview, section: str, key: str) -> str:
    values: Any = run.config.get(section)
    return str(values.get(key, "?")) if isinstance(values, dict) else "?"


def lineage(parsed: argparse.Namespace) -> None:
    from evorl.config import validate
    from evorl.runs.reading.lineage import ancestry, table
    from evorl.runs.storage.directory import load_elite

    stages, use = ancestry(parsed.run), validate(load_elite(parsed.run)[0]).effective_value
    if origin := origin_of(read_overview(parsed.run)):
        print(on_one_line(origin))
    print("\n".join(table(stages, use) if parsed.settings else lineage_table(stages, use)))


def lineage_table(stages: Sequence[Stage], use: Callable[[str, float], float]) -> list[str]:
    """Format one row per agent of a lineage, the initial one first.

    `use` converts stored hyperparameters to the values training uses.
    """
    from evorl.runs.reading.lineage import SAME

    rows: list[tuple[str, ...]] = [LINEAGE_HEADINGS]
    for number, group in groupby(stages, key=lambda stage: stage.id):
        runs_of_series = list(group)
        first, last = runs_of_series[0], runs_of_series[-1]
        lived = f"{first.generation}" if first is last else f"{first.generation} to {last.generation}"
        scores = [stage.fitness for stage in (first, last) if stage.fitness is not None]
        fitness = " to ".join(digits(score) for score in dict.fromkeys(scores)) or "-"
        born = "" if first.mutation == SAME else str(first.mutation.with_effective_values(use))
        rows.append((f"#{number}", lived, fitness, on_one_line(born)))
    return aligned(rows)


def config(parsed: argparse.Namespace) -> None:
    from evorl.config import model_of
    from evorl.config.algorithms import SETTINGS
    from evorl.config.docs import commented, explained, settings_of
    from evorl.runs.configuration import read_config

    if parsed.words and parsed.tasks:
        raise UserError(f"--tasks: is for all configurations; leave out {parsed.words[0]!r}")
    if parsed.tasks:
        print("\n".join(aligned([TASK_HEADINGS, *rows_of_tasks()])))
        return
    complete = read_config(*file_and_assignments(parsed.words))
    settings = settings_of(model_of(type(complete.algorithm)))
    if parsed.explain is not None:

        def has_it(settings: Sequence[Setting]) -> bool:
            return any(f".{each.path}".endswith(f".{parsed.explain}") for each in settings)

        others = [name for name, of_name in SETTINGS.items() if has_it(settings_of(model_of(of_name)))]
        if others and not has_it(settings):
            raise UserError(
                f"--explain: {complete.algorithm.name} has no {parsed.explain}, which is a setting of "
                f"{', '.join(others)}: evorl config {others[0]} --explain {parsed.explain}"
            )
        print("\n".join(explained(settings, parsed.explain, complete)))
        return
    print(commented(complete.model_dump(mode="json"), settings), end="")


def rows_of_tasks() -> list[tuple[str, ...]]:
    """Return one table row per task and shipped configuration for it: task, algorithm, file, command.

    An environment has no row of its own if the file is for its whole suite.
    """
    from evorl.config.task import environment_of, suite_of
    from evorl.config.yaml import TRAINING, read_yaml, shipped_names, tuned_files, tuned_name

    rows, tuned = [], tuned_files()
    for name in shipped_names():
        data = read_yaml(TRAINING / f"{name}.yaml")
        environment, algorithm = environment_of(data), data["algorithm"]["name"]
        tasks = dict.fromkeys([environment, *(tuned[name].tasks if name in tuned else ())])
        whole = {suite_of(task) for task in tasks if task.endswith("/*")}
        for task in (task for task in tasks if task.endswith("/*") or suite_of(task) not in whole):
            by_task = f"evorl train {algorithm} environment={task}"
            command = by_task if tuned_name(algorithm, task) == name else f"evorl train {name}"
            rows.append((task, algorithm, f"{name}.yaml", command))
    return sorted(rows)
