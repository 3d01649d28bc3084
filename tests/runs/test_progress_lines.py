"""Lines within a generation: how far it is, how fast, and how long it will take."""

import re

import pytest
from helpers.support import train

from evorl.runs.output.console import progress_line


def test_a_line_says_how_far_a_generation_is_and_how_long_it_will_take():
    assert progress_line(2, 1_500, 10_000, 4, 200.0, "return 22") == (
        "gen 2 | 1.5k of 10k steps (15%) | 200 steps/s of all agents | 3 min left of the generation | return 22"
    )


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_that_nobody_watches_prints_whole_lines(watched, in_directory, monkeypatch, capsys):
    monkeypatch.setattr("evorl.runs.output.logger.LOOKS", 1)
    monkeypatch.setattr("evorl.system.console.Terminal.isatty", lambda terminal: watched)
    monkeypatch.setattr("evorl.runs.output.metrics.INTERVAL", 1e-6)
    assert train("run.name=a") == 0
    said = capsys.readouterr().err
    found = re.findall(
        r"^gen 2 \| \d+ of 40 steps \(\d+%\) \| [\d,]+ steps/s of all agents \| \d+ s left .*$", said, re.M
    )
    assert len(found) == (0 if watched else 19)
    assert ("\r" in said) == watched
    if not watched:
        assert re.search(r"\| return \d", found[-1])
        assert said.count("gen 2 | evaluation\n") == said.count("gen 2/") == 1
