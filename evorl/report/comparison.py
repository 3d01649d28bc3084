"""Plotly figures that compare several runs."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from evorl.report.compare import MEASURES, Group, points
from evorl.report.figures import STEPS, Figure
from evorl.report.style import GROUPS


def comparison(groups: Sequence[Group], measure: str) -> Figure:
    """Plot a measure over steps for each group: every seed, their mean, and its 95 % confidence interval."""
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
    """Replace NaN by None, since JSON has no NaN."""
    return [None if value is None or value != value else float(value) for value in values]


def _clear(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
