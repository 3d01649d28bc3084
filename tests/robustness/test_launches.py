"""One launch and its attempts: who they are, how ranks meet, and what Accelerate may be asked for."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from helpers.support import ROOT, SMALL, free_port, lines
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from evorl.commands.train import launch_command
from evorl.distributed import Launch, Peer, Ranks
from evorl.distributed.local_launch import code_of
from evorl.distributed.ranks import choose_backend, join_attempt, loopback
from evorl.runs.launch import refuse_options
from evorl.runs.storage.directory import has_used, owner_of
from evorl.system.signals import signal_handlers
from evorl.types.outcomes import UserError


def errors(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.two_process
def test_a_restart_does_not_override_a_refusal(tmp_path, trained_run, forked_launch):
    """The second attempt has the same launcher as the first, which was refused."""
    shutil.copytree(trained_run, tmp_path / "runs" / "a")
    before = (tmp_path / "runs" / "a" / "metrics.jsonl").read_bytes()
    done = forked_launch(tmp_path, "run.name=a", "training.max_steps=800", restarts=1)
    assert done.returncode != 0
    assert len(errors(done)) == 2
    assert "already holds a run" in errors(done)[0]
    assert (tmp_path / "runs" / "a" / "metrics.jsonl").read_bytes() == before


def attempt(store, size, timeout=10.0, begin=0):
    """Let the ranks of one attempt meet, each in a thread; gives what each got."""
    results = [None] * size

    def one(rank):
        try:
            results[rank] = join_attempt(store, rank, size, timeout)
        except TimeoutError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(begin, size)]
    for thread in reversed(threads):  # The main process last: others find the name of an attempt before.
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return results


def test_ranks_meet_anew_whatever_dead_attempts_have_left_in_the_store():
    store = dist.HashStore()
    names = set()
    for size in (3, 3, 2, 4):
        (name,) = {*attempt(store, size)}
        names.add(name)
    assert len(names) == 4


def test_ranks_do_not_wait_for_ever_for_one_another():
    assert "ranks are missing after 0.3 s" in str(attempt(dist.HashStore(), 2, timeout=0.3, begin=1)[1])
    with pytest.raises(TimeoutError, match=r"ranks are missing after 0\.3 s"):
        join_attempt(dist.HashStore(), 0, 2, 0.3)


def test_an_owner_is_known_by_its_launch_alone(tmp_path):
    this = Launch("this", restarted=True)
    (tmp_path / ".lock").write_text(json.dumps(owner_of(this) | {"pid": 1, "host": "another"}))
    assert has_used(this, tmp_path)
    assert not has_used(Launch("this", restarted=False), tmp_path)
    assert not has_used(Launch("that", restarted=True), tmp_path)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b"], "nccl"),
        (["a", "a"], "gloo"),
        (["a", ""], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_ranks_take_gpus_only_where_each_has_its_own(gpus, backend):
    assert choose_backend(gpus) == backend
    ranks = Ranks()
    ranks.backend, ranks.peers = backend, [Peer("node-a", local, gpu, "") for local, gpu in enumerate(gpus)]
    assert ranks.unused_gpus == (len({*gpus} - {""}) if backend == "gloo" else 0)


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend: inductor"),
        ("ACCELERATE_USE_FSDP", "true", "use_fsdp: true"),
    ],
)
def test_options_without_an_effect_are_refused(variable, value, option):
    with pytest.raises(UserError, match=f"accelerate's {option} would have no effect"):
        refuse_options({variable: value})
    refuse_options(
        {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_USE_CPU": "False"}
    )


def test_half_precision_is_refused():
    with pytest.raises(UserError, match=r"mixed_precision: fp16 is not supported; use 'bf16' or"):
        refuse_options({"ACCELERATE_MIXED_PRECISION": "fp16"})


DRIFTING = """
import os
from evorl.population import Learner
from evorl.runs.run import Run

to_agents, assign_fitness = Learner.to_agents, Run.assign_fitness

def rounded(self):
    if os.environ["RANK"] == "1":
        self.policy.flat.data.neg_()  # more than rounding, so that it shows in the fitness
    return to_agents(self)

def checked(self, trained, policy, counts, evaluator):
    fitness = assign_fitness(self, trained, policy, counts, evaluator)
    episodes = self.config.evaluation.episodes
    for agent, returns in zip(trained, fitness.evaluated):
        (again,) = evaluator.remeasure([agent], self.generation, "generation", 0, episodes)
        assert again.tolist() == returns.tolist(), "the fitness is that of another agent"
    return fitness

