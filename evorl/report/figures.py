"""Plotly figures of one run, and of several that are compared: traces and a layout.

Text from a run's files is HTML-escaped here. `$ink` stands for the text colour, which the page sets by its colour
scheme.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from evorl.report.data import Drawn, born_by
from evorl.report.statistics import POINTS, Effect, Group, cut_off, extent, points
from evorl.runs.reading.lineage import Stage, changing
from evorl.system.console import digits
from evorl.tracking.tracker import thinned

Figure = dict[str, Any]
INK = "$ink"
STEPS = "environment steps of each agent"
BEST = "best agent so far"
LEGEND = 56
"""The maximum number of characters in a line of a legend; more would not fit 500 pixels."""


class Look(NamedTuple):
    """The style of a kind of mutation: label, colour, plotly `symbol` and matplotlib `marker`."""

    words: str
    colour: str
    symbol: str
    marker: str


PLAIN = Look("no mutation", "#98a2ad", "circle", "o")
LOOKS = {
    "none": PLAIN,
    "initial": PLAIN,
    "hyperparameters": Look("hyperparameters", "#0072b2", "diamond", "D"),
    "architecture": Look("architecture", "#e69f00", "square", "s"),
    "parameters": Look("parameters (noise)", "#cc79a7", "triangle-up", "^"),
    "activation": Look("activation", "#009e73", "star", "*"),
}
GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of groups of runs, used cyclically: the colour-blind-safe palette of Okabe & Ito 2008."""


def look(kind: str) -> Look:
    """Return the style of a kind of mutation; user-defined kinds share a separate style."""
    return LOOKS.get(kind, Look(kind, "#56b4e9", "cross", "X"))


def returns(run: Drawn) -> Figure:
    """Plot the fitness of all agents over steps, coloured by mutation, with the elite's lineage."""
    if run.is_rated:
        return _by_agent(run, lambda life: life.fitness, run.fitness_name)
    levels = [] if run.target is None else [run.target]
    scores = [row.elite_fitness for row in run.generations]
    figure = _by_agent(run, lambda life: life.fitness, html.escape(run.fitness_name), [*scores, *levels])
    figure["data"].append(_elite(run))
    figure["layout"]["shapes"] = [_level(level) for level in levels]
    return figure


def training(run: Drawn) -> Figure | None:
    """Plot the agents' mean return in training episodes; None where that is their fitness, or none is known."""
    if run.is_training_return or not run.train_returns:
        return None
    return _by_agent(run, lambda life: run.train_returns.get((life.generation, life.id)), "mean return in training")


def _by_agent(
    run: Drawn, value: Callable[[Stage], float | None], label: str, others: Sequence[float | None] = ()
) -> Figure:
    """Plot a value of all agents over steps, coloured by mutation, with the elite's lineage.

    Where the axis cuts failed agents off, it still reaches the `others`, which are drawn too.
    """
    layout = _axes(STEPS, label)
    if (cut := cut_off(map(value, run.lives))) is not None:
        drawn = (*map(value, (*run.lives, *run.winner)), *others)
        _, top = extent([number for number in drawn if number is not None and number >= cut.fence]) or (None, None)
        corner = {"xref": "paper", "yref": "paper", "x": 1, "y": 0, "xanchor": "right", "yanchor": "bottom"}
        layout["annotations"] = [{"text": cut.words, "showarrow": False, **corner}]
        layout["yaxis"] |= {"range": (cut.fence, top)}
    return {"data": [*_lives(run, value), _winner(run, value)], "layout": layout}


