"""Runs that are killed at random moments and resumed, on one and two ranks; the campaign is kills.py."""

import json
import sys

import pytest
from timeline import Undisturbed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness needs pidfd_open and prctl")
FORGETS_DEBT = """
from evorl.runs.run import Run
begin = Run.__init__
def forgetful(self, *arguments):
    begin(self, *arguments)
    for agent in self.agents:
        agent.state.update_debt = 0.0
Run.__init__ = forgetful
"""
PROGRAM = """
import kills
{first}
code = kills.main({arguments})
"""


@pytest.fixture
def kills(tmp_path, forked_launch):
    """Runs kills.py in a process that has imported everything."""

    def main(*arguments, first=""):
        out = tmp_path / "table.json"
        words = ["--out", str(out), *arguments]
        done = forked_launch(tmp_path, no_rank=PROGRAM.format(first=first, arguments=words))
        assert out.is_file(), done.stderr[-3000:]
        return done, json.loads(out.read_text())

    return main


@pytest.mark.two_process
@pytest.mark.parametrize(
    "arguments",
    [
        ("--kills", "4", "--seed", "314", "--case", "dqn", "--case", "ppo-recurrent-running"),
        ("--kills", "3", "--seed", "4", "--case", "ppo-league", "--told", "0"),
    ],
    ids=["training", "league"],
)
def test_killed_runs_end_as_undisturbed_ones(arguments, kills):
    done, rows = kills(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {row["outcome"] for row in rows} == {"identical"}


@pytest.mark.slow
def test_kills_notice_a_resume_that_forgets_the_debt_of_updates(kills):
    """Of three, as a run that is killed after its last update, or when nothing is owed, has nothing to forget."""
    done, rows = kills("--kills", "3", "--seed", "11", "--case", "dqn", first=FORGETS_DEBT)
    assert done.returncode == 1, done.stderr[-3000:]
    different = [row for row in rows if "metrics.jsonl" in row["outcome"]]
    assert different
    assert f"DIFFERENT {different[0]['run']}: it leaves otherwise" in done.stderr


def test_moments_of_kills_are_uniform_over_the_rest_of_a_run():
    """Worked by hand: a second to start, two generations of 4 s with a phase halfway, and a second to end."""
    course = Undisturbed([0.0, 1.0, 3.0, 5.0, 7.0], 10.0, [1, 3, 5])
    assert course.moment(0, 0.05) == pytest.approx((0, 0.5))
    assert course.moment(0, 0.35) == pytest.approx((2, 0.5))
    # A process that begins with the second generation takes 6 s: its events are the start, and those at 1 and 3 s.
    assert course.moment(1, 0.25) == pytest.approx((1, 0.5))
    assert course.moment(1, 0.75) == pytest.approx((2, 1.5))
    # One that finds all generations complete starts and ends.
    assert course.moment(2, 0.5) == pytest.approx((0, 2.0))
