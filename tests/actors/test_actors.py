"""Real actors: what they send, that they wait, and what becomes of those that die, hang or find a mistake."""

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers import faults
from helpers.learning import Learning, all_gone, descendants

from evorl.actors import server, supervisor
from evorl.actors.actor import _Leave
from evorl.envs.faults.raising import PASSED_ON
from evorl.types.outcomes import EvorlWarning, RunFailed, UserError

TOLD_OF_KILLED_ACTORS = pytest.mark.filterwarnings("ignore:actor . ended, or was killed; it is started again")
HELPED = "environment={id: 'helpers.faults:Helped-v0', num_envs: 2, vectorization: sync"


def test_actors_that_die_or_hang_are_replaced_and_all_end_with_the_learner(monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE", 10.0)
    others = descendants()
    with Learning("actors={count: 2}") as learning:
        learning.learn(20)
        first = learning.processes
        os.kill(first[0], signal.SIGKILL)
        with pytest.warns(EvorlWarning, match="actor 0 ended, or was killed; it is started again"):
            learn_until_replaced(learning, {first[0], 0})
        learning.learn_from(0)
        assert learning.processes[1] == first[1]
        stopped = learning.processes[0]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.warns(EvorlWarning, match=r"actor 0 took no step for 10 s; it is started again"):
            learn_until_replaced(learning, {stopped, 0})
        learning.learn(10)
        figures = learning.actors.pop_metrics(learning.placement)
        assert figures["restarts"] == 2
        assert all(figures[f"steps_per_second/{index}"] > 0 for index in range(2))
        told = learning.processes[1]
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(told, ignored)
        learning.learn(10)
        assert learning.processes[1] == told
        family = descendants() - others
        assert set(learning.processes) <= family
    assert all_gone([*first, *family])


def test_a_pause_of_all_processes_leaves_actors_the_time_for_a_long_step(monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE", 20.0)
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.05)
    with Learning() as learning:
        learning.learn(1)
        processes = learning.processes
        os.kill(processes[0], signal.SIGSTOP)  # It is within a step.
        time.sleep(0.1)
        learning.learn(learning.actors._supervisor.waiting)
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 30)
        for _ in range(4):
            learning.actors._supervisor.look()
            time.sleep(supervisor.LOOK_EVERY)
        os.kill(processes[0], signal.SIGCONT)
        learning.learn(2)
        assert learning.processes == processes


def test_actors_are_looked_at_while_others_send_and_not_for_the_time_before_they_were_asked():
    with Learning() as learning:
        learning.learn(1)
        keeper = learning.actors._supervisor
        (stopped,) = keeper._actors
        os.kill(stopped.process, signal.SIGSTOP)
        time.sleep(0.1)
        learning.learn(keeper.waiting)
        stopped.beat = float(keeper._board.beats[stopped.index])
        for asked, counted in ((-10.0, 4.0), (0.0, 0.0)):
            now = time.monotonic()
            stopped.silent, stopped.asked, keeper._looked = 0.0, now + asked, now - 4
            keeper._ready.append(stopped)
            assert keeper._next() is stopped
            assert stopped.silent == pytest.approx(counted, abs=0.5)
        os.kill(stopped.process, signal.SIGCONT)


