"""Figures and a table of several runs, as plotly and the page read them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from evorl.report.compare import MEASURES, Group, points
from evorl.report.figures import STEPS, Figure
from evorl.report.style import GROUPS


def comparison(groups: Sequence[Group], measure: str) -> Figure:
    """Return a measure of groups of runs over steps: each seed's, their mean, and its 95 % interval."""
    traces: list[Figure] = []
    for place, group in enumerate(groups):
        colour = GROUPS[place % len(GROUPS)]
        for run in group.runs:
            steps, values = points(run, measure)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": steps.tolist(),
                    "y": _known(values.tolist()),
                    "line": {"color": colour, "width": 1},
                    "opacity": 0.45,
                    "showlegend": False,
                    "name": html.escape(run.name),
                    "hovertemplate": "%{fullData.name}: %{y:.1f}<extra></extra>",
                }
            )
        grid, means = group.curve(measure)
        x, count = grid.tolist(), len(group.runs)
        if count > 1 and x:
            low, high = ([getattr(mean, end) for mean in means] for end in ("low", "high"))
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": x + x[::-1],
                    "y": _known(high + low[::-1]),
                    "fill": "toself",
                    "fillcolor": _clear(colour),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
            )
        name = html.escape(f"{group.label} ({count} {'run' if count == 1 else 'runs'})")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": x,
                "y": _known([mean.mean for mean in means]),
                "name": name,
                "line": {"color": colour, "width": 3},
                "hovertemplate": "mean %{y:.1f}<extra></extra>",
            }
        )
    words = MEASURES[measure][0]
    layout = {"xaxis": {"title": {"text": STEPS}}, "yaxis": {"title": {"text": words}}, "legend": {"y": -0.18}}
    return {"data": traces, "layout": layout}


def _known(values: Sequence[Any]) -> list[float | None]:
    return [None if value is None or value != value else float(value) for value in values]


def _clear(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
