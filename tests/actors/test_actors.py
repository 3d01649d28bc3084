"""Real actors: what they send, that they wait, and what becomes of those that die, hang or find a mistake."""

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import faults
from helpers.learning import SETTINGS, Learning, all_gone, descendants, is_there
from helpers.support import config, error_line, train

from evorl.actors import actor, server, supervisor
from evorl.actors.actor import RESTORE, SAVE
from evorl.actors.actors import Actors, warn_of_cores
from evorl.actors.collectors import slot_size, slots
from evorl.actors.memory import Board, SharedMemory
from evorl.distributed import Ranks
from evorl.replay.received import GradientMemory
from evorl.types import EvorlWarning, RunFailed, UserError


def test_actors_that_die_or_hang_are_replaced_and_all_end_with_the_learner():
    others = descendants()
    with Learning("actors={count: 2, timeout: 3}") as learning:
        learning.learn(20)
        first = learning.actors.processes
        os.kill(first[0], signal.SIGKILL)
        while learning.actors.processes[0] == first[0]:
            learning.learn(1)
        learning.learn_from(0)
        assert learning.actors.processes[1] == first[1]
        stopped = learning.actors.processes[0]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.warns(EvorlWarning, match=r"actor 0 made no step for 3 s \(actors.timeout\); it is started again"):
            learn_until_replaced(learning, {stopped, 0})
        learning.learn(10)
        figures = learning.actors.pop_metrics(learning.placement)
        assert figures["restarts"] == 2
        assert all(figures[f"steps_per_second/{index}"] > 0 for index in range(2))
        told = learning.actors.processes[1]
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(told, ignored)
        learning.learn(10)
        assert learning.actors.processes[1] == told
        family = descendants() - others
        assert set(learning.actors.processes) <= family
    assert all_gone([*first, *family])


def test_the_slot_that_is_released_is_the_one_that_is_handed_out():
    handed_out, actors = [], object.__new__(Actors)
    actors._settings = SimpleNamespace(lockstep=False, queue=2)
    actors._supervisor = SimpleNamespace(hand_out=lambda actor, slot: handed_out.append((actor, slot)))
    make = partial(GradientMemory, {"policy": 3}, ["loss"], 1)
    memory = SharedMemory()
    memory.grow(2 * slot_size(make))
    received = slots(memory, make, [2, 3])
    for slot in (received[3], received[2]):
        actors.release(slot)
    assert handed_out == [(1, 3), (1, 2)]
    memory.close()


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has been stopped for 1 s")]
)
def test_a_server_that_is_killed_or_stopped_is_replaced_with_its_actors(number, why, monkeypatch):
    monkeypatch.setattr(server, "STOPPED", 1.0)
    with Learning("actors={count: 2, max_restarts: 1}") as learning:
        learning.learn(4)
        lost = {learning.actors.server, *learning.actors.processes}
        os.kill(learning.actors.server, number)
        if number == signal.SIGSTOP:
            os.kill(learning.actors.processes[0], signal.SIGKILL)  # The server is asked for another one.
        message = rf"the process that starts actors \({learning.actors.server}\) {why}; it and its actors are started"
        with pytest.warns(EvorlWarning, match=message) as caught:
            learn_until_replaced(learning, lost)
        assert len(caught) == 1
        assert all_gone(lost)
        learning.learn_from(0)
        learning.learn_from(1)


def learn_until_replaced(learning, lost):
    while lost & {learning.actors.server, *learning.actors.processes}:
        learning.learn(1)


def test_a_server_that_cannot_live_is_given_up():
    with Learning("actors={count: 1, max_restarts: 0}") as learning:
        learning.learn(1)
        os.kill(learning.actors.server, signal.SIGKILL)
        with pytest.raises(RunFailed, match="has ended; 1 of them were lost without a rollout in between"):
            learning.learn(1000)


def test_actors_close_their_environments_in_the_end(tmp_path):
    file = tmp_path / "log"
    environment = f"environment={{id: 'helpers.faults:Recorded-v0', num_envs: 2, kwargs: {{file: {file}}}}}"
    with Learning("actors={count: 2}", environment) as learning:
        learning.learn(4)
    assert "made" in file.read_text()
    assert not faults.still_open(file)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("ended", ["early", "late", "by an error"])
def test_an_actor_that_ends_while_it_begins_closes_its_environments(ended, tmp_path, monkeypatch):
    """It may be told to leave, since its learner needs no more of it by then."""
    file, made = tmp_path / "log", actor.make_algorithm
    recorded = f"environment={{id: 'helpers.faults:Recorded-v0', num_envs: 2, kwargs: {{file: {file}}}}}"

    def make(*arguments):
        if ended == "by an error":
            raise UserError("there is no such head")
        if ended == "early":
            os.kill(os.getpid(), actor.LEAVE)
        return made(*arguments)

    monkeypatch.setattr(actor, "make_algorithm", make)
    context = {
        "config": config(*SETTINGS, recorded).to_yaml(), "agents": 2, "rank": 0, "copies": 1, "max_staleness": 9,
        "first_actor": 0, "learner_device": "cpu",
    }  # fmt: skip
    board, memory = Board(1), SharedMemory()
    (reader, writer), before = os.pipe(), signal.getsignal(actor.LEAVE)
    try:
        if ended == "late":
            os.close(writer)  # The learner is gone.
        actor.run(context, 0, 0, [board.memory.descriptor, board.lock, memory.descriptor, reader, writer])
        os.kill(os.getpid(), actor.LEAVE)  # It ends, and is told so late.
    finally:
        signal.signal(actor.LEAVE, before)
    assert "made" in file.read_text()
    assert not faults.still_open(file)


