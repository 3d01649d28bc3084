"""The paths of living agents through their ancestors: what curves of agents are made of."""

from __future__ import annotations

from typing import NamedTuple

from evorl.runs.trackers.record import AgentRecord, Record


class Node(NamedTuple):
    """An agent in one generation, which ended at `step`."""

    generation: int
    step: int
    agent: AgentRecord


class Paths:
    """All agents so far, by their ids. An agent that was born late has a curve all the same: that of its ancestors."""

    def __init__(self) -> None:
        self._nodes: dict[int, list[Node]] = {}
        self._living: list[int] = []

    def add(self, record: Record) -> None:
        """Add a generation."""
        for agent in record.agents:
            self._nodes.setdefault(agent.id, []).append(Node(record.generation, record.step, agent))
        self._living = [agent.id for agent in record.agents]

    def living(self) -> dict[int, list[Node]]:
        """Return the path of each agent of the newest generation, from an initial agent to itself."""
        return {agent: self._path(agent) for agent in self._living}

    def parent(self, node: Node) -> Node | None:
        """Return the parent of an agent as it was when the child was made of it, if it is known."""
        before = node.agent.parent_generation or node.generation - 1
        older = [one for one in self._nodes.get(node.agent.parent or 0, ()) if one.generation <= before]
        return older[-1] if node.agent.parent is not None and older else None

    def _path(self, agent: int) -> list[Node]:
        path: list[Node] = []
        own = self._nodes[agent]
        while own:
            path = own + path
            parent = self.parent(own[0])
            own = [] if parent is None else [one for one in self._nodes[parent.agent.id] if one.step <= parent.step]
        return path


def thinned(path: list[Node], most: int) -> list[Node]:
    """Return at most so many nodes of a path, evenly spaced, with its last one."""
    stride = -(-len(path) // most)
    return path[(len(path) - 1) % stride :: stride]