def pairs(run: Drawn) -> Figure | None:
    """Plot the best agents of every island and of its twin, joined by a line; None where there are no twins."""
    if not run.pairs:
        return None
    numbers = [str(island) for island in range(len(run.pairs))]
    layout = {**_axes("island", html.escape(run.score_name)), "height": 300}
    layout["xaxis"] |= {"type": "category"}
    x = [x for number in numbers for x in (number, number, None)]
    y = [y for pair in run.pairs for y in (*pair, None)]
    joined = _scatter(x, y, hoverinfo="skip", showlegend=False, line={"color": PLAIN.colour})
    ends = zip(("evolved", "without evolution"), GROUPS, zip(*run.pairs, strict=True), strict=False)
    marks = [
        _scatter(
            numbers, list(means), "markers", name=name, marker={"color": colour, "size": 9}, hovertemplate="%{y:.4~r}"
        )
        for name, colour, means in ends
    ]
    return {"data": [joined, *marks], "layout": layout}


def results(run: Drawn) -> Figure | None:
    """Plot the elite's mean result against the league's benchmark over steps, where agents are rated."""
    if not run.is_rated:
        return None
    shapes = [] if run.target is None else [_level(run.target)]
    layout = {**_axes(STEPS, "mean result"), "shapes": shapes, "height": 260, "showlegend": False}
    return {"data": [_elite(run)], "layout": layout}


def _elite(run: Drawn) -> Figure:
    """The score of the best agent so far, over steps."""
    rows = thinned([row for row in run.generations if row.elite_fitness is not None], POINTS)
    return _scatter(
        [row.agent_steps for row in rows],
        [row.elite_fitness for row in rows],
        "lines" if len(rows) > 1 else "markers",
        name="best so far" + (", on fresh episodes" if run.confirms else ""),
        line={"color": INK, "width": 1, "dash": "dot", "shape": "hv"},
        marker={"color": INK, "symbol": "x-thin", "size": 10, "line": {"color": INK, "width": 1.5}},
        hoverinfo="skip",
    )


def schedule(run: Drawn) -> Figure | None:
    """Plot each hyperparameter that changed over steps: the elite's lineage, on top of what all other agents tried.

    Those that changed in the lineage come first. Returns None if none changed in any agent.
    """
    winner, steps = thinned(run.winner, POINTS), run.steps
    in_winner = changing(run.winner)
    names = sorted(changing([*run.winner, *run.lives]), key=lambda name: name not in in_winner)
    if not names:
        return None
    keys = {(life.generation, life.id) for life in run.winner}
    others = [life for life in run.lives if (life.generation, life.id) not in keys]
    traces: list[Figure] = []
    layout: Figure = {"grid": {"rows": len(names), "columns": 1, "pattern": "independent"}}
    for row, name in enumerate(names, start=1):
        number = "" if row == 1 else str(row)
        axes: Figure = {"xaxis": f"x{number}", "yaxis": f"y{number}", "showlegend": row == 1}
        traces.append(
            _scatter(
                [steps[life.generation] for life in others],
                [value_of(life, name, run) for life in others],
                "markers",
                name="all other agents",
                marker={"color": PLAIN.colour, "size": 7, "opacity": 0.75},
                **_hover(others, run, "y+text"),
                **axes,
            )
        )
        x = [0] * bool(winner) + [steps[life.generation] for life in winner]
        y = [value_of(life, name, run) for life in [*winner[:1], *winner]]
        # A mutation takes effect at the start of its generation.
        line = {"color": INK, "width": 2.5, "shape": "vh"}
        traces.append(_scatter(x, y, name="the winner and its ancestors", line=line, **axes))
        values = [value for life in [*winner, *run.lives] if (value := value_of(life, name, run)) is not None]
        layout[f"yaxis{number}"] = {"title": {"text": html.escape(name)}, "automargin": True, **_scale(values)}
        layout[f"xaxis{number}"] = {"title": {"text": STEPS if row == len(names) else ""}}
    layout["height"] = 130 + 150 * len(names)
    return {"data": traces, "layout": layout}


