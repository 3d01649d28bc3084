"""Rendezvous: the ranks of one launch attempt find each other in a store that outlives attempts.

Launchers count restarts separately (`TORCHELASTIC_RESTART_COUNT` differs between hosts once a host has joined or left),
and entries of dead attempts stay in the store. The main process therefore draws a name for the attempt, and declares it
begun once every rank has answered under that name with a name of its own.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Protocol

POLL = 0.02
"""Polling interval of the store in seconds."""
CURRENT, LAUNCH = "evorl/attempt", "evorl/launch"


class Store(Protocol):
    """A key-value store shared by all ranks."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def meet(store: Store, rank: int, size: int, mine: dict[str, Any], timeout: float) -> tuple[str, list[dict[str, Any]]]:
    """Return the attempt's name and the self-description of each of its ranks.

    `mine` is this rank's JSON description. Raises TimeoutError if not all ranks arrive within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    own = uuid.uuid4().hex
    answer = json.dumps({"own": own, "says": mine})
    if rank == 0:
        store.set(CURRENT, own)
        everyones = [json.loads(answer)] + [_answer(store, own, other, deadline) for other in range(1, size)]
        store.set(f"{own}/begun", json.dumps(everyones))
        return own, [one["says"] for one in everyones]
    answered = ""
    while time.monotonic() < deadline:
        if store.check([CURRENT]):
            name = store.get(CURRENT).decode()
            if name != answered:
                # The name may be a dead attempt's, which never begins: then a newer name will replace it.
                store.set(f"{name}/{rank}", answer)
                answered = name
            if store.check([f"{name}/begun"]):
                everyones = json.loads(store.get(f"{name}/begun"))
                if len(everyones) == size and everyones[rank]["own"] == own:
                    return name, [one["says"] for one in everyones]
        time.sleep(POLL)
    raise TimeoutError("the main process did not begin")


def launch_name(store: Store) -> str:
    """Return the name of the launch, common to all its attempts while its store lives."""
    return store.compare_set(LAUNCH, "", uuid.uuid4().hex).decode()


def _answer(store: Store, name: str, rank: int, deadline: float) -> dict[str, Any]:
    while not store.check([f"{name}/{rank}"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} did not come")
        time.sleep(POLL)
    answer: dict[str, Any] = json.loads(store.get(f"{name}/{rank}"))
    return answer
