"""What a disk may hold after a kill or a power failure, told from a log of the calls that changed it.

A kill loses nothing that a call has handed over. A power failure may lose whatever no later fsync covers: the bytes of
a file until that file is synced, and the names in a directory until that directory is, each by itself and in any order.
`World` replays such a log, which call_log.py takes, and knows at each call what a failure would leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Tree = Mapping[str, bytes | None]
"""What lies below a directory, by its path there: the bytes of a file; None is a directory."""


class Node(NamedTuple):
    """A file or a directory, whatever its name."""

    number: int
    is_directory: bool


ROOT = Node(0, True)


class Entries(NamedTuple):
    """Names in a directory that come to lead elsewhere, all at once; None is nowhere."""

    label: str
    node: Node
    names: Mapping[str, Node | None]


class Write(NamedTuple):
    """Bytes that a file takes."""

    label: str
    node: Node
    offset: int
    payload: bytes


class Truncate(NamedTuple):
    """A file that gets another size."""

    label: str
    node: Node
    size: int


class Sync(NamedTuple):
    """An fsync: what the file or directory holds by now lasts."""

    label: str
    node: Node


Change = Write | Truncate
Call = Entries | Change | Sync


def torn(call: Change) -> Change:
    """Tear a write: only the first half of its bytes arrives."""
    return call._replace(payload=call.payload[: len(call.payload) // 2]) if isinstance(call, Write) else call


def zeros(call: Change) -> Change:
    """Blank a write: only its size arrives."""
    return call._replace(payload=bytes(len(call.payload))) if isinstance(call, Write) else call


UNSYNCED: Mapping[str, Callable[[Sequence[Change]], list[Change]]] = {
    "kept": list,
    "torn": lambda calls: [*calls[:-1], torn(calls[-1])],
    "zeros": lambda calls: [zeros(call) for call in calls],
    "lost": lambda calls: [],
}
"""What a failure may make of the calls on a file since its last fsync."""


class Disk:
    """The directories and files of a disk."""

    def __init__(self) -> None:
        self.entries: dict[Node, dict[str, Node]] = {ROOT: {}}
        self.contents: dict[Node, bytes] = {}

    def copy(self) -> Disk:
        other = Disk()
        other.entries = {node: dict(names) for node, names in self.entries.items()}
        other.contents = dict(self.contents)
        return other

    def apply(self, call: Call) -> None:
        """Do what a call did."""
        if isinstance(call, Entries):
            names = self.entries.setdefault(call.node, {})
            for name, node in call.names.items():
                names.pop(name, None)
                if node is not None:
                    names[name] = node
                    if node.is_directory:
                        self.entries.setdefault(node, {})
        elif isinstance(call, Write):
            before = self.contents.get(call.node, b"").ljust(call.offset, b"\0")
            end = call.offset + len(call.payload)
            self.contents[call.node] = before[: call.offset] + call.payload + before[end:]
        elif isinstance(call, Truncate):
            self.contents[call.node] = self.contents.get(call.node, b"")[: call.size].ljust(call.size, b"\0")

    def walk(self, node: Node = ROOT, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Give all paths below a directory, with what they lead to."""
        for name, found in sorted(self.entries.get(node, {}).items()):
            yield prefix + name, found
            if found.is_directory:
                yield from self.walk(found, f"{prefix}{name}/")

    def tree(self) -> Tree:
        """Read all that it holds."""
        return {path: None if node.is_directory else self.contents.get(node, b"") for path, node in self.walk()}

    def path(self, node: Node) -> str:
        """Find a path that leads to a file or directory; its number where none does."""
        return next((path for path, found in self.walk() if found == node), "" if node == ROOT else f"#{node.number}")


class World:
    """A disk as programs see it, what of it would outlast a power failure, and the calls that might not."""

    def __init__(self) -> None:
        self.now, self.durable = Disk(), Disk()
        self.pending: list[Entries | Change] = []
        self._made = 0

    @classmethod
    def of(cls, tree: Tree) -> World:
        """Make a world in which this tree has been for long."""
        world = cls()
        nodes = {"": ROOT}
        for path, payload in sorted(tree.items()):
            parent, _, name = path.rpartition("/")
            nodes[path] = world.new(payload is None)
            world.apply(Entries("", nodes[parent], {name: nodes[path]}))
            if payload is not None:
                world.apply(Write("", nodes[path], 0, payload))
        for node in nodes.values():
            world.apply(Sync("", node))
        return world

    def new(self, is_directory: bool) -> Node:
        """Make a file or directory that has no name yet."""
        self._made += 1
        return Node(self._made, is_directory)

    def after(self, calls: Sequence[Call]) -> World:
        """Give another world, in which these calls have happened too."""
        other = copy.deepcopy(self)
        for call in calls:
            other.apply(call)
        return other

    def apply(self, call: Call) -> None:
        """Do what a call did."""
        self.now.apply(call)
        if isinstance(call, Sync):
            for synced in (waiting for waiting in self.pending if waiting.node == call.node):
                self.durable.apply(synced)
            self.pending = [waiting for waiting in self.pending if waiting.node != call.node]
            self._forget()
            return
        self.pending.append(call)
        if isinstance(call, Entries):
            self._made = max(self._made, *(node.number for node in call.names.values() if node), 0)

    def after_failures(self) -> Iterator[tuple[str, Tree]]:
        """Give what a power failure might leave now, each with what became of bytes that were not synced.

        Names may last in the order in which they were given, as journals keep it, or one of them alone, or all but one.
        """
        named = [call for call in self.pending if isinstance(call, Entries)]
        count = range(len(named))
        chosen = [tuple(range(number)) for number in range(len(named) + 1)]
        chosen += [(number,) for number in count]
        chosen += [tuple(other for other in count if other != number) for number in count]
        contents = {kind: self._contents(left) for kind, left in UNSYNCED.items()}
        for choice in dict.fromkeys(chosen):
            disk = self.durable.copy()
            for number in choice:
                disk.apply(named[number])
            for kind, files in contents.items():
                disk.contents = files
                yield kind, disk.tree()

    def _contents(self, left: Callable[[Sequence[Change]], list[Change]]) -> dict[Node, bytes]:
        """Give all files' bytes where a failure leaves this of what was not synced."""
        disk = Disk()
        disk.contents = dict(self.durable.contents)
        waiting: dict[Node, list[Change]] = {}
        for call in self.pending:
            if not isinstance(call, Entries):
                waiting.setdefault(call.node, []).append(call)
        for calls in waiting.values():
            for call in left(calls):
                disk.apply(call)
        return disk.contents

    def _forget(self) -> None:
        """Drop calls on what no failure can bring back to light."""
        links: dict[Node, set[Node]] = {node: set(names.values()) for node, names in self.durable.entries.items()}
        for call in self.pending:
            if isinstance(call, Entries):
                links.setdefault(call.node, set()).update(node for node in call.names.values() if node is not None)
        found, ahead = {ROOT}, [ROOT]
        while ahead:
            new = links.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        self.pending = [call for call in self.pending if call.node in found]
