"""Runs that somebody has prepared: one line says what is wrong, and nothing outside them is touched."""

import json
import os
import re
import time

import pytest
import torch
from helpers.forged import DESCRIBED, forge, hostile
from helpers.support import contents, error_line, train

from evorl.commands.command import run_command
from evorl.runs.program import run_program
from evorl.runs.reading.loaded import load
from evorl.runs.reading.read import read_run
from evorl.system.files import entry, read_bytes, refuse_links_within, write_atomically
from evorl.system.formats import decode_tensors, encode_tensors
from evorl.types.outcomes import UserError

RESUME = ("run.name=a", "run.resume=auto", "training.max_steps=200")
REPLAY = "experience-rank-000.safetensors"


def refused(capsys, *overrides):
    """The one line with which a run ends that is resumed."""
    capsys.readouterr()
    assert train(*(overrides or RESUME)) == 2
    return error_line(capsys)


def evaluate(run, capsys):
    capsys.readouterr()
    began = time.perf_counter()
    assert run_program(run_command, ["evaluate", str(run), "--episodes", "1"]) == 2
    assert time.perf_counter() - began < 10
    error = error_line(capsys)
    assert len(error) < 1200
    return error


@pytest.mark.parametrize("change", ["a huge layer", "no state"])
def test_evaluate_refuses_a_hostile_elite(change, run, capsys):
    elite = run / "elite" / "agent.safetensors"
    elite.write_bytes(hostile(**DESCRIBED[change]))
    assert str(elite.parent) in evaluate(run, capsys)


def test_evaluate_does_not_wait_for_a_pipe(run, capsys):
    elite = run / "elite" / "agent.safetensors"
    elite.unlink()
    os.mkfifo(elite)
    assert f"{elite}: is neither a file nor a directory" in evaluate(run, capsys)
    with pytest.raises(OSError, match="not a file"):
        read_bytes(elite)


@pytest.mark.parametrize("name", ["../../x", "config.yaml"])
def test_a_manifest_cannot_reach_out_of_its_checkpoint(name, run, capsys):
    (run / "x").write_bytes(b"mine")
    checkpoints = forge(run, {}, {name: entry(b"mine")})
    with pytest.raises(UserError, match=r"manifest.json: lists .* no checkpoint has"):
        checkpoints.verify(3)
    with pytest.raises(UserError, match=r"manifest.json: lists .* no checkpoint has"):
        checkpoints.read(3, name)


def test_link_in_place_of_a_partial_file_is_not_followed(run, tmp_path, monkeypatch):
    """Only names that a run writes before it renames them; the next write would go where the link leads."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    (run / "checkpoints" / ".partial-generation-000004").symlink_to(tmp_path / "thesis")
    assert train(*RESUME) == 0
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text"]
    # Also where a link appears while the run trains.
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (run / "elite" / ".agent.safetensors.guessed.partial").symlink_to(tmp_path / "thesis" / "text")
    with pytest.raises(OSError, match="a symbolic link, which is not followed"):
        write_atomically(run / "elite" / "agent.safetensors", b"new")
    assert (tmp_path / "thesis" / "text").read_text() == "mine"


PLACES = ("config.yaml", "checkpoints", "notes/deeper/any")
COMMANDS = (
    ("resume", "."), ("evaluate", ".", "--episodes", "1"), ("export", "."), ("watch", ".", "--video", "film.mp4"),
    ("lineage", "."), ("plot", "."), ("report", "."),
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_link_at_any_depth_of_a_run_is_refused_by_each_command(place, run, tmp_path, monkeypatch, capsys):
    """The run is the working directory, in which some commands write by default."""
    outside, link = tmp_path / "outside", run / place
    if link.exists():
        link.rename(outside)
    elif link.suffix or "/" in place:
        outside.write_text("mine")
    else:
        outside.mkdir()
    before = contents(outside)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    monkeypatch.chdir(run)
    monkeypatch.setattr("evorl.export.hub.check_hub", lambda *names: None)
    for command in (*COMMANDS, ("push", ".", "me/x")):
        capsys.readouterr()
        assert run_program(run_command, command) == 2
        assert f"{place}: is a symbolic link" in error_line(capsys)
    with pytest.raises(UserError, match="is a symbolic link"):
        load(run, generation=2)
    monkeypatch.chdir(run.parent.parent)
    assert train(*RESUME, "tracking.video=true") == 2
    assert "symbolic link" in error_line(capsys)
    assert contents(outside) == before
    assert link.is_symlink()


@pytest.mark.parametrize("output", ["plot.png", "agent.onnx"])
def test_nothing_is_written_through_a_link(output, run, tmp_path, monkeypatch, capsys):
    """Neither where the user names it, outside of any run."""
    pytest.importorskip({"plot.png": "matplotlib", "agent.onnx": "onnx"}[output])
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / output).symlink_to(tmp_path / "thesis")
    commands = {
        "plot.png": ("plot", "runs/a", "-o", str(tmp_path / output)),
        "agent.onnx": ("export", "runs/a", "-o", str(tmp_path / output)),
    }
    assert run_program(run_command, commands[output]) == 2
    assert f"{output}: a symbolic link, which is not followed" in capsys.readouterr().err
    assert (tmp_path / "thesis").read_text() == "mine"
    assert not list(tmp_path.glob(".*.partial"))
    (tmp_path / output).unlink()
    assert run_program(run_command, commands[output]) == 0
    assert (tmp_path / output).stat().st_size > 1000
    capsys.readouterr()
    for replaced in (False, True):
        assert run_program(run_command, commands[output][:2]) == 0
        assert (run / output).stat().st_size > 1000, "by default it is in the run"
        assert ("replaces the one before" in capsys.readouterr().out) == (replaced and output == "plot.png")


def test_links_that_wandb_makes_are_no_reason_to_refuse_a_run(run, tmp_path):
    logs = run / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache")
    (run / "wandb" / "latest-run").symlink_to("offline-run-1")
    refuse_links_within(run)
    (run / "next" / "wandb").mkdir(parents=True)
    (run / "next" / "wandb" / "latest-run").symlink_to("offline-run-1")
    with pytest.raises(UserError, match="next/wandb/latest-run: is a symbolic link"):
        refuse_links_within(run)


STATES = {"an extra key": ({"password": "x"}, "password"), "no ranks": ({"ranks": 0}, "ranks")}


@pytest.mark.parametrize(("change", "key"), STATES.values(), ids=STATES)
def test_checkpoint_state_out_of_range_is_refused(change, key, run, capsys):
    state = json.loads((run / "checkpoints" / "generation-000003" / "state.json").read_bytes())
    metrics = (run / "metrics.jsonl").read_bytes()
    forge(run, {"state.json": json.dumps(state | change).encode()})
    assert f"generation-000003/state.json: {key}: " in refused(capsys)
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_replay_whose_numbers_or_tensors_lie_is_refused(run, capsys):
    path = run / "checkpoints" / "generation-000003" / REPLAY
    state = decode_tensors(path.read_bytes(), "here")
    for lie in ({"rows": torch.tensor(10**7)}, {"valid": state["valid"][:-1]}):
        forge(run, {REPLAY: encode_tensors(state | lie)})
        assert REPLAY in refused(capsys)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_directory_in_place_of_a_file_is_refused(name, run, capsys):
    (run / name).unlink()
    (run / name).mkdir()
    assert re.search(f"{name}: (not a file|Is a directory)", refused(capsys))
    with pytest.raises(UserError, match=f"{name}: not a file"):
        read_run(run)
