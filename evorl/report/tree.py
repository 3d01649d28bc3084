"""The lines of descent of a long run: the elite's, and those of agents sampled at a few generations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evorl.report.generation import Generation
from evorl.report.lives import Lives

LAST = 40
"""The number of agents of the last generation whose lines are drawn."""
TIMES, EACH = 30, 8
"""The number of earlier generations, and of agents in each, whose lines are drawn."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """Nodes [M] of the lines of descent: roots, forks and leaves. `up` is the index of a node's parent, -1 for roots.

    `id` and `fitness` are those of a node's agent, `generation` and `lane` its position; `trunk` marks the nodes in the
    elite's lineage.
    """

    id: list[int]
    fitness: list[float | None]
    generation: list[int]
    lane: list[float]
    up: list[int]
    trunk: list[bool]


def tree_of(lives: Lives, winner: int, generations: Sequence[Generation]) -> Tree:
    """Return the lines of descent of the elite, and of evenly spaced agents of the last and some earlier generations.

    `winner` is the elite's life, or -1.
    """
    origin, starts = lives.origin, lives.starts
    count = len(starts) - 1
    ends = {winner} - {-1}
    for place in np.unique(np.linspace(0, count - 1, TIMES + 1).astype(int)):
        start, end = starts[place : place + 2]
        ends |= set(np.linspace(start, end - 1, LAST if place == count - 1 else EACH).astype(int).tolist())
    children: dict[int, set[int]] = defaultdict(set)
    for end in sorted(ends):
        life, up = end, int(origin[end])
        while up >= 0 and life not in children[up]:
            known = bool(children[up])
            children[up].add(life)
            if known:
                break
            life, up = up, int(origin[up])
    first = [life for life in set(children) | ends if origin[life] < 0]
    nodes = sorted(ends | set(first) | {life for life, born in children.items() if len(born) > 1})
    at = {life: place for place, life in enumerate(nodes)}
    above = [_next(int(origin[life]), origin, at) for life in nodes]
    trunk, place = [False] * len(nodes), at.get(winner, -1)
    while place >= 0:
        trunk[place] = True
        place = above[place]
    when = lives.generation(np.array(nodes, dtype=np.int64)).tolist()
    return Tree(
        id=lives.id[nodes].tolist(),
        fitness=[None if value != value else value for value in lives.fitness[nodes].tolist()],
        generation=[generations[place].generation for place in when],
        lane=_lanes(above, trunk, when),
        up=above,
        trunk=trunk,
    )


def _next(life: int, origin: Ints, at: dict[int, int]) -> int:
    """Return the nearest node in the lineage of a life, itself included, or -1."""
    while life >= 0 and life not in at:
        life = int(origin[life])
    return at.get(life, -1)


def _lanes(up: Sequence[int], trunk: Sequence[bool], when: Sequence[int]) -> list[float]:
    """Return the lane of each node: 0 on the trunk; other lines take the nearest lanes free over their generations."""
    below: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(up):
        below[parent].append(node)
    lanes = [0.0] * len(up)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    roots = [node for node, parent in enumerate(up) if not trunk[node] and (parent < 0 or trunk[parent])]
    for root in sorted(roots, key=lambda node: when[node]):
        line, leaves, stack = [], [], [root]
        while stack:
            node = stack.pop()
            line.append(node)
            stack += sorted(below[node], reverse=True)
            leaves += [node] if not below[node] else []
        begin, end = when[up[root]] if up[root] >= 0 else when[root], max(when[node] for node in line)
        height = _free(taken, len(leaves), begin, end)
        sign = 1 if height > 0 else -1
        for place, leaf in enumerate(leaves):
            lanes[leaf] = height + sign * place
            taken[height + sign * place].append((begin, end))
        for node in reversed(line):
            if below[node]:
                lanes[node] = sum(lanes[child] for child in below[node]) / len(below[node])
    return lanes


def _free(taken: dict[int, list[tuple[int, int]]], size: int, begin: int, end: int) -> int:
    """Return the lane nearest to the trunk, on either side, from which `size` lanes outwards are free in the period."""
    distance = 1
    while True:
        for sign in (1, -1):
            wanted = [sign * (distance + more) for more in range(size)]
            if not any(first <= end and begin <= last for lane in wanted for first, last in taken[lane]):
                return wanted[0]
        distance += 1
