"""The paths of living agents through their ancestors: what curves of agents are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from evorl.runs.trackers.record import AgentRecord, Record


class Node(NamedTuple):
    """An agent in one generation, which ended at `step`."""

    generation: int
    step: int
    agent: AgentRecord


RECENT = 50
"""Generations whose agents may still have children: all of them are kept, of older ones only ancestors."""


class Paths:
    """The agents so far, by their ids. An agent that was born late has a curve all the same: that of its ancestors.

    Agents that left no descendants are forgotten, so memory grows with generations and not with all agents.
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
        """Return the path of each agent of the newest generation, from an initial agent to itself."""
        return {agent: self._path(agent) for agent in self._living}

    def parent(self, node: Node) -> Node | None:
        """Return the parent of an agent as it was when the child was made of it, if it is known."""
        before = node.agent.parent_generation or node.generation - 1
        older = [one for one in self._nodes.get(node.agent.parent or 0, ()) if one.generation <= before]
        return older[-1] if node.agent.parent is not None and older else None

    def _forget(self, generation: int) -> None:
        """Forget nodes up to a generation from which no agent descends that has lived since."""
        kept: dict[int, int] = {}  # The newest generation that is needed of each agent.
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
    """Return at most so many nodes of a path, evenly spaced, with its last one."""
    stride = -(-len(path) // most)
    return path[(len(path) - 1) % stride :: stride]
