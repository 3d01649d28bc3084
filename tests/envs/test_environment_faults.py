"""Environments that raise or give nonsense: the run ends by name, and nothing of them stays behind."""

import re
import time

import pytest
import torch
from helpers import faults

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.faults import closing
from evorl.types.outcomes import UserError

AGENTS, ENVS = 2, 2
ACT = torch.zeros(AGENTS, ENVS, dtype=torch.int64)


def environments(vectorization="sync", name="helpers.faults:Failing-v0", **kwargs):
    made = Environments(Environment(id=name, vectorization=vectorization, kwargs=kwargs), AGENTS, ENVS)
    made.reset(4)  # Copies have seeds 4 to 7: 5 is environment 1 of agent 0, 7 environment 1 of agent 1.
    return made


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("how", "step", "before"), [("step", 2, 5), ("reset", 0, 3)])
def test_one_that_raises_is_named_by_agent_copy_step_and_source_line(how, step, before, vectorization):
    """It does so in its second episode; episodes have 4 steps."""
    with environments(vectorization, how=how, step=step, seeds=[7]) as made:
        for _ in range(before):
            made.step(ACT)
        with pytest.raises(UserError) as error:
            made.step(ACT)
    told = (
        rf"environment\.id: environment 1 of agent 1 \(helpers\.faults:Failing-v0, step {step} of the episode\) raised "
        rf"RuntimeError: the wheel came off in a {how} \(\S*faults\.py:\d+ in _raise: raise RuntimeError\(.*\)\)"
    )
    assert re.fullmatch(told, str(error.value))
    assert not any(process.is_alive() for process in getattr(made._vector, "processes", ()))


def test_the_step_is_that_of_the_episode_also_where_it_was_replayed(tmp_path):
    kwargs = {"file": str(tmp_path / "log"), "how": "bug"}
    before, after = (environments(name="helpers.faults:Recorded-v0", **kwargs) for _ in range(2))
    for _ in range(2):
        before.step(ACT)
    assert not after.load_state_dict(before.state_dict(), seed=1)
    with pytest.raises(UserError, match=r"environment 0 of agent 0 \(.*, step 3 of the episode\) raised"):
        after.step(ACT)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("how", "step"), [("bug", 1), ("first reset", 0)])
def test_all_copies_are_closed_where_all_raise(how, step, vectorization, tmp_path):
    kwargs = {"file": str(tmp_path / "log"), "how": how, "at": 1}
    message = rf"agent \d \(.*, step {step} of the episode\) raised KeyError: 'reward' \(\S*faults.py:\d+ in _look_up"
    with (
        pytest.raises(UserError, match=message),
        environments(vectorization, "helpers.faults:Recorded-v0", **kwargs) as made,
    ):
        made.step(ACT)
    assert not faults.still_open(tmp_path / "log")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("how", "problem"), [
    ("", ""),
    ("raise", r"helpers.faults:Recorded-v0 raised KeyError: 'window' \(.* in close: .*\) while it was closed"),
    ("hang", r"helpers.faults:Recorded-v0 did not close within 0.2 s and is abandoned"),
])  # fmt: skip
def test_all_copies_are_closed_within_a_deadline_and_problems_are_only_reported(
    vectorization, how, problem, tmp_path, monkeypatch, capfd
):
    if how == "hang":
        monkeypatch.setattr(closing, "CLOSE_WITHIN", 0.2)
        monkeypatch.setattr(closing, "AFTER_A_HANG", 0.3)
    monkeypatch.setattr(closing, "_problems", set())
    monkeypatch.setattr(closing, "_hanging", set())
    began = time.monotonic()
    with environments(vectorization, name="helpers.faults:Recorded-v0", file=str(tmp_path / "log"), how=how) as made:
        made.step(ACT)
    made.close()
    assert time.monotonic() - began < 5
    assert not faults.still_open(tmp_path / "log")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: environment.id: ")]
    assert len(said) == bool(how), "all copies have the same problem"
    assert all(re.search(problem, line) for line in said)


def test_a_worker_that_does_not_answer_is_killed_in_time(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("evorl.envs.faults.closing.END_WITHIN", 0.3)
    kwargs = {"file": str(tmp_path / "log"), "how": "wait", "at": 1}
    made = environments("async", name="helpers.faults:Recorded-v0", **kwargs)
    processes = made._vector.processes
    for pipe in made._vector.parent_pipes:
        pipe.send(("step", 0))
    made.close()
    assert [process.exitcode for process in processes] == [-9] * 4
    assert "4 processes of helpers.faults:Recorded-v0 did not end within 0.3 s, and had to be killed" in (
        capfd.readouterr().err
    )


def broken(self, *action, **options):
    raise OSError("out of order")


@pytest.mark.parametrize("name", ["CartPole-v1", "helpers.faults:Failing-v0"])
@pytest.mark.parametrize("method", ["step", "reset"])
def test_where_all_copies_fail_at_once_the_run_ends_by_name(name, method, monkeypatch):
    made = environments("auto", name)
    monkeypatch.setattr(type(made._vector), method, broken)
    message = rf"^environment.id: a {method} of {name} raised OSError: out of order \(\S*:\d+ in broken: raise OSError"
    with pytest.raises(UserError, match=message):
        made.step(ACT) if method == "step" else made.reset(4)


def test_a_process_that_dies_ends_the_run_and_leaves_no_other():
    made = environments("async", how="die", seeds=[5])
    processes = made._vector.processes
    with made:
        for _ in range(5):
            made.step(ACT)
        with pytest.raises(UserError, match=r"a step of .* raised (EOFError|ConnectionResetError|BrokenPipeError)"):
            made.step(ACT)
    assert [process.exitcode for process in processes] == [0, 1, 0, 0], "the others have closed their environments"


def test_an_interruption_and_a_mistake_of_the_user_are_passed_on_as_they_are():
    made = environments(how="user")
    for _ in range(5):
        made.step(ACT)
    with pytest.raises(UserError, match=r"environment\.kwargs: the wheel must be round"):
        made.step(ACT)
    made = environments(how="interrupt")
    with pytest.raises(ValueError, match="agent 0 chose action 2 in environment 0"):
        made.step(ACT + 2)
    for _ in range(5):
        made.step(ACT)
    with pytest.raises(KeyboardInterrupt):
        made.step(ACT)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("how", "place", "message"),
    [
        ("reward", (1, 2), "step 2 of the episode) gave nan as its reward"),
        ("inf", (1, 2), "step 2 of the episode) gave inf in part 'observation' of the observation"),
        (
            "sentinel",
            (1, 2),
            "step 2 of the episode) gave -3.4e+38 in part 'observation' of the observation, entry [2",
        ),
        ("nan", (0, 4), "step 4 of the episode) gave nan in part 'observation' of the last observation"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_is_not_finite_is_named(vectorization, how, place, message):
    made = environments(vectorization, how=how, episode=place[0], step=place[1], seeds=[7])
    try:
        for _ in range(max(sum(place) + 3 * place[0] - 1, 0)):
            made.step(ACT)
        with pytest.raises(UserError) as error:
            made.step(ACT)
    finally:
        made.close()
    assert str(error.value).startswith(
        "environment.id: environment 1 of agent 1 (helpers.faults:Failing-v0, " + message
    )


def test_the_part_that_is_not_finite_is_named():
    made = environments(name="helpers.faults:Parted-v0")
    for _ in range(2):
        made.step(ACT + 1)
    message = r"environment 0 of agent 0 \(.*step 3 of the episode\) gave inf in part 'position' of the observation"
    with pytest.raises(UserError, match=message):
        made.step(ACT + 1)
