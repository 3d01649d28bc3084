"""Generations that are saved and resumed between two of their steps."""

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from helpers.support import demo, lines
from robustness.comparison import differences
from robustness.systems import CASES

from evorl.commands.train import ranks_of
from evorl.envs.stepped import OBSERVATION_PREFIX
from evorl.runs import run
from evorl.runs.program import run_program
from evorl.runs.storage import checkpoint
from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.system.files import entry
from evorl.system.formats import decode_tensors, encode_tensors
from evorl.types.outcomes import EvorlWarning

CASE = "dqn-prioritised"


def play(name, case=CASE, stop_after=None, *, monkeypatch, more=()):
    """Train or resume a run, with SIGTERM in the given vector step of this process; give its exit code."""
    given = run.Run.steps

    def steps(self, *arguments, **keywords):
        for step, number in zip(given(self, *arguments, **keywords), counted, strict=False):
            if number == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    counted = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "steps", steps)
        settings = (*CASES[case], f"run.name={name}", "run.resume=auto", *more)
        return run_program(demo(), [*settings])


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A function that copies a run, stopped in the given step, to `runs/b`; each is trained once."""
    made = {}

    def copy(case, step):
        if (case, step) not in made:
            directory = tmp_path_factory.mktemp("stopped")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(directory)
                assert play("b", case, step, monkeypatch=patch) == 143
            made[case, step] = directory / "runs" / "b"
        shutil.copytree(made[case, step], "runs/b")
        (place,) = saved("b")
        return place

    return copy


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that was left alone, with the settings of `CASE`."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert play("a", monkeypatch=patch) == 0
    return directory / "runs" / "a"


def refusal(capsys):
    """The error with which a run ended, in its last line."""
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def saved(name):
    """The interim checkpoints of a run."""
    return sorted(path for path in Path(f"runs/{name}/checkpoints").iterdir() if "interim" in path.name)


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.usefixtures("in_directory")
def test_trackers_go_on_at_the_step_where_a_resumed_generation_does(stopped_run, monkeypatch):
    points = []
    monkeypatch.setattr("evorl.runs.output.metrics.INTERVAL", 1e-6)
    monkeypatch.setattr("evorl.runs.output.logger.Trackers.log_within", lambda self, step, _: points.append(step))
    assert play("a", monkeypatch=monkeypatch) == 0
    whole = points.copy()
    stopped_run(CASE, 12)
    points.clear()
    assert play("b", monkeypatch=monkeypatch) == 0
    assert 0 < len(points) < len(whole)
    assert points == whole[-len(points) :]


ALL_STOPS = (3, 9, 12, 17)
"""Steps before the first update, within rollouts, and right before a generation ends."""


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("dqn-prioritised", ALL_STOPS),
        ("ppo-recurrent", ALL_STOPS),
        ("dqn-recurrent-running", ALL_STOPS),
        ("sac-state-dependent", ALL_STOPS),
        ("td3-running", (9, 17)),
    ],
)
def test_run_stopped_within_generations_ends_as_undisturbed(case, stops, in_directory, whole_run, monkeypatch, capsys):
    whole = whole_run if case == CASE else Path("runs/a")
    if case != CASE:
        assert play("a", case, monkeypatch=monkeypatch) == 0
    for step in stops:
        assert play("b", case, step, monkeypatch=monkeypatch) == 143
        told = capsys.readouterr().err
        assert re.search(r"goes on within generation \d+ after [\d,]+ of [\d,]+ steps of each agent\n", told)
        assert len(saved("b")) == 1
    assert play("b", case, monkeypatch=monkeypatch) == 0
    assert re.search(r"going on within generation \d+ after [\d,]+ of", capsys.readouterr().err)
    assert differences(whole, Path("runs/b")) == []
    assert saved("b") == []


def test_interim_checkpoints_change_no_result(whole_run, in_directory, monkeypatch):
    saves, given = [], checkpoint.CheckpointManager.save_within

    def save(self, *arguments):
        saves.append(arguments)
        return given(self, *arguments)

    monkeypatch.setattr(checkpoint.CheckpointManager, "save_within", save)
    assert play("b", monkeypatch=monkeypatch, more=("checkpoint.minutes=1e-5",)) == 0
    assert len(saves) > 10
    assert differences(whole_run, Path("runs/b")) == []


@pytest.mark.usefixtures("in_directory")
def test_damaged_interim_checkpoint_is_set_aside(whole_run, stopped_run, monkeypatch):
    place = stopped_run(CASE, 30)
    file = place / "learner-rank-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(EvorlWarning, match=r"learner-rank-000.safetensors: damaged; .*; its generation starts over"):
        assert play("b", monkeypatch=monkeypatch) == 0
    assert [path.name for path in saved("b")] == [f"damaged-{place.name}"]
    assert all(f"damaged-{place.name}/" in name for name in differences(whole_run, Path("runs/b")))


def rewritten(place, name, change):
    """Write an interim checkpoint again with one file changed, and a manifest that says so."""
    checkpoints = Checkpoints(place.parent, stem="interim")
    number = int(place.name[-6:])
    payload = change((place / name).read_bytes())
    files = dict(checkpoints.files(number)) | {name: entry(payload)}
    for each in files:
        checkpoints.write(number + 1, each, payload if each == name else (place / each).read_bytes())
    checkpoints.complete(number + 1, files)


def with_tensors(change):
    """A file with its tensors changed in place."""

    def changed(payload):
        tensors = decode_tensors(payload, "a file")
        change(tensors)
        return encode_tensors(tensors)

    return changed


@pytest.mark.parametrize(
    ("part", "lie", "says"),
    [
        ("policy", lambda t: t.update(flat=t["flat"][1:]), "tensor 'flat' is torch.float32"),
        ("experience", lambda t: t["counters.steps"].fill_(float("nan")), "counters are not finite"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("in_directory")
def test_interim_checkpoint_with_wrong_tensors_is_refused(part, lie, says, stopped_run, monkeypatch, capsys):
    place = stopped_run(CASE, 30)
    rewritten(place, f"{part}-rank-000.safetensors", with_tensors(lie))
    capsys.readouterr()
    assert play("b", monkeypatch=monkeypatch) == 2
    told = refusal(capsys)
    assert says in told
    assert "interim-000000" not in told


@pytest.mark.usefixtures("in_directory")
def test_a_program_that_saves_nothing_within_generations_refuses_to_resume_within_one(stopped_run, monkeypatch, capsys):
    stopped_run(CASE, 30)
    given = run.Run.steps
    monkeypatch.setattr(run.Run, "steps", lambda self, **keywords: given(self))
    capsys.readouterr()
    assert run_program(demo(), [*CASES[CASE], "run.name=b", "run.resume=auto"]) == 2
    assert "was saved within a generation; give `Run.steps` its parts" in refusal(capsys)


@pytest.mark.usefixtures("in_directory")
def test_interim_checkpoint_that_lacks_a_part_of_its_state_is_not_used(stopped_run, monkeypatch):
    place = stopped_run(CASE, 30)

    def changed(payload):
        state = json.loads(payload)
        del state["global_steps"]
        return json.dumps(state).encode()

    rewritten(place, "state.json", changed)
    with pytest.warns(EvorlWarning, match="its generation starts over"):
        assert play("b", monkeypatch=monkeypatch, more=("training.max_steps=96",)) == 0


@pytest.mark.usefixtures("in_directory")
def test_interim_checkpoint_whose_episodes_cannot_be_replayed_is_not_used(stopped_run, whole_run, monkeypatch):
    place = stopped_run(CASE, 30)
    name = "environments-rank-000.safetensors"
    names = [key for key in decode_tensors((place / name).read_bytes(), "it") if key.startswith(OBSERVATION_PREFIX)]
    rewritten(place, name, with_tensors(lambda tensors: tensors[names[0]].add_(1)))
    with pytest.warns(EvorlWarning, match="cannot be replayed in .*starts over"):
        assert play("b", monkeypatch=monkeypatch) == 0
    steps = [[row["agent_steps"] for row in lines(run / "metrics.jsonl")] for run in (whole_run, Path("runs/b"))]
    assert steps[0] == steps[1]


@pytest.mark.usefixtures("in_directory")
@pytest.mark.parametrize("step", [20, 700])
def test_a_signal_in_a_call_that_swallows_every_exception_ends_the_run(step, capsys):
    """In a training step, which is saved, and in an evaluation step, which is not."""
    run, many = "run.name=a", "evaluation.episodes=60"
    settings = ("algorithm.name=ppo", "population.size=2", "evolution.steps=32", "environment.num_envs=1", many, run)
    environment = ("environment.id=helpers.faults:Swallows", f"environment.kwargs.step={step}")
    assert run_program(demo(), [*settings, *environment, "tracking.backends=[]"]) == 128 + signal.SIGTERM
    told = capsys.readouterr().err
    saved = "a resumed run goes on within generation 1 after "
    assert (saved if step == 20 else "there is no checkpoint yet, and a resumed run starts over\n") in told
    assert json.loads(Path("runs/a/summary.json").read_bytes())["ended"] == "SIGTERM"


@pytest.mark.usefixtures("in_directory")
def test_a_signal_after_the_evaluation_lets_the_generation_be_saved(monkeypatch):
    def told(generation):
        os.kill(os.getpid(), signal.SIGUSR1)

    main = demo()
    arguments = [*CASES[CASE], "run.name=b"]
    assert run_program(lambda given: main(given, [told]), arguments) == 128 + signal.SIGUSR1
    assert Checkpoints(Path("runs/b/checkpoints")).generations() == [1]
    assert json.loads(Path("runs/b/summary.json").read_bytes())["ended"] == "SIGUSR1"


@pytest.mark.usefixtures("in_directory")
def test_a_run_without_a_checkpoint_says_that_it_cannot_be_resumed(monkeypatch, capsys):
    def told(generation):
        if generation.number == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(checkpoint.CheckpointManager, "save", lambda *given: "the disk is full")
    main = demo()
    assert run_program(lambda given: main(given, [told]), [*CASES[CASE], "run.name=b"]) == 128 + signal.SIGUSR1
    assert "no checkpoint could be written, so the run cannot be resumed\n" in capsys.readouterr().err


HOLD = """
import time
from evorl.runs.run import Run
from evorl.system.signals import signalled