def test_the_first_step_may_take_longer_since_environments_are_made_before_it(monkeypatch):
    monkeypatch.setattr(supervisor, "RESTARTS", 0)
    slow = "environment={id: 'helpers.faults:SlowReset', num_envs: 1}"
    with Learning(slow) as learning:
        monkeypatch.setattr(supervisor, "PATIENCE", 1.0)
        learning.learn(2)
        assert learning.actors.pop_metrics(learning.placement)["restarts"] == 0
        os.kill(learning.processes[0], signal.SIGSTOP)
        with pytest.raises(RunFailed, match=r"actor 0 ended 1 times .*; it took no step for 1 s"):
            learning.learn(100)
    monkeypatch.setattr(supervisor, "PATIENCE", 10.0)
    monkeypatch.setattr(supervisor, "RESTARTS", 3)  # An actor that hangs before its first step is not replaced.
    with Learning(slow) as learning:
        monkeypatch.setattr(supervisor, "START_PATIENCE", 0.5)
        with pytest.raises(RunFailed, match=r"actor 0 ended 1 times .*; it took no first step for 0\.5 s"):
            learning.learn(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_stopped_ends_the_run_and_leaves_nothing(number, monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE", 2.0)
    others = descendants()
    with Learning(HELPED + "}", "actors={count: 2}") as learning:
        learning.learn_from(0)
        learning.learn_from(1)
        family = descendants() - others
        os.kill(learning.server, number)
        if number == signal.SIGSTOP:
            os.kill(learning.processes[0], signal.SIGKILL)  # The server is asked for another one.
        with pytest.raises(RunFailed, match="the process that starts actors was lost, or does not answer"):
            learning.learn(100_000)
        assert all_gone(family), "the helpers of environments too"


def learn_until_replaced(learning, lost):
    while lost & {*learning.processes}:
        learning.learn(1)


def test_actors_close_their_environments_in_the_end(tmp_path):
    file = tmp_path / "log"
    environment = f"environment={{id: 'helpers.faults:Recorded-v0', num_envs: 2, kwargs: {{file: {file}}}}}"
    with Learning("actors={count: 2}", environment) as learning:
        learning.learn(4)
    assert "made" in file.read_text()
    assert not faults.still_open(file)


def test_too_many_actors_for_the_limit_of_open_files_are_refused_in_one_line():
    """They run out of files for the actors' memory, its maps or their pipes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 70, before[1]))
    message = r"^actors.count: Too many open files; raise the limit with `ulimit -n 65536`$"
    others = descendants()
    try:
        with pytest.raises(UserError, match=message), pytest.warns(match="more than"):
            Learning("actors={count: 40}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for process in descendants() - others:  # They would take time from the tests after this one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@TOLD_OF_KILLED_ACTORS
def test_no_update_of_shared_parameters_is_lost_though_actors_are_killed():
    shared = "algorithm={name: a3c_shared, rollout_steps: 5}"
    with Learning(shared, "actors={count: 2}") as learning:
        kills = 0
        for _ in range(5):
            os.kill(learning.processes[kills % 2], signal.SIGKILL)
            kills += 1
            learning.learn(20)
        heard = learning.policy.version
        learning.actors.end(learning.learner)
        made = [agent.state.updates["policy"] for agent in learning.learner.to_agents()]
        # Whoever was killed may have made an update that nobody heard of; what is on its way was made, too.
        assert heard <= made[0] <= heard + kills + 4 * 2
        assert made[0] == made[1]
        assert learning.policy.flat.isfinite().all()
        assert learning.actors.pop_metrics(learning.placement)["rollouts"] == heard == 100


def test_actors_wait_for_the_learner_and_follow_it_into_the_next_generation():
    with Learning("actors={queue: 3}") as learning:
        (process,) = (psutil.Process(pid) for pid in learning.processes)
        learning.learn(1)
        until = time.monotonic() + 10
        while learning.actors._supervisor.waiting < 3 and time.monotonic() < until:
            learning.actors._supervisor.look()
            time.sleep(0.05)
        time.sleep(0.3)
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        assert sum(process.cpu_times()[:2]) == before, "it is meant to wait, and not to look all the time"
        # What waits is of the generation before, and nobody learns from it.
        widened = learning.agents[0].child(7)
        learning.agents = [widened, learning.agents[1]]
        learning.begin(2)
        learning.learn(4)
        figures = learning.actors.pop_metrics(learning.placement)
        assert figures["discarded_old"] == 3
        assert figures["rollouts"] == 5
        assert figures["max_staleness"] <= 2 * 3


@pytest.mark.parametrize(
    ("error", "overrides", "message"),
    [
        (UserError, ["environment={id: 'helpers.nowhere:X-v0'}"], r"environment.id: .*helpers.nowhere.*in actor 0"),
        (
            UserError,
            ["actors={queue: 250, count: 1}", "environment.num_envs=2000", "algorithm.rollout_steps=2000"],
            "actors.queue: 250 rollouts of .* MiB: .* GiB do not fit into .* GiB of free memory",
        ),
    ],
)
def test_errors_of_actors_are_one_line(error, overrides, message):
    with pytest.raises(error, match=message), Learning(*overrides) as learning:
        learning.learn(1)


@pytest.mark.timeout(30)
def test_errors_of_actors_are_told_though_environment_helpers_live():
    """They hold the pipe through which the actor tells of the mistake."""
    message = (
        r"^environment\.id: environment 0 of agent 0 \(helpers\.faults:Helped-v0, step 7 of the episode\) raised "
        r"RuntimeError: the wheel came off \(\S*faults\.py:\d+ in step: raise RuntimeError\(.*\)\) \(in actor 0\)$"
    )
    with Learning(HELPED + ", kwargs: {at: 7}}") as learning, pytest.raises(UserError, match=message):
        learning.learn(1000)


@TOLD_OF_KILLED_ACTORS
def test_an_actor_that_cannot_live_is_given_up():
    with Learning() as learning:
        learning.learn(1)
        over = threading.Event()

        def kill_all():
            while not over.wait(0.001):
                for pid in filter(None, learning.processes):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            with pytest.raises(RunFailed, match="actor 0 ended 4 times without a rollout in between"):
                learning.learn(1000)
        finally:
            over.set()
            killer.join()


@pytest.mark.usefixtures("launched_servers")
def test_no_actor_outlives_its_rank():
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        try:
            learning = Learning(HELPED + "}", "actors={count: 2}")
            learning.learn_from(0)
            learning.learn_from(1)
            family = descendants()
            os.write(writer, " ".join(map(str, family)).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    family = [int(pid) for pid in os.read(reader, 4096).split()]
    os.waitpid(rank, 0)
    # The process that forks actors, two actors, and a helper of each of their environments.
    assert len(family) == 3 + 2 * 2 * 2
    assert all_gone(family)


@pytest.mark.usefixtures("launched_servers")
def test_a_signal_to_the_process_group_does_not_end_a_server_that_is_starting(capfd):
    with Learning("actors={count: 1}", start=False) as learning:
        for number in server.SIGNALS:
            os.kill(learning.server, number)
        learning.begin(1)
        learning.learn(2)
    assert "Traceback" not in capfd.readouterr().err


def test_an_actor_that_is_told_to_leave_within_a_step_reports_no_fault_of_its_environment():
    assert issubclass(_Leave, PASSED_ON)