def tree(run: Drawn) -> Figure | None:
    """Plot the family tree: a column of agents per drawn generation, children near their parents; None without any."""
    parents, lanes = run.parents, _lanes(run)
    if all(parent.id == id for (_, id), parent in parents.items()):
        return None
    edges: dict[Look, list[tuple[Stage, Stage]]] = {}
    for life in run.lives:
        if (parent := parents.get((life.generation, life.id))) is not None:
            edges.setdefault(look(born_by(life, parent)), []).append((parent, life))
    traces = [_edges(kind, pairs, lanes) for kind, pairs in edges.items()]
    line = {"color": INK, "width": 4}
    traces.append(_scatter(*_at(run.path, lanes), name="the winner's path", hoverinfo="skip", line=line))
    fitness = [life.fitness for life in run.lives if life.fitness is not None]
    marker = {
        "size": 11,
        "colorscale": "Cividis",
        "color": [life.fitness for life in run.lives],
        "cmin": cut.fence if (cut := cut_off(fitness)) else min(fitness, default=0),
        "cmax": max(fitness, default=1),
        "line": {"color": INK, "width": 1},
        "symbol": [look(born_by(life, parents.get((life.generation, life.id)))).symbol for life in run.lives],
        "colorbar": {"title": {"text": "fitness", "side": "right"}, "thickness": 12, "len": 0.9},
    }
    agents = _scatter(*_at(run.lives, lanes), "markers", showlegend=False, marker=marker, **_hover(run.lives, run))
    traces.append(agents)
    layout = _axes("generation", "")
    layout["yaxis"] |= {"showticklabels": False, "showgrid": False, "zeroline": False}
    layout["xaxis"] |= {"showgrid": False, "zeroline": False, **_whole(run)}
    return {"data": traces, "layout": {**layout, "dragmode": "pan"}, "zooms": True}


def effects_figure(effects: Sequence[Effect]) -> Figure | None:
    """Plot the fitness changes of each kind of mutation, with their mean and its confidence interval.

    Returns None if there are no effects.
    """
    if not effects:
        return None
    traces: list[Figure] = []
    names = []
    for effect in effects:
        kind, mean = look(effect.kind), effect.interval
        name = html.escape(f"{'· ' if effect.target else ''}{effect.target or kind.words} (n={mean.number})")
        names.append(name)
        marker: Figure = {"color": kind.colour, "symbol": kind.symbol}
        drawn, faint = thinned(sorted(effect.changes), POINTS), {**marker, "size": 7, "opacity": 0.5}
        hover = "%{x:+.4~r}<extra></extra>"
        traces.append(_scatter(drawn, [name] * len(drawn), "markers", marker=faint, hovertemplate=hover))
        spread = None if mean.high is None else mean.high - mean.mean
        bar = {"type": "data", "array": [spread], "color": INK, "thickness": 1.5, "visible": spread is not None}
        marker |= {"size": 12, "line": {"color": INK, "width": 1}}
        traces.append(
            _scatter([mean.mean], [name], "markers", marker=marker, error_x=bar, hovertemplate=f"mean {hover}")
        )
    layout = _axes("change of fitness from parent to child", "")
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True}
    means = [effect.interval.mean for effect in effects]
    values = [*means, *chain.from_iterable(effect.changes for effect in effects)]
    layout["xaxis"] |= {"zeroline": True, "range": extent(values)}
    return {"data": traces, "layout": {**layout, "showlegend": False, "height": 110 + 46 * len(effects)}}


def comparison(groups: Sequence[Group]) -> Figure:
    """Plot the best agent over steps for each group: every seed, their mean, and its 95 % confidence interval."""
    traces = [trace for number, group in enumerate(groups) for trace in _traces(group, number)]
    layout = _axes(STEPS, BEST)
    layout["yaxis"] |= {"range": extent([score for group in groups for score in group.scores()])}
    lines = sum(trace["name"].count("<br>") + 1 for trace in traces if "showlegend" not in trace)
    layout |= {"height": 420 + 10 * lines}
    return {"data": traces, "layout": layout}