given, deadline = Run._pause, time.monotonic() + 60

def pause(self, *arguments):
    given(self, *arguments)
    while "within" in self._resumes and signalled() is None and time.monotonic() < deadline:
        time.sleep(0.005)

Run._pause = pause
"""
"""Ranks that wait for a signal once they have saved, which would otherwise reach some after the generation."""


@pytest.mark.two_process
def test_two_ranks_stop_together_and_go_on(tmp_path, forked_launch):
    settings = (*CASES["dqn-prioritised"], "population.placement=sharded", "evolution.steps=1000",
                "training.max_steps=2000", "run.name=b")  # fmt: skip
    forked_launch.well(tmp_path, *settings, "run.name=a", configuration=None)
    often, saved_first = "checkpoint.minutes=0.002", "runs/b/checkpoints/interim-*"
    stopped = forked_launch(tmp_path, *settings, often, configuration=None, first=HOLD, stop_at=saved_first)
    assert "a resumed run goes on within generation" in stopped.stderr
    assert ranks_of(tmp_path / "runs" / "b") == 2
    last = forked_launch.well(tmp_path, *settings, "run.resume=auto", configuration=None)
    assert "going on within generation" in last.stderr
    assert "not bit-exact" not in last.stderr
    assert differences(tmp_path / "runs" / "a", tmp_path / "runs" / "b") == []
    assert len(lines(tmp_path / "runs" / "b" / "metrics.jsonl")) == len(
        lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    )


@pytest.mark.filterwarnings("ignore:.*its generation starts over")
@pytest.mark.parametrize("recorded", [1, 2])
@pytest.mark.usefixtures("in_directory")
def test_a_run_with_nothing_but_an_interim_checkpoint_goes_on_from_it_and_is_never_cut_back(
    recorded, whole_run, monkeypatch, capsys
):
    """As on a disk that was full when each generation was to be saved."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.CheckpointManager, "save", lambda *given: "the disk is full")
        assert play("b", stop_after=24 * recorded + 4, monkeypatch=patch) == 143
    (place,) = saved("b")
    history = Path("runs/b/metrics.jsonl").read_bytes()
    assert len(history.splitlines()) == recorded
    shutil.copytree("runs/b", "runs/c")
    (place / "learner-rank-000.safetensors").unlink()
    for _ in range(2):  # The first attempt sets the damaged one aside.
        capsys.readouterr()
        assert play("b", monkeypatch=monkeypatch) == 2
        assert "has been trained, but none of its checkpoints can be used" in refusal(capsys)
        assert Path("runs/b/metrics.jsonl").read_bytes() == history
        assert Path("runs/b/elite/agent.safetensors").exists()
    assert play("c", monkeypatch=monkeypatch) == 0
    assert differences(whole_run, Path("runs/c")) == []
