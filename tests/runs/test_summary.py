"""How and why a run ended, as its summary and the other ranks have it."""

import signal

from evorl.runs.run import end_of
from evorl.system.signals import Interrupted


def test_summary_ended_is_one_word():
    assert end_of(None, "") == "finished"
    assert end_of(None, "the disk is full") == "unsaved"
    assert end_of(ValueError("odd"), "the disk is full") == "ValueError"
    assert end_of(Interrupted(signal.SIGINT), "") == "SIGINT"