def _lives(run: Drawn, value: Callable[[Stage], float | None]) -> list[Figure]:
    """Return one trace per kind of mutation, with a line from each life's predecessor to itself."""
    parents, steps = run.parents, run.steps
    drawn: dict[Look, tuple[list[Any], list[Any], list[str], list[int]]] = {}
    for life in run.lives:
        parent = parents.get((life.generation, life.id))
        kind = look(born_by(life, parent))
        x, y, words, sizes = drawn.setdefault(kind, ([], [], [], []))
        for stage in (parent, life):
            if stage is not None:
                x.append(steps[stage.generation])
                y.append(value(stage))
                words.append(_about(stage, run))
                # The parent has a mark of its own; an agent without one has no line to be seen by.
                sizes.append(0 if stage is parent else 5 if kind == PLAIN and parent is not None else 8)
        x.append(None)
        y.append(None)
        words.append("")
        sizes.append(0)
    order = list(dict.fromkeys(LOOKS.values()))
    return [
        _scatter(
            x,
            y,
            "lines+markers",
            name=html.escape(kind.words),
            hovertext=words,
            hoverinfo="text",
            opacity=0.7 if kind == PLAIN else 0.95,
            line={"color": kind.colour, "width": 1.2 if kind == PLAIN else 1.8},
            connectgaps=False,
            marker={"color": kind.colour, "symbol": kind.symbol, "size": sizes},
        )
        for kind in [*order, *drawn.keys() - set(order)]
        if kind in drawn
        for x, y, words, sizes in [drawn[kind]]
    ]


def _winner(run: Drawn, value: Callable[[Stage], float | None]) -> Figure:
    kinds = [look(born_by(life, before)) for before, life in zip([None, *run.path], run.path, strict=False)]
    marker = {
        "color": [kind.colour for kind in kinds],
        "symbol": [kind.symbol for kind in kinds],
        "size": 10,
        "line": {"color": INK, "width": 1.5},
    }
    x, y = [run.steps[life.generation] for life in run.path], [value(life) for life in run.path]
    named = {"name": "the winner's path", "line": {"color": INK, "width": 3}, "marker": marker}
    return _scatter(x, y, "lines+markers", **named, **_hover(run.path, run))


def _edges(kind: Look, pairs: Sequence[tuple[Stage, Stage]], lanes: Mapping[tuple[int, int], float]) -> Figure:
    x: list[Any] = []
    y: list[Any] = []
    for parent, child in pairs:
        x += [parent.generation, child.generation, None]
        y += [lanes[parent.generation, parent.id], lanes[child.generation, child.id], None]
    line = {"color": kind.colour, "width": 1 if kind == PLAIN else 2}
    return _scatter(x, y, name=html.escape(kind.words), line=line, hoverinfo="skip", opacity=0.8)


def _at(lives: Sequence[Stage], lanes: Mapping[tuple[int, int], float]) -> tuple[list[int], list[float]]:
    return [life.generation for life in lives], [lanes[life.generation, life.id] for life in lives]


def _lanes(run: Drawn) -> dict[tuple[int, int], float]:
    """Return the vertical position of each life, ordered in each generation by the parents' to reduce crossings."""
    parents = run.parents
    lanes: dict[tuple[int, int], float] = {}
    for generation in sorted({life.generation for life in run.lives}):
        living = [life for life in run.lives if life.generation == generation]

        def above(life: Stage) -> tuple[float, int]:
            parent = parents.get((life.generation, life.id))
            return (lanes[parent.generation, parent.id] if parent else 0.0, life.id)

        for rank, life in enumerate(sorted(living, key=above)):
            lanes[life.generation, life.id] = rank - (len(living) - 1) / 2
    return lanes


def _about(life: Stage, run: Drawn) -> str:
    fitness = "none" if life.fitness is None else digits(life.fitness)
    trained = run.train_returns.get((life.generation, life.id))
    in_training = "" if trained is None else f", return in training {digits(trained)}"
    shapes = [f"{name}: {' · '.join(map(str, one.hidden_sizes))}" for name, one in life.architectures.items()]
    made = "" if life.parent is None else f", from #{life.parent}"
    who, born = (
        f"agent #{life.id}{made}, generation {life.generation}",
        str(life.mutation.with_effective_values(run.use)),
    )
    lines = [who, born, f"fitness {fitness}{in_training}", *shapes]
    return "<br>".join(html.escape(line[:120]) for line in lines)


