"""What goes wrong inside a run: numbers that are not finite, disks that are full, directories in use."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.support import (
    EVERY_MUTATION,
    ROOT,
    SMALL,
    agent,
    algorithm,
    batch,
    config,
    lines,
    population,
    train,
)

from evorl.commands.train import launch_command, resumption
from evorl.distributed.ranks import Ranks
from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.runs.storage.directory import RunDirectory
from evorl.runs.storage.json_lines import JsonLines
from evorl.system.files import Lock, is_locked, read_object
from evorl.types.outcomes import EvorlWarning, UserError


def spoiled(agents, how):
    """Make agent 1 diverge: through its batch or its parameters."""
    some = batch(agents)
    if how == "reward":
        some.columns["reward"][1] = torch.inf
    else:
        for value in agents[1].tensors["q"]["parameters"].values():
            value *= how
    return some


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize(
    ("loss", "how", "fault"),
    [
        ("mse", "reward", "loss and gradient norm"),
        # The gradient of this loss is bounded.
        ("huber", "reward", "loss"),
        ("mse", 1e25, "loss and gradient norm"),
        # The loss, the gradient and its sum are finite; the sum of its squares is not.
        ("mse", 1e6, "gradient norm"),
    ],
)
def test_an_agent_that_diverges_is_quarantined_and_its_stack_mates_do_not_notice(loss, how, fault, is_clipped):
    clip = "0.5" if is_clipped else "null"
    dqn = algorithm(f"algorithm.max_grad_norm={clip}", f"algorithm.loss={loss}")
    agents = [agent(id=index, dqn=dqn) for index in range(3)]
    some = spoiled(agents, how)
    together, alone = population(agents, dqn), [population([one], dqn) for one in agents]
    before = together.policy.stacks[0].networks["q"].parameters.flat.clone()
    for _ in range(3):
        together.update(some)
        for index, single in enumerate(alone):
            single.update(some.part(slice(index, index + 1)))
    learned = together.to_agents()
    assert learned[1].fault == f"{fault} not finite at update 1"
    assert learned[1].state.updates["q"] == 0
    after = together.policy.stacks[0].networks["q"].parameters
    assert all(torch.equal(now[1], was[1]) for now, was in zip(after.rows(after.flat), after.rows(before), strict=True))
    for index in (0, 2):
        assert learned[index].fault is None
        assert learned[index].state.updates["q"] == 3
        torch.testing.assert_close(learned[index].tensors, alone[index].to_agents()[0].tensors)
    reported = together.metrics()
    for values in (*reported.sums.values(), *reported.counts.values()):
        assert values[1] == 0, "an update that was not applied is not counted"


def test_an_agent_whose_numbers_are_not_finite_at_the_end_is_found():
    together = population([agent(id=index) for index in range(2)])
    together.stacks[0].networks["q"].adam.exp_avg.views["hidden.0.bias"][1, 0, 0] = torch.nan
    first, second = together.to_agents()
    assert first.fault is None
    assert second.fault == "mean of q.hidden.0.bias not finite"


def exploding(monkeypatch, *ids):
    """Agents whose parameters are so large, from the second generation on, that their losses overflow."""
    from evorl.runs.run import Run

    checkpoint = Run.checkpoint

    def spoil(self, evolved):
        agents = checkpoint(self, evolved)
        for member in agents:
            if member.id in ids and self.progress.generation == 1:
                for value in member.tensors["q"]["parameters"].values():
                    value *= 1e25
        return agents

    monkeypatch.setattr("evorl.runs.run.Run.checkpoint", spoil)


@pytest.mark.slow
def test_a_quarantined_agent_is_marked_and_replaced(in_directory, monkeypatch):
    exploding(monkeypatch, 4, 5, 2)
    with pytest.warns(
        EvorlWarning, match=r"agent \d stopped learning in generation 2: loss and gradient norm not finite"
    ):
        assert train("run.name=a") == 0
    rows = lines(in_directory / "runs" / "a" / "lineage.jsonl")
    lost = [row for row in rows if row["fault"]]
    assert lost
    assert {row["generation"] for row in lost} == {2}
    assert all(row["fitness"] is None for row in lost)
    third = [row for row in rows if row["generation"] == 3]
    assert len(third) == 4
    assert not {row["id"] for row in third} & {row["id"] for row in lost}
    assert not {row["parent"] for row in third} & {row["id"] for row in lost}


@pytest.mark.slow
def test_a_run_whose_agents_are_all_lost_says_so_and_ends(in_directory, monkeypatch, capsys):
    exploding(monkeypatch, *range(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train("run.name=a") == 2
    error = capsys.readouterr().err
    assert "all agents were lost in generation 2 (agent" in error
    assert "lower algorithm.learning_rate, scale rewards to about 1, or set " in error
    assert len(lines(in_directory / "runs" / "a" / "lineage.jsonl")) == 8


def full_disk(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device", "some/file")


@pytest.mark.slow
def test_training_goes_on_over_a_full_disk_and_resumes_from_before_it(in_directory, mutated_run, monkeypatch):
    settings = (*EVERY_MUTATION, "training.max_steps=200")
    write = Checkpoints.write

    def sometimes(self, generation, name, payload):
        return full_disk() if generation > 1 else write(self, generation, name, payload)

    monkeypatch.setattr("evorl.runs.storage.checkpoint_files.Checkpoints.write", sometimes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train("run.name=a", *settings) == 1, "a run that ends unsaved has failed"
    messages = [str(one.message) for one in caught if "has no checkpoint" in str(one.message)]
    assert len(messages) == 1
    assert "generation 2 has no checkpoint: some/file: No space left on device; training goes on" in messages[0]
    assert not list((in_directory / "runs" / "a").rglob(".partial*"))
    monkeypatch.undo()
    monkeypatch.chdir(in_directory)
    assert train("run.name=a", *settings, "run.resume=auto") == 0
    for name in ("lineage.jsonl", "elite/agent.safetensors"):
        assert (in_directory / "runs" / "a" / name).read_bytes() == (mutated_run / name).read_bytes()


def test_a_problem_of_another_rank_names_the_rank(tmp_path, monkeypatch):
    """Ranks on several hosts have disks of their own."""

    class SecondRank(Ranks):
        rank, size = 1, 2

        def __init__(self):
            pass

        def gather_bytes(self, payload, what):
            return [b'{"files": {}, "problem": ""}', payload]

        def broadcast_bytes(self, payload, what):
            return payload

    directory = RunDirectory(tmp_path)
    monkeypatch.setattr("evorl.runs.storage.checkpoint_files.Checkpoints.write", full_disk)
    problem = directory.write_checkpoint(SecondRank(), directory.checkpoints, 1, {"state": b""})
    assert problem == "rank 1: some/file: No space left on device"


def test_lines_that_a_full_disk_refused_are_written_later_once(tmp_path, monkeypatch):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.add([{"generation": 1}])
    log.flush()
    monkeypatch.setattr("evorl.runs.storage.json_lines.os.fsync", full_disk)
    log.add([{"generation": 2}])
    with pytest.raises(OSError, match="No space"):
        log.flush()
    assert lines(log.path) == [{"generation": 1}]
    monkeypatch.undo()
    log.add([{"generation": 3}])
    log.flush()
    assert lines(log.path) == [{"generation": 1}, {"generation": 2}, {"generation": 3}]
    with log.path.open("ab") as file:
        file.write(b'\xff\x00{"generation": 1}\n[]\n{"generation": "x"}\n{"generation": 2')
    with pytest.warns(EvorlWarning, match="metrics.jsonl: has no line for generation 4"):
        log.cut_back(4)
    assert [row["generation"] for row in log.rows()] == [1, 2, 3]
    with pytest.warns(EvorlWarning, match=r"has no line for generation 4, 5, 6, 7, 8 [.]{3}; it was damaged"):
        log.cut_back(10**11)


def test_half_written_line_is_removed_on_a_full_disk(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    rows = [{"generation": number, "text": "x" * 400} for number in range(1, 4)]
    log.add(rows[:1])
    log.flush()
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
        log.add(rows[1:2])
        with pytest.raises(OSError, match="too large"):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert lines(log.path) == rows[:1]
    log.add(rows[2:])
    log.flush()
    assert lines(log.path) == rows


def test_a_replay_above_the_limit_is_not_kept_and_both_ends_say_so(in_directory):
    small = "checkpoint.max_replay_mb=0.001"
    with pytest.warns(EvorlWarning, match="checkpoint.max_replay_mb 0.001, and is not kept; a resumed run"):
        assert train("run.name=a", small) == 0
    assert not list((in_directory / "runs" / "a" / "checkpoints").rglob("replay*"))
    exact = "this resume is not bit-exact: .*the replay was too large to be kept"
    with pytest.warns(EvorlWarning, match="is not kept"), pytest.warns(EvorlWarning, match=exact):
        assert train("run.name=a", small, "run.resume=auto", "training.max_steps=200") == 0


HOLD = """
import sys, time
from pathlib import Path
from evorl.system.files import Lock, is_locked
lock = Lock(Path(sys.argv[1]), 0)
lock.sign({"host": "here", "pid": 1})
print("held", flush=True)
time.sleep(60)
"""


def test_lock_is_exclusive_and_ends_with_its_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=r"run.name: .* is in use by process 1 on here; wait for its end or choose"):
        Lock(tmp_path, wait=0.2)
    holder.send_signal(signal.SIGKILL)
    lock = Lock(tmp_path, wait=5)
    lock.sign({"pid": 3})
    holder.wait()
    holder.stdout.close()
    assert json.loads((tmp_path / ".lock").read_text()) == {"pid": 3}
    lock.release()


def test_a_lock_has_an_owner_at_every_moment(tmp_path, monkeypatch):
    """A launch that is started again knows its run by the owner, also if a signal came as that was recorded."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    lock = Lock(tmp_path, wait=0)
    lock.sign({"launch": "a long name"})
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [lock.sign({"launch": name}) for name in ("b", "a long name") * 500])
        while not writing.done():
            assert read_object(lock.path)
    lock.release()