@pytest.mark.parametrize("spare", [20, 70, 130])
def test_too_many_actors_for_the_limit_of_open_files_are_refused_in_one_line(spare):
    """They run out of files for the actors' memory, its maps or their pipes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + spare, before[1]))
    message = r"actors.count: 40 actors take 160 open files .* \(ulimit -n\); launch it with `ulimit -n 416`"
    others = descendants()
    try:
        with pytest.raises(UserError, match=message), pytest.warns(match="more than"):
            Learning("actors={count: 40}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for process in descendants() - others:  # They would take time from the tests after this one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_a_board_that_runs_out_of_files_closes_those_it_opened(monkeypatch):
    made = []

    def once():
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(os.memfd_create("test"))
        return made[0]

    monkeypatch.setattr("evorl.actors.memory._new", once)
    with pytest.raises(OSError, match="Too many"):
        Board(2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_a_server_that_cannot_be_sent_its_context_is_ended():
    others = descendants()
    with pytest.raises(TypeError, match="not JSON serializable"):
        server.ActorServer({"config": object()}, 3.0)
    assert descendants() <= others


def test_actors_that_wait_for_a_busy_learner_are_left_alone(monkeypatch):
    with Learning("actors={count: 2}") as learning:
        learning.learn_from(0)
        learning.learn_from(1)
        own, until = learning.actors._supervisor, time.monotonic() + 20
        processes = own.processes
        while own.waiting < 4 and time.monotonic() < until:
            time.sleep(0.01)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000)
        monkeypatch.setattr(supervisor, "time", clock)
        for _ in range(2):
            own._looked = 0.0
            own.look()
        assert own.processes == processes


def test_no_update_of_shared_parameters_is_lost_though_actors_are_killed():
    shared = "algorithm={name: a3c_shared, rollout_steps: 5}"
    with Learning(shared, "actors={count: 2, max_staleness: 1000000}") as learning:
        kills = 0
        for _ in range(5):
            os.kill(learning.actors.processes[kills % 2], signal.SIGKILL)
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
        (process,) = (psutil.Process(pid) for pid in learning.actors.processes)
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
        (UserError, ["actors={queue: 4, max_staleness: 2}"], "actors.max_staleness: with 4 rollouts .* at least 4"),
        (
            UserError,
            ["actors={queue: 250, count: 1}", "environment.num_envs=2000", "algorithm.rollout_steps=2000"],
            "actors.queue: 250 rollouts of .* GiB of shared memory, and .* are free",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(error, overrides, message):
    with pytest.raises(error, match=message), Learning(*overrides) as learning:
        learning.learn(1)


HELPED = "environment={id: 'helpers.faults:Helped-v0', num_envs: 2, vectorization: sync, max_restarts: 1"


@pytest.mark.timeout(30)
def test_mistakes_are_told_though_helpers_of_the_environments_live_on():
    """They hold the pipe through which the actor tells of the mistake."""
    with Learning(HELPED + ", kwargs: {at: 7}}") as learning, pytest.raises(UserError, match=r"\(in actor 0\)"):
        learning.learn(1000)


def test_helpers_of_the_environments_end_with_the_run():
    others = descendants()
    with Learning(HELPED + "}") as learning:
        learning.learn(4)
        family = descendants() - others
    # The process that forks actors, an actor, and a helper of each of its environments.
    assert len(family) == 2 + 2 * 2
    assert all_gone(family)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_left", [False, True])
def test_actors_of_a_killed_server_are_replaced_even_if_processes_of_their_environments_hold_their_pipes(
    is_left, monkeypatch
):
    """A process that has left the actor's group cannot be found; the others are killed."""
    if is_left:
        monkeypatch.setattr(supervisor, "kill_group", lambda actor: None)
    others = descendants()
    with Learning(HELPED + "}") as learning:
        learning.learn(4)
        family = descendants() - others
        lost = {learning.actors.server, *learning.actors.processes}
        os.kill(learning.actors.server, signal.SIGKILL)
        with pytest.warns(EvorlWarning, match="it and its actors are started again"):
            learn_until_replaced(learning, lost)
        learning.learn(4)
    helpers = family - lost
    assert len(helpers) == 2 * 2
    assert is_left or all_gone(helpers)
    for process in filter(is_there, helpers):
        os.kill(process, signal.SIGKILL)


