"""A self-contained HTML page about a run, which needs no network."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evorl.config.schema import as_yaml
from evorl.report import figures
from evorl.report.data import Drawn
from evorl.report.facts import badges, effect_rows, environment_facts, path_heading, path_rows, run_facts
from evorl.report.statistics import effects
from evorl.system.extras import require

HERE = Path(__file__).parent


def check_packages() -> None:
    """Raise UserError unless the packages of the `report` extra are installed."""
    require("report", "a report")


def page(run: Drawn) -> str:
    """Render the HTML page about a run."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    charts = {name: figure for name, figure in _figures(run).items() if figure is not None}
    return environment.get_template("page.html").render(
        run=_words(run),
        drawn=set(charts),
        style=_literal("page.css"),
        script=_literal("page.js"),
        plotly=_plotly(),
        figures=_markup(embedded(charts)),
    )


def embedded(value: Any) -> str:
    """Encode as JSON that is safe inside a script element: no character in it can close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figures(run: Drawn) -> Mapping[str, figures.Figure | None]:
    return {
        "returns": figures.returns(run),
        "results": figures.results(run),
        "payoff": figures.payoff(run),
        "schedule": figures.schedule(run),
        "tree": figures.tree(run),
        "architectures": figures.architectures(run),
        "effects": figures.effects_figure(effects(run)),
        "correlations": figures.correlations(run),
        "shares": figures.shares(run),
        "speed": figures.speed(run),
    }


def _words(run: Drawn) -> dict[str, Any]:
    return {
        "name": run.name,
        "subtitle": f"{run.setting('algorithm.name')} on {run.setting('environment.id')}",
        "fitness_name": run.fitness_name,
        "badges": badges(run),
        "facts": run_facts(run),
        "versions": environment_facts(run),
        "path": path_rows(run),
        "path_heading": path_heading(run),
        "count": run.count,
        "generations": len({life.generation for life in run.lives}),
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
