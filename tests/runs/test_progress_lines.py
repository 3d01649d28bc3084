"""Lines within a generation: how far it is, how fast, and how long it will take."""

import re

import pytest
from helpers.support import train

from evorl.runs.output.console import ProgressLines


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines_of(advances):
    """What is said after (seconds, steps, recent episodes) and at the evaluation."""
    said, clock = [], Clock()
    progress = ProgressLines(said.append, agents=4, clock=clock)
    progress.begin(2, 0, 10_000)
    for seconds, steps, recent in advances:
        clock.now += seconds
        progress.advance(steps, recent)
    progress.evaluate()
    return said


def test_a_line_comes_every_half_minute_with_the_speed_since_the_last_one():
    assert lines_of([(10, 500, ""), (20, 1000, "return 21"), (29, 100, ""), (1, 200, "return 22")]) == [
        "gen 2 | 1.5k of 10k steps (15%) | 200 steps/s of all agents | 3 min left of the generation | return 21",
        "gen 2 | 1.8k of 10k steps (18%) | 40 steps/s of all agents | 14 min left of the generation | return 22",
        "gen 2 | evaluation",
    ]


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_that_nobody_watches_prints_whole_lines(watched, in_directory, monkeypatch, capsys):
    monkeypatch.setattr("evorl.runs.output.console.LINE_SECONDS", 0.0)
    monkeypatch.setattr("evorl.system.console.Terminal.isatty", lambda terminal: watched)
    monkeypatch.setattr("evorl.runs.output.metrics.INTERVAL", 1e-6)
    assert train("run.name=a") == 0
    said = capsys.readouterr().err
    found = re.findall(
        r"^gen 2 \| \d+ of 40 steps \(\d+%\) \| [\d,]+ steps/s of all agents \| \d+ s left .*$", said, re.M
    )
    assert len(found) == (0 if watched else 20)
    assert ("\r" in said) == watched
    if not watched:
        assert re.search(r"\| return \d", found[-1])
        assert said.count("gen 2 | evaluation\n") == said.count("gen 2/") == 1