def test_lock_is_not_kept_by_a_forked_child(tmp_path):
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        lock = Lock(tmp_path, wait=0)
        if os.fork() == 0:
            # Only now has it closed its copy of the lock.
            os.write(writer, f"{os.getpid()} {lock.path}".encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(reader, 1000).split()[0])
    assert is_locked(tmp_path)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        os.kill(child, 0)
        Lock(tmp_path, wait=1).release()
    finally:
        os.kill(child, signal.SIGKILL)


def check_ended_in_order(run, number, error):
    assert "Traceback" not in error
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == number.name
    assert summary["generations"] >= 2
    kept = Checkpoints(run / "checkpoints")
    kept.verify(kept.generations()[-1])


def test_ctrl_c_ends_a_run_in_order(tmp_path, forked_launch):
    done = forked_launch(
        tmp_path, "run.name=a", "training.max_steps=1000000", "checkpoint.keep=1000", processes=1,
        stop_at="runs/a/checkpoints/generation-000002", stop_with=signal.SIGINT,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGINT
    check_ended_in_order(tmp_path / "runs" / "a", signal.SIGINT, done.stderr)


@pytest.mark.parametrize("name", ["2024-06-01", "x: y"])
def test_a_resumed_run_may_have_a_name_that_yaml_reads_otherwise(name, tmp_path):
    run = tmp_path / "e #1" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config().to_yaml())
    _, arguments, _ = resumption(run, [], None, 1)
    resumed = config(*arguments[2:]).run
    assert (resumed.directory, resumed.name, resumed.resume) == (run.parent, name, "auto")


