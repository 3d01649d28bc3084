"""A run's end says what became of it: 0 only if everything is kept, else what went wrong and where."""

import errno
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import faults
from helpers.support import lines, train
from wandb.sdk.lib.exit_hooks import ExitHooks

from evorl.commands.command import run_command
from evorl.distributed import RankLost, Ranks
from evorl.envs import Environments
from evorl.envs.faults import closing
from evorl.runs.program import run_program
from evorl.runs.run import Run
from evorl.types.outcomes import EvorlWarning, RunFailed

FAILING = (
    "environment={{id: 'helpers.faults:Failing-v0', num_envs: 2, carry_over: false,"
    " kwargs: {{how: {how}, seeds: all}}}}"
)

RECORDED = "environment={{id: 'helpers.faults:Recorded-v0', num_envs: 2, kwargs: {{file: log, how: '{how}'}}}}"


def errors_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(("how", "code"), [("bug", 2), ("signal", 143), ("raise", 0), ("hang", 0), ("fails", 1)])
def test_environments_are_closed_in_every_way_of_ending_and_change_no_exit_code(
    how, code, in_directory, monkeypatch, capsys
):
    if how == "hang":
        monkeypatch.setattr(closing, "CLOSE_WITHIN", 0.2)
        monkeypatch.setattr(closing, "AFTER_A_HANG", 0.3)
    monkeypatch.setattr(closing, "_problems", set())
    monkeypatch.setattr(closing, "_hanging", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        if how == "fails":
            monkeypatch.setattr(Run, "record", fail)
        assert train("run.name=a", RECORDED.format(how=how)) == code
    assert not faults.still_open(in_directory / "log")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: environment.id")]
    assert len(said) == (how in ("raise", "hang"))


def fail(*arguments):
    raise RunFailed("enough")


def test_a_lost_rank_is_told_though_the_launchers_signal_follows(in_directory, capsys, monkeypatch):
    def lose(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        raise RankLost("rank 0 waited for the other ranks' metrics, but rank 1 has ended")

    monkeypatch.setattr(Run, "record", lose)
    assert train("run.name=a", RECORDED.format(how="")) == 1
    assert errors_of(capsys) == ["error: rank 0 waited for the other ranks' metrics, but rank 1 has ended"]
    assert json.loads((in_directory / "runs" / "a" / "summary.json").read_text())["ended"] == "RankLost"


@pytest.mark.parametrize("at", [30, 31], ids=["training", "evaluation"])
def test_a_run_whose_environment_raised_goes_on_once_it_is_mended(at, in_directory, capsys, monkeypatch):
    """It raises in the second generation, in the copies with this argument."""
    kwargs = "environment.kwargs.at=30", "evaluation.environment={kwargs: {at: 31}}"
    settings = RECORDED.format(how=""), *kwargs, "training.max_steps=400"
    assert train("run.name=whole", *settings) == 0
    step = faults.Recorded.step

    def breaks(environment, action):
        if environment.at == at and (in_directory / "runs" / "a" / "checkpoints" / "generation-000001").exists():
            environment._look_up({})
        return step(environment, action)

    with monkeypatch.context() as broken:
        broken.setattr(faults.Recorded, "step", breaks)
        assert train("run.name=a", *settings) == 2
    (error,) = errors_of(capsys)
    assert "error: environment.id: environment 0 of agent 0 (helpers.faults:Recorded-v0, step 1 of the" in error
    assert error.endswith('in _look_up: return info["reward"])')
    assert json.loads((in_directory / "runs" / "a" / "summary.json").read_text())["ended"] == "EnvironmentRaised"
    assert not faults.still_open(in_directory / "log")
    assert train("run.name=a", *settings, "run.resume=auto") == 0
    for name in ("lineage.jsonl", "elite/agent.safetensors"):
        whole, resumed = ((in_directory / "runs" / run / name).read_bytes() for run in ("whole", "a"))
        assert whole == resumed


@pytest.mark.parametrize(("how", "code"), [("", 0), ("signal", 143)], ids=["after a generation", "within one"])
def test_what_an_environment_raises_while_a_run_resumes_is_no_fault_of_the_checkpoint(
    how, code, in_directory, capsys, monkeypatch
):
    settings = RECORDED.format(how=how), "environment.carry_over=true", "evaluation.episodes=1"
    assert train("run.name=a", *settings, "training.max_steps=100") == code
    saved = sorted((in_directory / "runs" / "a").rglob("*.safetensors"))
    capsys.readouterr()
    load = Environments.load_state_dict

    def breaks(*arguments, **options):
        monkeypatch.setattr(faults.Recorded, "reset", lambda environment, **_: environment._look_up({}))
        return load(*arguments, **options)

    monkeypatch.setattr(Environments, "load_state_dict", breaks)
    assert train("run.name=a", *settings, "training.max_steps=400", "run.resume=auto") == 2
    (error,) = errors_of(capsys)
    assert error.startswith("error: environment.id: environment 0 of agent 0 (helpers.faults:Recorded-v0, step 0 of")
    assert sorted((in_directory / "runs" / "a").rglob("*.safetensors")) == saved


def test_evaluate_closes_the_environments(in_directory, monkeypatch):
    assert train("run.name=a", RECORDED.format(how="")) == 0
    (in_directory / "log").unlink()
    monkeypatch.setattr(faults.Recorded, "step", lambda environment, action: environment._look_up({}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        assert run_program(run_command, ["evaluate", "runs/a", "--episodes", "3", "--allow-code"]) == 2
    assert "made" in (in_directory / "log").read_text()
    assert not faults.still_open(in_directory / "log")


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("interrupt", 1, "in _raise: raise KeyboardInterrupt) ended the run"),
        ("panic", 2, "environment.id: environment 0 of agent 0 (helpers.faults:Failing-v0, step 2 of the"),
        ("no_grad", 0, ""),
    ],
)
def test_what_an_environment_does_to_its_process_is_told_in_one_line(how, code, line, in_directory, capfd):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EvorlWarning)
            assert train("run.name=a", FAILING.format(how=how)) == code
    finally:
        torch.set_grad_enabled(True)
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert line in told
    assert bool(line) == ("error: " in told)


def test_an_environment_that_exits_ends_the_run_with_1(in_directory, capsys, monkeypatch):
    monkeypatch.setattr(sys, "exit", sys.exit)
    ExitHooks().hook()  # As a run does that W&B records.
    assert train("run.name=a", FAILING.format(how="exit")) == 1
    (error,) = errors_of(capsys)
    assert "faults.py:" in error
    assert "in _raise: sys.exit(0)) ended the run" in error
    assert json.loads((in_directory / "runs" / "a" / "summary.json").read_text())["ended"] == "SystemExit"


@pytest.mark.two_process
def test_an_environment_that_exits_on_one_rank_ends_both_and_is_named(tmp_path, forked_launch):
    exits, stays = FAILING.format(how="exit"), FAILING.format(how="none")
    choose = f"import os; arguments.append({exits!r} if os.environ['RANK'] == '1' else {stays!r})"
    done = forked_launch(tmp_path, "run.name=a", "run.timeout=20", first=choose)
    assert done.returncode != 0
    assert any("sys.exit(0)) ended the run" in line for line in done.stderr.splitlines() if line.startswith("error: "))
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["ended"] in ("RankLost", "SIGTERM")
    assert "rank 1" in summary["because"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk that is full after so many kB; nothing but root can make one."""
    mounted = []

    def make(kilobytes):
        place = tmp_path / "disk"
        place.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(place)], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip("no disk can be mounted here")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kilobytes", [16, 128])
def test_run_on_a_full_disk_fails(kilobytes, small_disk, in_directory, capsys):
    place = small_disk(kilobytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        code = train(f"run.directory={place}", "run.name=a", "checkpoint.keep=20")
    (error,) = errors_of(capsys)
    assert code in (1, 2)
    assert "No space left on device" in error
    if code == 2:
        assert "cannot write to" in error, "nothing has begun"


def test_an_elite_that_cannot_be_written_is_tried_again_at_the_end(in_directory, monkeypatch):
    from evorl.runs.output.logger import Logger
    from evorl.runs.storage.directory import RunDirectory

    write, close, is_full = RunDirectory.write_elite, Logger.close, []

    def full(self, payload):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", "elite")
        write(self, payload)
        is_full.append(True)  # from the second elite on

    def closing(self, summary):
        is_full.clear()
        return close(self, summary)

    monkeypatch.setattr(RunDirectory, "write_elite", full)
    monkeypatch.setattr(Logger, "close", closing)
    with pytest.warns(
        EvorlWarning, match="elite: No space left on device; training continues, and the write will be retried"
    ):
        assert train("run.name=a", "training.max_steps=400") == 0
    newest = max((in_directory / "runs" / "a" / "checkpoints").glob("generation-*")) / "elite.safetensors"
    written = (in_directory / "runs" / "a" / "elite" / "agent.safetensors").read_bytes()
    assert written == newest.read_bytes()


def test_a_run_whose_directory_is_moved_or_removed_ends_and_makes_no_other(in_directory, monkeypatch, capsys):
    path, elsewhere, record = in_directory / "runs" / "a", in_directory / "elsewhere", Run.record

    def moved(run, *arguments):
        if run.progress.generation == 2:
            path.rename(elsewhere)
        return record(run, *arguments)

    monkeypatch.setattr(Run, "record", moved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        settings = "tracking={backends: [tensorboard], video: true}"
        assert train("run.name=a", "training.max_steps=400", settings) == 1
    (error,) = errors_of(capsys)
    assert "runs/a: the directory of this run was moved or removed while it trained (.lock is missing)" in error
    assert not path.exists()
    assert (elsewhere / "config.yaml").is_file()


def test_full_memory_is_one_line_and_says_what_to_lower(capsys):
    def fails(arguments):
        with Ranks()._waiting("the gradients"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    assert run_program(fails, []) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in told
    assert "lower population.size, environment.num_envs, algorithm.batch_size or replay.capacity" in told
    assert run_program(lambda arguments: torch.empty(2**62, dtype=torch.uint8), []) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "DefaultCPUAllocator: can't allocate memory" in told


def test_elite_is_measured_anew_under_another_max_steps(in_directory):
    settings = "run.name=a", "evaluation.episodes=2", "evaluation.confirmation_episodes=4"
    assert train(*settings, "training.max_steps=80", "evaluation.max_steps=5") == 0
    with pytest.warns(EvorlWarning, match="not bit-exact: evaluation.max_steps changed from 5 to 9"):
        assert train(*settings, "training.max_steps=120", "evaluation.max_steps=9", "run.resume=auto") == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert {rows[1]["elite_fitness"], rows[-1]["elite_fitness"]} == {5.0, 9.0}, "CartPole gives 1 for each step"


def test_resume_warns_of_other_versions_and_settings(in_directory, monkeypatch):
    assert train("run.name=a", "training.max_steps=40") == 0
    newest = max((in_directory / "runs" / "a" / "checkpoints").iterdir())
    assert json.loads((newest / "state.json").read_text())["made_with"].keys() >= {"torch", "numpy", "cpu", "threads"}
    from evorl.runs.storage import progress

    with pytest.warns(EvorlWarning, match="not bit-exact: run.kernel changed from .* to torch"):
        assert train("run.name=a", "run.resume=auto", "training.max_steps=60", "run.kernel=false") == 0
    here = progress.made_with
    monkeypatch.setattr(progress, "made_with", lambda device: here(device) | {"torch": "9.9"})
    with pytest.warns(EvorlWarning, match="this resume is not bit-exact: torch changed from .* to 9.9"):
        assert train("run.name=a", "run.resume=auto", "training.max_steps=80", "run.kernel=false") == 0
    assert len(lines(in_directory / "runs" / "a" / "metrics.jsonl")) >= 2
