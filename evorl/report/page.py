"""A self-contained HTML page about one or several runs, which needs no network."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evorl.config.schema import as_yaml
from evorl.report import figures
from evorl.report.data import Drawn
from evorl.report.facts import (
    badges,
    compared,
    comparison,
    effect_rows,
    environment_facts,
    path_heading,
    path_rows,
    run_facts,
)
from evorl.report.statistics import effects, groups, measures
from evorl.system.extras import require

HERE = Path(__file__).parent


def check_packages() -> None:
    """Raise UserError unless the packages of the `report` extra are installed."""
    require("report", "a report")


def page(runs: Sequence[Drawn]) -> str:
    """Render the HTML page about one or more runs; several are first compared with each other."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    together = groups(runs)
    drawn = {f"compare-{name}": figures.comparison(together, name) for name in measures(runs)} if len(runs) > 1 else {}
    parts = []
    for number, run in enumerate(runs):
        charts = {name: figure for name, figure in _figures(run).items() if figure is not None}
        drawn |= {f"{name}-{number}": figure for name, figure in charts.items()}
        parts.append({"number": number, "figures": set(charts), **_words(run)})
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=parts,
        measures=measures(runs),
        confirmed=all(run.confirms for run in runs),
        compared=compared(together) if len(runs) > 1 else [],
        style=_literal("page.css"),
        script=_literal("page.js"),
        plotly=_plotly(),
        figures=_markup(embedded(drawn)),
    )


def embedded(value: Any) -> str:
    """Encode as JSON that is safe inside a script element: no character in it can close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figures(run: Drawn) -> Mapping[str, figures.Figure | None]:
    return {
        "pairs": figures.pairs(run),
        "returns": figures.returns(run),
        "training": figures.training(run),
        "results": figures.results(run),
        "payoff": figures.payoff(run),
        "schedule": figures.schedule(run),
        "tree": figures.tree(run),
        "effects": figures.effects_figure(effects(run)),
    }


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
        "path_heading": path_heading(run),
        "count": run.count,
        "drawn": len({life.generation for life in run.lives}),
        "thinned": run.count > len(run.lives),
        "effects": effect_rows(effects(run)),
        "config": as_yaml(run.config, allow_unicode=True),
    }


def _literal(name: str) -> Any:
    return _markup((HERE / name).read_text())


def _plotly() -> Any:
    return _markup((importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"))


def _markup(text: str) -> Any:
    """Mark text as safe to insert unescaped: it is not from a run, or has been escaped."""
    import markupsafe

    return markupsafe.Markup(text)
