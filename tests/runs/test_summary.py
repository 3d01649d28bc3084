"""How and why a run ended, as its summary and the other ranks have it."""

import signal
from types import SimpleNamespace

import pytest

from evorl.runs.run import end_of, exchange_reasons
from evorl.system.signals import Interrupted
from evorl.types.outcomes import RunFailed, UserError


def exchanged(error):
    """The reason that a rank notes, and those that it leaves to the others."""
    left = []
    ranks = SimpleNamespace(end=left.append, first_reason=lambda: "rank 1: it was lost")
    return exchange_reasons(error, ranks), left


@pytest.mark.parametrize(
    ("error", "because", "left"),
    [
        (UserError("a\nmistake", reported_elsewhere=False), "a\\nmistake", ["a\\nmistake"]),
        (UserError("a mistake"), "a mistake", ["a mistake"]),
        (UserError("a mistake", reported_elsewhere=True), "a mistake", []),
        (RunFailed("lost"), "lost", ["lost"]),
        (ValueError("odd"), "ValueError: odd", ["ValueError: odd"]),
        (Interrupted(signal.SIGTERM), "rank 1: it was lost", []),
    ],
)
def test_reason_of_an_end_is_exchanged_once(error, because, left):
    assert exchanged(error) == (because, left)


def test_summary_ended_is_one_word():
    assert end_of(None, "", "") == "finished"
    assert end_of(None, "the disk is full", "") == "unsaved"
    assert end_of(ValueError("odd"), "the disk is full", "") == "ValueError"
    assert end_of(Interrupted(signal.SIGINT), "", "") == "SIGINT"