def test_an_environment_that_exits_ends_the_run_with_the_line_that_did(tmp_path, capfd):
    environment = f"{{id: 'helpers.faults:Recorded-v0', num_envs: 2, kwargs: {{file: {tmp_path / 'log'}, how: exit}}}}"
    with (
        pytest.raises(UserError, match=r"faults.py:\d+ \(step\) called sys.exit\(0\), .* \(in actor 0\)"),
        Learning(f"environment={environment}") as learning,
    ):
        learning.learn(1000)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("what", "payload"), [(SAVE, b""), (RESTORE, bytes(2**20))])
def test_an_actor_that_is_too_late_with_its_episodes_is_replaced(what, payload, monkeypatch):
    with Learning("actors={count: 1, lockstep: true}") as learning:
        learning.learn(2)
        asked = learning.actors._supervisor
        while asked.busy:
            asked.receive()
        patient, asked._settings = asked._settings, asked._settings.model_copy(update={"timeout": 1.0})
        monkeypatch.setattr(supervisor, "STARTING", 1.0)
        process, end = learning.actors.processes[0], asked._end

        def answer_and_end(actor):
            if actor.process == process:
                os.kill(process, signal.SIGCONT)
                time.sleep(0.3)
            end(actor)

        asked._end = answer_and_end
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(RunFailed, match="its running episodes are lost"):
            asked.ask(0, what, payload)
        asked._settings = patient
        monkeypatch.setattr(supervisor, "STARTING", 60.0)
        learning.begin(2)
        learning.learn(3)
        assert asked.restarts == 1
        assert learning.actors.processes[0] != process


def test_episodes_of_an_actor_that_does_not_go_on_with_them_begin_anew():
    def ask(index, what, payload):
        if index:
            raise RunFailed("actor 1 has ended")
        return b""

    actors = object.__new__(Actors)
    actors._settings, actors._first = SimpleNamespace(count=2), 4
    actors._supervisor = SimpleNamespace(start=lambda: None, ask=ask)
    saved = {f"actor.{index}": torch.zeros(1, dtype=torch.uint8) for index in range(2)}
    assert actors.load_state_dict(saved, seed=1) == "any environment of actor 5"


def test_an_actor_that_was_idle_since_its_start_is_not_late_with_its_first_step():
    """In lockstep, an actor may wait for its first slot for longer than it may take to start."""
    now = time.monotonic()
    actor = supervisor.ActorProcess(0, 1, (), {0}, began=now - 100, asked=now)
    late = [actor.is_late(then, 0.0, timeout=3.0) for then in (now, now + 59, now + 61)]
    assert late == [False, False, True]


def test_bounds_that_would_starve_the_learner_end_a_program_before_it_claims_a_directory(in_directory, capsys):
    assert train(*SETTINGS, "actors={queue: 4, max_staleness: 2}", "run.name=a") == 2
    assert "use at least 4" in error_line(capsys)
    assert not (in_directory / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm={name: dqn}", "actors={count: 2}"], "actors: dqn collects in the learner's own process"),
        (["algorithm={name: impala, sequence_length: 4}"], "sequence_length: actors send whole rollouts"),
        (["algorithm={name: impala, split_batches: true}"], "algorithm.split_batches"),
        (["algorithm={name: a3c, passes: 2}"], "algorithm.passes"),
    ],
)
def test_settings_that_mean_nothing_with_actors_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        config(*settings)


def test_actors_are_let_go_although_another_process_holds_their_socket():
    """As the processes of environments do, which evaluation forks after the server has begun."""
    with Learning() as learning:
        learning.learn(1)
        holder = os.fork()
        if holder == 0:
            time.sleep(60)
            os._exit(0)
        began = time.monotonic()
    took = time.monotonic() - began
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert took < server.CLOSING


def test_an_actor_that_hangs_is_ended_although_what_it_sent_is_unread(monkeypatch):
    with Learning("actors={count: 1, queue: 2}") as learning:
        learning.learn(1)
        own, until = learning.actors._supervisor, time.monotonic() + 20
        while own.waiting < 2 and time.monotonic() < until:
            time.sleep(0.01)
        (actor,) = own._actors
        own._settings = own._settings.model_copy(update={"timeout": 0.0})
        for _ in range(2):
            own._looked = 0.0
            own.look()
        assert actor.process, "it has filled all that it was given"
        monkeypatch.setattr(supervisor, "_unread", lambda reader: supervisor.MESSAGE.size)
        for lives in (True, False):
            own._looked = 0.0
            own.look()
            assert bool(actor.process) == lives, "it has filled one of two, and is ended at the second look"


def test_an_actor_that_cannot_live_is_given_up():
    with Learning("actors={max_restarts: 1}") as learning:
        learning.learn(1)
        over = threading.Event()

        def kill_all():
            while not over.wait(0.001):
                for pid in filter(None, learning.actors.processes):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            with pytest.raises(RunFailed, match="actor 0 ended 2 times without a rollout in between"):
                learning.learn(1000)
        finally:
            over.set()
            killer.join()


def test_more_actors_than_cores_are_warned_of():
    with pytest.warns(match=r"actors.count: 300 actors on a host of \d+ core"):
        warn_of_cores(300, Ranks())


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
        for number in server.GROUP_SIGNALS:
            os.kill(learning.actors.server, number)
        learning.begin(1)
        learning.learn(2)
    assert "Traceback" not in capfd.readouterr().err
