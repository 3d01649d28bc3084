"""A self-contained HTML page about one or several runs, which needs no network. It escapes all texts of runs."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from evorl.config.schema import as_yaml
from evorl.report import figures
from evorl.report.data import Drawn
from evorl.report.figures import look
from evorl.report.statistics import FEWEST, Effect, Group, Interval, effects, groups, interval
from evorl.runs.agents.comparison import comparison_of, sentence
from evorl.system.console import compact, digits, duration

Fact = tuple[str, str]


def page(runs: Sequence[Drawn]) -> str:
    """Render the HTML page about one or more runs; several are first compared with each other."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    together = groups(runs)
    drawn = {"compare-best": figures.comparison(together)} if len(runs) > 1 else {}
    parts = []
    for number, run in enumerate(runs):
        every = {
            "pairs": figures.pairs(run),
            "returns": figures.returns(run),
            "training": figures.training(run),
            "results": figures.results(run),
            "schedule": figures.schedule(run),
            "tree": figures.tree(run),
            "effects": figures.effects_figure(effects(run)),
        }
        charts = {name: figure for name, figure in every.items() if figure is not None}
        drawn |= {f"{name}-{number}": figure for name, figure in charts.items()}
        parts.append({"number": number, "figures": set(charts), **_words(run)})
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=parts,
        confirmed=all(run.confirms for run in runs),
        compared=compared(together) if len(runs) > 1 else [],
        plotly=(importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
        figures=drawn,
    )


def _words(run: Drawn) -> dict[str, Any]:
    return {
        "name": run.name,
        "subtitle": f"{run.setting('algorithm.name')} on {run.setting('environment.id')}",
        "fitness_name": run.fitness_name,
        "badges": badges(run),
        "comparison": comparison(run),
        "facts": run_facts(run),
        "versions": environment_facts(run),
        "path": path_rows(run),
        "count": run.count,
        "drawn": len({life.generation for life in run.lives}),
        "thinned": run.count > len(run.lives),
        "effects": effect_rows(effects(run)),
        "config": as_yaml(run.config, allow_unicode=True),
    }


def badges(run: Drawn) -> list[tuple[str, str, str]]:
    """Return the headline figures of a run's page, each as (value, caption, note)."""
    last = run.generations[-1]
    best, _, more = run.described_best.partition(" ")
    aim = "no target" if run.target is None else f"target {run.target:g}"
    return [
        (state(run), "state", aim),
        (best, "best agent", more or "no agent yet"),
        (compact(last.agent_steps), "steps of each agent", f"{compact(last.global_steps)} of all"),
        (str(last.generation), "generations", _agents(run)),
        (duration(last.wall_clock_seconds), "wall clock", f"{compact(last.env_steps_per_second)} steps/s at the end"),
    ]


def _agents(run: Drawn) -> str:
    size, islands = run.setting("population.size"), run.setting("population.islands") or 1
    if run.setting("population.control"):
        return f"{islands} x {size} agents in each, and as many twins"
    return f"{islands} x {size} agents in each" if islands != 1 else f"{size} agents in each"


def comparison(run: Drawn) -> str:
    """Return the comparison of evolution with none in words, or "" if a run has none."""
    if not run.pairs:
        return ""
    compared = sentence(comparison_of(run.pairs, 0))
    return f"{compared[0].upper()}{compared[1:]}."


def state(run: Drawn) -> str:
    """Return a run's final state, such as `solved` or `stopped (SIGINT)`."""
    if not run.summary:
        return "not ended"
    if run.summary.get("solved") is True:
        return "solved"
    ended = str(run.summary.get("ended", "unknown"))[:40]
    return f"stopped ({ended})" if ended in Signals.__members__ else ended


def run_facts(run: Drawn) -> list[Fact]:
    """Return the main settings that a run's configuration has, with its ranks and final state."""
    last = run.generations[-1]
    names = (
        ("environment", "environment.id"), ("algorithm", "algorithm.name"), ("agents", "population.size"),
        ("environments of each agent", "environment.num_envs"), ("hidden layers", "network.hidden_sizes"),
        ("seed", "seed"),
        ("steps of a generation", "evolution.steps"), ("selection", "evolution.selection.name"),
        ("evaluation episodes", "evaluation.episodes"), ("branch of", "run.branch_of"),
    )  # fmt: skip
    facts = [(words, str(value)[:80]) for words, path in names if (value := run.setting(path)) is not None]
    return [*facts, ("ranks", f"{last.ranks} ({last.placement})"), ("ended", state(run))]


def environment_facts(run: Drawn) -> list[Fact]:
    """Return the software versions and hardware of a run."""
    # Names with a dot are settings, which are shown with the others.
    made_with = sorted(run.generations[-1].made_with.items())
    return [(name[:40], value[:80]) for name, value in made_with if "." not in name]


def path_rows(run: Drawn) -> list[dict[str, Any]]:
    """Return one row for the first and each new agent of the elite's lineage: generation, agent, fitness, mutation."""
    rows = []
    for before, life in zip([None, *run.winner], run.winner, strict=False):
        if before is not None and before.id == life.id:
            continue
        kind = life.mutation.kind
        changed = "" if kind == "none" else str(life.mutation.with_effective_values(run.use))[:120]
        fitness = "–" if life.fitness is None else digits(life.fitness)
        shown = {"generation": life.generation, "agent": f"#{life.id}", "fitness": fitness, "changed": changed}
        rows.append({**shown, "colour": look(kind).colour, "steps": compact(run.steps[life.generation])})
    return rows


def effect_rows(effects: Sequence[Effect]) -> list[dict[str, Any]]:
    """Return one table row per mutation effect."""
    return [
        {
            "name": effect.target or look(effect.kind).words,
            "colour": look(effect.kind).colour,
            "indented": bool(effect.target),
            "count": effect.interval.number,
            "mean": change(effect.interval.mean),
            "interval": ends(effect.interval, change),
            "improved": f"{100 * effect.improved:.0f} %",
        }
        for effect in effects
    ]


def compared(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one table row per group of runs, with the results of its seeds."""
    rows = []
    for group in groups:
        best = [run.generations[-1].elite_fitness for run in group.runs]
        scores = [value for value in best if value is not None]
        mean = interval(scores) if scores else None
        aims = any(run.target is not None for run in group.runs)
        solved = sum(run.summary.get("solved") is True for run in group.runs)
        rows.append(
            {
                "label": group.label,
                "seeds": ", ".join(str(run.setting("seed")) for run in group.runs),
                "best": "–" if mean is None else digits(mean.mean),
                "interval": "–" if mean is None else ends(mean),
                "names": ", ".join(map(_with_branch, group.runs)),
                "each": ", ".join("–" if value is None else digits(value) for value in best),
                "steps": ", ".join(compact(run.generations[-1].agent_steps) for run in group.runs),
                "solved": f"{solved} of {len(group.runs)}" if aims else "no target",
            }
        )
    return rows


def _with_branch(run: Drawn) -> str:
    """A run's name, and where it began if it is a branch."""
    begun = run.setting("run.branch_of")
    return run.name if begun is None else f"{run.name} (branch of {str(begun)[-160:]})"


def change(value: float) -> str:
    """Format a change of fitness with its sign, also where it is far below 1."""
    return f"+{digits(value)}" if value >= 0 else digits(value)


def ends(mean: Interval, shown: Callable[[float], str] = digits) -> str:
    """Format a confidence interval as "low to high"."""
    return f"n < {FEWEST}" if mean.low is None or mean.high is None else f"{shown(mean.low)} to {shown(mean.high)}"