Learner.to_agents, Run.assign_fitness = rounded, checked
"""


@pytest.mark.two_process
def test_ranks_that_round_otherwise_go_on_with_the_agents_of_rank_0(tmp_path, forked_launch):
    done = forked_launch.well(tmp_path, "run.name=a", first=DRIFTING)
    rows = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert [row["drifts"] for row in rows] == [row["generation"] for row in rows]
    warnings = [line for line in done.stderr.splitlines() if "warning: rank 1 diverged from rank 0" in line]
    assert len(warnings) == len(rows) >= 3


LISTENING = """
import json, os, psutil, numpy as np
from evorl.distributed import Ranks, shutdown

ranks = Ranks(60.0)
family = [psutil.Process(), psutil.Process(os.getppid())]
heard = [c.laddr.ip for each in family for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN]
ranks.gather(np.zeros(1))
if ranks.is_main:
    print(json.dumps({"addresses": heard, "gloo": os.environ["GLOO_SOCKET_IFNAME"], "size": ranks.size}))
shutdown()
"""


@pytest.mark.two_process
def test_the_processes_of_one_machine_can_be_reached_from_nowhere_else(tmp_path):
    """torch's store listens on every interface by itself."""
    (tmp_path / "program.py").write_text(LISTENING)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run(
        launch_command(tmp_path / "program.py", [], 2),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["addresses"]) == {"127.0.0.1"}
    assert len(told["addresses"]) >= 2, "the launcher's store, and this rank's gloo"
    assert (told["gloo"], told["size"]) == (loopback(), 2)


ENDING = """
import os, signal, sys, time

if os.environ["RANK"] == "0":
    {end}
time.sleep(60)
"""


@pytest.mark.two_process
@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getppid(), signal.SIGTERM)", 128 + signal.SIGTERM), ("sys.exit(2)", 2)]
)
def test_the_launcher_leaves_it_to_the_ranks_to_tell_of_their_end(end, code, tmp_path):
    (tmp_path / "program.py").write_text(ENDING.format(end=end))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        launch_command(tmp_path / "program.py", [], 2),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("codes", "code", "told"),
    [
        ((2, -signal.SIGTERM), 2, ""),
        # The other rank fails at the same time.
        ((1, -signal.SIGKILL), 128 + signal.SIGKILL, "error: rank 1 was killed by signal 9 (Killed)\n"),
        ((-signal.SIGTERM, -signal.SIGTERM), 128 + signal.SIGTERM, ""),
    ],
)
def test_the_launcher_tells_of_ranks_that_were_killed(codes, code, told, capsys):
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}
    assert code_of(ChildFailedError("program", failures)) == code
    assert capsys.readouterr().err == told


MEMBERS = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = ["{root}/demos"]
import online
from evorl.runs.program import run_program
from evorl.runs.run import Run

record, begun = Run.record, Path("begun")

def die(self, *arguments):
    record(self, *arguments)
    if self.ranks.rank == 1 and self.progress.generation == 2 and not begun.exists():
        begun.touch()
        os.kill(os.getpid(), signal.SIGKILL)

Run.record = die
sys.exit(run_program(online.main, sys.argv[1:]))
"""


def node(directory, port, number):
    """One host's launcher that meets the others by c10d."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "2",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "evorl",
        "--rdzv_conf", "last_call_timeout=1", str(directory / "program.py"), "--config",
        str(SMALL), "run.name=a", "run.timeout=20",
    ]  # fmt: skip
    log = (directory / f"node-{number}.log").open("w")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.two_process
def test_hosts_meet_again_after_one_of_them_has_restarted(tmp_path):
    """Its launcher counts a restart; the other's, which only hears that its members have changed, counts none."""
    (tmp_path / "program.py").write_text(MEMBERS.format(root=ROOT))
    port = free_port()
    nodes = [node(tmp_path, port, number) for number in range(2)]
    try:
        codes = [process.wait(100) for process in nodes]
    finally:
        for process in nodes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = [path.read_text() for path in sorted(tmp_path.glob("node-*.log"))]
    assert codes == [0, 0], "".join(log[-3000:] for log in logs)
    assert (tmp_path / "begun").exists()
    rows = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert [row["generation"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 3


def test_a_rank_that_waits_for_others_to_meet_ends_at_once_when_told(monkeypatch):
    """It waits in C++, where no handler of Python is called, and has nothing to end in order."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as first_rank:
        monkeypatch.setenv("MASTER_PORT", str(first_rank.getsockname()[1]))
        pid = os.fork()
        if not pid:
            try:
                with signal_handlers():
                    Ranks(60.0)
            finally:
                os._exit(0)
        ended = os.pidfd_open(pid)
        first_rank.settimeout(30)
        try:
            waiting, _ = first_rank.accept()
            os.kill(pid, signal.SIGTERM)
            in_time = select.select([ended], [], [], 5.0)[0]
            waiting.close()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGTERM
    assert in_time
