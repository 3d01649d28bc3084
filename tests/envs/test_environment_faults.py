"""Environments that raise or give nonsense: who it was is reported, and only what must be lost is lost."""

import re
import time
import warnings

import gymnasium as gym
import pytest
import torch
from helpers import faults

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.faults import closing
from evorl.envs.faults.restarting import FAILURES, FAULT, RestartingEnv
from evorl.types.outcomes import EvorlWarning, UserError

AGENTS, ENVS = 2, 2
ACT = torch.zeros(AGENTS, ENVS, dtype=torch.int64)


def environments(vectorization="sync", max_restarts=3, name="helpers.faults:Failing-v0", **kwargs):
    settings = Environment(id=name, vectorization=vectorization, kwargs=kwargs, max_restarts=max_restarts)
    made = Environments(settings, AGENTS, ENVS)
    made.reset(4)  # Copies have seeds 4 to 7: 5 is environment 1 of agent 0, 7 environment 1 of agent 1.
    return made


def silently(made, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [made.step(ACT) for _ in range(steps)]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_only_the_episode_of_the_environment_that_raised_is_dropped(vectorization):
    made = environments(vectorization, seeds=[7])
    try:
        for step in range(1, 10):
            if step == 6:
                told = (
                    r"environment 1 of agent 1 \(helpers.faults:Failing-v0, step 2 of the episode\) raised "
                    r"RuntimeError: the wheel came off in a step \(.*faults.py.*\); restarted"
                )
                with pytest.warns(EvorlWarning, match=told):
                    now = made.step(ACT)
                assert now.valid.tolist() == [[True, True], [True, False]]
                assert made.started.tolist() == [[False, False], [False, True]]
            else:
                now = made.step(ACT)
                assert now.valid.all()
            assert now.all_valid == (step != 6)
            assert not now.reward[~now.valid].any()
            assert not (now.terminated | now.truncated)[~now.valid].any()
            numbers = made.observation["observation"][..., 1:]
            assert numbers[1, 1].tolist() == ([step // 4, step % 4] if step < 6 else [(step - 6) // 4, (step - 6) % 4])
            assert (numbers[[0, 0, 1], [0, 1, 0]] == torch.tensor([step // 4, step % 4])).all()
        steps, returns, count, ended, _ = made.pop_collected()
        assert returns.tolist() == [16.0, 12.0]
        assert count.tolist() == ended.tolist() == [4.0, 3.0], "the dropped episode does not count"
        assert steps.tolist() == [18.0, 17.0]
    finally:
        made.close()


def test_what_is_made_again_plays_episodes_that_no_other_copy_plays_and_the_same_in_every_run():
    seeds = []
    for _ in range(2):
        made = environments()
        silently(made, 5)
        faults.Failing.closed = 0
        with pytest.warns(EvorlWarning, match=r"environment 1 of agent 0 and 1 more \(") as caught:
            made.step(ACT)
        assert len(caught) == 1
        assert faults.Failing.closed == 2, "whatever raised may still hold something"
        seeds.append(made.observation["observation"][..., 0].flatten().tolist())
    assert seeds[0] == seeds[1]
    assert seeds[0][::2] == [4, 6]
    assert len(set(seeds[0]) - {4, 5, 6, 7, 8}) == 2


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_reset_that_raises_costs_no_transition(vectorization):
    made = environments(vectorization, how="reset", step=0)
    try:
        silently(made, 3)
        with pytest.warns(EvorlWarning, match="the wheel came off in a reset") as caught:
            now = made.step(ACT)
        assert len(caught) == 1
        assert now.all_valid
        assert now.terminated.all()
        assert (now.next_observation["observation"][..., 1:] == torch.tensor([0.0, 4.0])).all()
        assert made.started.all()
        assert all(now.all_valid for now in silently(made, 8))
        assert made.pop_collected().returns.tolist() == [24.0, 24.0]
    finally:
        made.close()


@pytest.mark.parametrize("restarts", [0, 2])
def test_an_environment_that_can_never_be_reset_ends_the_run_by_name(restarts):
    faults.Failing.made = 0
    message = (
        r"environment.max_restarts: environment 0 of agent 0 and 3 more .*came off in a reset \(\S*faults.py:\d+ in "
        rf"_raise: raise RuntimeError.*\); after {restarts} restarts"
    )
    with pytest.raises(UserError, match=message):
        environments(max_restarts=restarts, how="reset", seeds="all", episode=0, step=0)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_bug_in_every_step_ends_the_run_with_the_lines_of_the_environment(vectorization, tmp_path):
    name, kwargs = "helpers.faults:Recorded-v0", {"file": str(tmp_path / "log"), "how": "bug", "at": 1}
    with environments(vectorization, 1, name, **kwargs) as made:
        silently(made, 1)
        with pytest.raises(UserError) as error:
            made.step(ACT)
    assert "step 1 of the episode) raised KeyError: 'reward' (" in str(error.value)
    line = r"\(\S*faults.py:\d+ in _look_up: return info\[\"reward\"\]\); after 1 restarts"
    assert re.search(line, str(error.value))
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


@pytest.mark.parametrize(("vectorization", "restarts"), [("sync", 0), ("async", 1)])
def test_failing_too_often_ends_the_run_by_name(vectorization, restarts):
    made = environments(vectorization, restarts, seeds="all", episode=0)
    silently(made, 1 + 2 * restarts)
    message = (
        r"environment.max_restarts: environment 0 of agent 0 and 3 more \(helpers.faults:Failing-v0, step 2 of the "
        rf"episode\) raised RuntimeError: the wheel came off in a step \(.*\); after {restarts} restarts"
    )
    with pytest.raises(UserError, match=message) as error:
        made.step(ACT)
    assert "\n" not in str(error.value)
    made.close()


def broken(self, *action, **options):
    raise OSError("out of order")


@pytest.mark.parametrize("name", ["CartPole-v1", "helpers.faults:Failing-v0"])
@pytest.mark.parametrize("method", ["step", "reset"])
def test_where_all_copies_fail_at_once_the_run_ends_by_name(name, method, monkeypatch):
    made = environments("auto", 2, name)
    monkeypatch.setattr(type(made._vector), method, broken)
    message = rf"^environment.id: a {method} of {name} raised OSError: out of order \(\S*:\d+ in broken: raise OSError"
    with pytest.raises(UserError, match=message):
        made.step(ACT) if method == "step" else made.reset(4)


@pytest.mark.parametrize(("failing", "failures", "restarted"), [(0, 1, True), (2, 3, True), (3, 4, False)])
def test_a_restart_takes_a_new_seed_in_each_attempt_up_to_the_limit(failing, failures, restarted, monkeypatch):
    seeds = []

    def begin_anew(self):
        seeds.append(self._seed)
        if len(seeds) <= failing:
            raise ValueError(len(seeds))
        return "observation", {}

    monkeypatch.setattr(RestartingEnv, "_begin_anew", begin_anew)
    env = RestartingEnv(gym.make("CartPole-v1"), None, 3, "CartPole-v1")
    env._seed = 7
    observation, info = env._another(RuntimeError("at first"))
    assert info[FAILURES] == failures
    assert info[FAULT].startswith("ValueError" if failing else "RuntimeError")
    assert isinstance(observation, str) == restarted
    assert len({7, *seeds}) == 1 + len(seeds)


@pytest.mark.parametrize(("restarts", "failing_resets"), [(0, 0), (2, 2)])
def test_all_failures_of_a_copy_count(restarts, failing_resets):
    """Environment 1 of agent 0 fails in a step, and in resets that follow."""
    made = environments(max_restarts=restarts, seeds=[5])
    silently(made, 5)
    faults.Failing.failing_resets = failing_resets
    with pytest.raises(UserError, match=rf"environment 1 of agent 0 \(.*; after {restarts} restarts"):
        made.step(ACT)


def test_a_process_that_dies_ends_the_run_and_leaves_no_other():
    made = environments("async", how="die", seeds=[5])
    processes = made._vector.processes
    with made:
        silently(made, 5)
        with pytest.raises(UserError, match=r"a step of .* raised (EOFError|ConnectionResetError|BrokenPipeError)"):
            made.step(ACT)
    assert [process.exitcode for process in processes] == [0, 1, 0, 0], "the others have closed their environments"


def test_neither_an_interruption_nor_a_mistake_of_the_user_counts_as_a_failure():
    made = environments(how="user")
    silently(made, 5)
    with pytest.raises(UserError, match=r"environment\.kwargs: the wheel must be round"):
        made.step(ACT)
    made = environments(how="interrupt")
    with pytest.raises(ValueError, match="agent 0 chose action 2 in environment 0"):
        made.step(ACT + 2)
    silently(made, 5)
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
        silently(made, max(sum(place) + 3 * place[0] - 1, 0))
        with pytest.raises(UserError) as error:
            made.step(ACT)
    finally:
        made.close()
    assert str(error.value).startswith(
        "environment.id: environment 1 of agent 1 (helpers.faults:Failing-v0, " + message
    )


def test_the_part_that_is_not_finite_is_named_and_masks_survive_a_restart():
    faults.Parted.failures = 0
    made = environments(name="helpers.faults:Parted-v0")
    act = ACT + 1
    made.step(act)
    with pytest.warns(EvorlWarning, match="environment 0 of agent 0 "):
        now = made.step(act)
    assert now.valid.tolist() == [[False, True], [True, True]]
    assert not made.observation["action_mask"][..., 0].any(), "steps 0 and 2"
    message = r"environment 1 of agent 0 \(.*step 3 of the episode\) gave inf in part 'position' of the observation"
    with pytest.raises(UserError, match=message):
        made.step(act)