def test_a_resumed_run_stays_in_its_directory(trained_run):
    with pytest.raises(UserError, match=r"a resumed run stays in its directory, .* with population\.from="):
        resumption(trained_run, ["run.name=other"], None, None)
    with pytest.raises(UserError, match="evorl branch"):
        resumption(trained_run, ["algorithm.learning_rate=0.005"], None, 1)


def test_a_signal_ends_a_program_in_order_and_processes_of_environments_do_not_hold_it_up(tmp_path):
    environment = "{id: 'helpers.faults:Failing-v0', vectorization: async, kwargs: {how: nothing}}"
    command = [
        sys.executable, str(ROOT / "demos" / "online.py"), "--config", str(SMALL),
        "run.name=a", "training.max_steps=1000000", "checkpoint.keep=1000", f"environment={environment}",
    ]  # fmt: skip
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    run = tmp_path / "runs" / "a"
    process = subprocess.Popen(
        command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True,
        # Under nohup the tests inherit a signal that is ignored, which a run rightly leaves so.
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )  # fmt: skip
    try:
        while not (run / "checkpoints" / "generation-000002").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        _, error = process.communicate(timeout=45)  # The environments' processes would sleep for longer.
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    check_ended_in_order(run, signal.SIGTERM, error)


def test_resume_goes_on_as_the_run_was_begun(run, tmp_path):
    program = ROOT / "demos" / "online.py"
    command = launch_command(*resumption(run, ["training.max_steps=200"], program, None))
    assert command[:2] == [sys.executable, str(program)]
    assert command[-3:] == [f'run.directory="{run.parent}"', 'run.name="a"', "run.resume=auto"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert lines(run / "metrics.jsonl")[-1]["agent_steps"] >= 196
    assert resumption(run, [], program, 2)[2] == 2
    with pytest.raises(UserError, match=r"algorithm.gamma was 0.99 and is now 0.5"):
        resumption(run, ["algorithm.gamma=0.5"], program, None)
    with pytest.raises(UserError, match="there is no run here"):
        resumption(tmp_path / "nothing", [], program, None)
