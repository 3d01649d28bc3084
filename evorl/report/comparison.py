"""Figures of several runs together, as plotly reads them."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from evorl.report.compare import MEASURES, Group, points
from evorl.report.figures import STEPS, Figure
from evorl.report.style import GROUPS


def comparison(groups: Sequence[Group], measure: str) -> Figure:
    """Return a measure of groups of runs over steps: each seed's, their mean, and its 95 % interval."""
    traces = [trace for place, group in enumerate(groups) for trace in _traces(group, measure, place)]
    words = MEASURES[measure][0]
    layout = {"xaxis": {"title": {"text": STEPS}}, "yaxis": {"title": {"text": words}}, "legend": {"y": -0.18}}
    return {"data": traces, "layout": layout}


def _traces(group: Group, measure: str, place: int) -> Iterator[Figure]:
    colour = GROUPS[place % len(GROUPS)]
    for run in group.runs:
        steps, values = points(run, measure)
        yield {
            **_line(steps.tolist(), values.tolist(), colour, 1),
            "opacity": 0.45,
            "showlegend": False,
            "name": html.escape(run.name),
            "hovertemplate": "%{fullData.name}: %{y:.1f}<extra></extra>",
        }
    grid, means = group.curve(measure)
    x, count = grid.tolist(), len(group.runs)
    if count > 1 and x:
        low, high = [mean.low for mean in means], [mean.high for mean in means]
        yield {
            **_line(x + x[::-1], high + low[::-1], colour, 0),
            "fill": "toself",
            "fillcolor": _clear(colour),
            "hoverinfo": "skip",
            "showlegend": False,
        }
    yield {
        **_line(x, [mean.mean for mean in means], colour, 3),
        "name": html.escape(f"{group.label} ({count} {'run' if count == 1 else 'runs'})"),
        "hovertemplate": "mean %{y:.1f}<extra></extra>",
    }


def _line(x: Sequence[float], y: Sequence[float | None], colour: str, width: int) -> Figure:
    line: dict[str, Any] = {"color": colour, "width": width}
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": _known(y), "line": line}


def _known(values: Sequence[float | None]) -> list[float | None]:
    """Return values as JSON knows them: it has no NaN."""
    return [None if value is None or value != value else float(value) for value in values]


def _clear(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