def _hover(lives: Sequence[Stage], run: Drawn, info: str = "text") -> Figure:
    return {"hovertext": [_about(life, run) for life in lives], "hoverinfo": info}


def value_of(life: Stage, name: str, run: Drawn) -> float | None:
    """Return the value of a hyperparameter as training used it, or None if the agent has none of this name."""
    value = life.hyperparameters.get(name)
    return None if value is None else run.use(name, value)


def _level(value: float) -> Figure:
    line = {"color": "#009e73", "width": 1.5, "dash": "dash"}
    label = {"text": f"target {value:g}", "textposition": "start", "font": {"color": INK}, "yanchor": "bottom"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line, "label": label}


def spans_a_decade(values: Sequence[float]) -> bool:
    """True if values are drawn on a logarithmic axis: they are positive and their ratio is at least 10."""
    low, high = min(values), max(values)
    return low > 0 and high >= 10 * low


def _scale(values: Sequence[float]) -> Figure:
    """Return the settings of an axis: logarithmic if the values span a decade, with ticks far enough apart to read."""
    low, high = min(values), max(values)
    if not spans_a_decade(values):
        return {"type": "linear", "nticks": 5, "exponentformat": "none"}
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if high < 40 * low else (1,)
    stride = max(1, (last - first) // 4)
    ticks = [step * 10.0**power for power in range(first, last + 1, stride) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _whole(run: Drawn) -> Figure:
    """Return the settings of an axis of generations: its range, and ticks at whole numbers only, at most eleven."""
    first, last = run.generations[0].generation, run.generations[-1].generation
    sizes = (size * 10**power for power in range(16) for size in (1, 2, 5))
    step = next(size for size in sizes if (last - first) / size <= 10)
    margin = max(0.5, 0.02 * (last - first))
    return {"range": [first - margin, last + margin], "tick0": 0, "dtick": step, "tickformat": ",d"}


def _scatter(x: Sequence[Any], y: Sequence[Any], mode: str = "lines", **more: Any) -> Figure:
    """A trace of plotly through points, with its other settings."""
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **more}


def _axes(x: str, y: str) -> Figure:
    # A run of one generation would have fractions of a step otherwise.
    return {
        "xaxis": {"title": {"text": x}, "rangemode": "tozero" if x == STEPS else "normal"},
        "yaxis": {"title": {"text": y}},
    }


def _traces(group: Group, number: int) -> Iterator[Figure]:
    colour = GROUPS[number % len(GROUPS)]
    for run in group.runs:
        steps, scores = points(run)
        named = {"name": html.escape(run.name), "hovertemplate": "%{fullData.name}: %{y:.4~r}<extra></extra>"}
        yield _line(steps.tolist(), scores.tolist(), colour, 1, opacity=0.45, showlegend=False, **named)
    grid, means = group.curve()
    x = grid.tolist()
    if means and means[0].low is not None:
        low, high = [mean.low for mean in means], [mean.high for mean in means]
        filled = {"fill": "toself", "fillcolor": _clear(colour), "hoverinfo": "skip", "showlegend": False}
        yield _line(x + x[::-1], high + low[::-1], colour, 0, **filled)
    name = "<br>".join(map(html.escape, textwrap.wrap(group.title.replace(" runs)", "\u00a0runs)"), LEGEND)))
    yield _line(x, [mean.mean for mean in means], colour, 3, name=name, hovertemplate="mean %{y:.4~r}<extra></extra>")


def _line(x: Sequence[float], y: Sequence[float | None], colour: str, width: int, **more: Any) -> Figure:
    if len(x) < 2:  # A line through one point is invisible.
        more |= {"mode": "markers", "marker": {"color": colour, "size": 9}}
    return _scatter(list(x), list(y), line={"color": colour, "width": width}, **more)


def _clear(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
