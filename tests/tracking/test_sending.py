"""Nothing is sent to another machine before a line has said so."""

import re
import shlex
from types import SimpleNamespace

import pytest
import wandb
from helpers.support import config, train

from evorl.system import extras
from evorl.tracking.trackers import announcements
from evorl.tracking.wandb import WeightsAndBiases

TOLD = "settings, metrics, lineage, printed lines and the best agent go to the project"


@pytest.fixture(autouse=True)
def _fresh_settings():
    """W&B reads its settings once in a process."""
    wandb.teardown()
    yield
    wandb.teardown()


def told(*overrides):
    return announcements(config("tracking.backends=[wandb]", *overrides))


def test_with_a_key_a_line_says_what_is_sent_where_and_how_not_to(monkeypatch):
    assert told() == [], "without a key nothing leaves the machine"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    (line,) = told("tracking.project=mine")
    assert f"{TOLD} 'mine' at api." in line, "W&B's own host"
    assert "`--no-track` (tracking.backends=[])" in line
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert f"{TOLD} 'team/mine'" in told("tracking.project=mine")[0]
    assert announcements(config("tracking.backends=[tensorboard]")) == []


@pytest.mark.parametrize(("mode", "lines"), [("online", 1), ("offline", 0)])
def test_wandb_s_own_variable_decides_before_the_key(mode, lines, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    if not lines:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert len(told()) == lines


def test_a_key_without_a_connection_records_offline(monkeypatch, tmp_path, capsys):
    modes = []

    def unreachable(**arguments):
        modes.append(arguments["mode"])
        if arguments["mode"] == "online":
            raise wandb.errors.CommError("no such host")
        return SimpleNamespace(define_metric=lambda *names, **options: None, starting_step=0, summary={})

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(wandb, "init", unreachable)
    monkeypatch.setattr(wandb, "teardown", lambda: modes.append("torn down"))
    (run := tmp_path / "my run").mkdir()
    WeightsAndBiases(config("tracking.backends=[wandb]"), run)
    assert modes == ["online", "torn down", "offline"], "its helper process holds the run by its id"
    told = re.search(r"so the run is recorded offline; upload it with `(wandb sync .*)`", capsys.readouterr().out)
    assert shlex.split(told[1]) == ["wandb", "sync", str(run / "wandb" / "latest-run")]


def test_a_tracker_that_is_not_installed_is_a_mistake_before_training(in_directory, monkeypatch, capsys):
    monkeypatch.setattr(extras, "missing", lambda extra: ["tensorboard"])
    assert train("tracking.backends=[tensorboard]", "run.name=a") == 2
    assert "tracking.backends: tensorboard needs tensorboard; install it with" in capsys.readouterr().err
    assert not (in_directory / "runs").exists()
