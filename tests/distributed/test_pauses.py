"""Ranks that agree on the step after which all of them pause."""

import threading
import time

import pytest
import torch.distributed as dist

from evorl.distributed import pauses
from evorl.distributed.pauses import SAVE, Pauses

STEPS = 10_000


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(pauses, "PAUSE_INTERVAL", 0.01)
    monkeypatch.setattr(pauses, "PATIENCE", 20.0)


def ranks(size, together=True):
    store = dist.HashStore()
    return [Pauses(store, rank, size, 5.0, together=together) for rank in range(size)]


def train(pause, asks, seconds, found, barrier=None):
    """Train until paused for a signal, asking for a pause in the steps `asks`; `barrier` is a collective of each."""
    pause.begin(0, STEPS)
    for step in range(STEPS):
        time.sleep(seconds)
        if barrier is not None:
            barrier.wait(10)
        paused = pause.reached(step + 1, asks.get(step + 1))
        if paused is None or paused:
            found.append((step + 1, paused, pause.reason))
        if paused is None or (paused and pause.reason != SAVE):
            break
    pause.leave()
    pause.close()


def together(each, *arguments, barrier=None):
    found = [[] for _ in each]
    for pause in each:  # A rank that has not begun would not pause.
        pause.begin(0, STEPS)
    threads = [
        threading.Thread(target=train, args=(pause, *own, mine, barrier))
        for pause, own, mine in zip(each, arguments, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_one_rank_pauses_at_once():
    pause, found = Pauses(None, 0, 1, 5.0, together=True), []
    train(pause, {3: SAVE, 7: 15}, 0.0, found)
    assert found == [(3, True, SAVE), (7, True, 15)]


@pytest.mark.parametrize("asks", [({20: 15}, {}), ({}, {20: 15}), ({20: 15}, {23: 15}), ({10: SAVE, 60: 2}, {})])
def test_ranks_of_different_speed_pause_after_the_same_step(asks):
    first, second = together(ranks(2), (asks[0], 0.001), (asks[1], 0.003))
    assert first == second
    assert all(paused for _, paused, _ in first)
    assert first[-1][2] == max(number for own in asks for number in own.values())


def test_ranks_that_meet_in_each_step_pause_together():
    barrier = threading.Barrier(3)
    first, second, third = together(ranks(3), ({}, 0.001), ({15: 15}, 0.001), ({}, 0.001), barrier=barrier)
    assert first == second == third
    assert first[0][1:] == (True, 15)


def test_ranks_on_their_own_pause_each_after_its_step():
    first, second = together(ranks(2, together=False), ({50: 15}, 0.001), ({}, 0.01))
    assert first == [(50, True, 15)]
    assert second[0][0] < 50


def test_nobody_pauses_where_a_rank_trains_no_steps():
    one, other = ranks(2)
    found = []
    train(one, {5: SAVE}, 0.001, found)
    assert found == [(5, None, SAVE)]
    other.close()


def test_a_rank_that_is_dead_is_not_waited_for_at_a_signal(monkeypatch):
    monkeypatch.setattr(pauses, "PATIENCE", 1.0)
    store, found = dist.HashStore(), []
    train(Pauses(store, 0, 2, 5.0, together=True), {5: 15}, 0.001, found)
    assert found == [(5, None, 15)]


@pytest.mark.parametrize("reason", [SAVE, 15])
def test_a_rank_that_answers_too_late_does_not_pause_alone(reason, monkeypatch):
    monkeypatch.setattr(pauses, "PATIENCE", 0.2)
    store, listens = dist.HashStore(), threading.Event()
    punctual, late = (Pauses(store, rank, 2, 0.2, together=False) for rank in range(2))
    look = late._look
    monkeypatch.setattr(late, "_look", lambda answer: look(answer) if listens.is_set() else None)
    for pause in (punctual, late):
        pause.begin(0, STEPS)
    assert punctual.reached(5, reason) is None
    listens.set()
    paused, step = False, 0
    while paused is False:
        time.sleep(0.001)
        step += 1
        paused = late.reached(step)
    assert (paused, late.reason) == (None, reason)
    punctual.close()
    late.close()
