"""The lineages of living agents, from which the curves of agents are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from evorl.runs.trackers.record import AgentRecord, Record


class Node(NamedTuple):
    """An agent in one generation, which ended at environment step `step`."""

    generation: int
    step: int
    agent: AgentRecord


RECENT = 50
"""The number of newest generations of which all agents are kept, since they may still become parents; of older
generations only ancestors are kept."""


class Paths:
    """The agents so far, by id. The curve of an agent begins with that of its ancestors.

    Agents without descendants are dropped, so memory grows with the number of generations, not of agents.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, list[Node]] = {}
        self._living: list[int] = []

    def add(self, record: Record) -> None:
        """Add a generation."""
        for agent in record.agents:
            drawn = replace(agent, hyperparameters={}, architectures={})
            self._nodes.setdefault(agent.id, []).append(Node(record.generation, record.step, drawn))
        self._living = [agent.id for agent in record.agents]
        if record.generation % RECENT == 0:
            self._forget(record.generation - RECENT)

    def living(self) -> dict[int, list[Node]]:
        """Return the lineage of each agent of the newest generation, from an initial agent to itself."""
        return {agent: self._path(agent) for agent in self._living}

    def parent(self, node: Node) -> Node | None:
        """Return the parent of an agent in the generation in which the child was created, or None if not known."""
        before = node.agent.parent_generation or node.generation - 1
        older = [one for one in self._nodes.get(node.agent.parent or 0, ()) if one.generation <= before]
        return older[-1] if node.agent.parent is not None and older else None

    def _forget(self, generation: int) -> None:
        """Drop nodes up to `generation` that have no descendants in later generations."""
        kept: dict[int, int] = {}  # The newest generation needed of each agent.
        for nodes in self._nodes.values():
            node: Node | None = nodes[-1]
            if nodes[-1].generation <= generation:
                continue
            while node is not None and kept.get(node.agent.id, 0) < node.generation:
                kept[node.agent.id] = node.generation
                node = self.parent(self._nodes[node.agent.id][0])
        self._nodes = {
            id: [node for node in nodes if node.generation <= kept[id]]
            for id, nodes in self._nodes.items()
            if id in kept
        }

    def _path(self, agent: int) -> list[Node]:
        path: list[Node] = []
        own = self._nodes[agent]
        while own:
            path = own + path
            parent = self.parent(own[0])
            own = [] if parent is None else [one for one in self._nodes[parent.agent.id] if one.step <= parent.step]
        return path


def thinned(path: list[Node], most: int) -> list[Node]:
    """Return at most `most` evenly spaced nodes of a path, including the last one."""
    stride = -(-len(path) // most)
    return path[(len(path) - 1) % stride :: stride]
