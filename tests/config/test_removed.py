"""Settings that were removed: old runs stay readable, and who sets one is told what to do instead."""

import shutil

import pytest
import yaml
from helpers.support import ROOT, SMALL, config, error_line

import evorl
from evorl.algorithms import SETTINGS
from evorl.commands.command import run_command
from evorl.commands.train import resume_command
from evorl.config import override, read_yaml, validate, without_removed
from evorl.config.removed import REMOVED
from evorl.runs.program import run_program
from evorl.types import UserError

OTHERS = {
    "run.lock_timeout": 60.0, "tracking.tags": ["atari"], "evolution.every": 2, "algorithm.weigh_by_staleness": True,
    "evolution.architecture.max_convolutions": 4, "evolution.architecture.max_kernel": 5,
}  # fmt: skip
"""Values that somebody set; of all others it is `mine`."""


def with_all(settings, others=False):
    """A whole configuration as an earlier revision wrote it."""
    data = yaml.safe_load(settings.to_yaml())
    each = {path: OTHERS.get(path, "mine") if others else removed.default for path, removed in REMOVED.items()}
    return override(data, [f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in each.items()])


def test_a_whole_configuration_of_an_earlier_revision_is_the_same_without_them():
    settings = config("algorithm={name: a3c_shared}")
    data = with_all(settings)
    assert validate(data, SETTINGS) == settings
    assert (
        without_removed(with_all(settings, others=True)) == without_removed(data) == yaml.safe_load(settings.to_yaml())
    )


@pytest.mark.parametrize("path", REMOVED)
def test_one_line_says_what_to_do_instead(path):
    value = OTHERS.get(path, "mine")
    with pytest.raises(UserError) as error:
        validate(override(read_yaml(SMALL), [f"{path}={yaml.safe_dump(value, default_flow_style=True)}"]), SETTINGS)
    assert str(error.value).startswith(f"{path}: removed; leave it out")
    assert str(error.value).endswith(REMOVED[path].instead)


def test_runs_that_have_them_are_read_and_resumed_only_without_them(trained_run, in_directory, capsys):
    run = in_directory / "runs" / "old"
    shutil.copytree(trained_run, run)
    data = override(read_yaml(run / "config.yaml"), ["tracking.group=seeds", "evolution.every=1", "run.lock_timeout=5"])
    data["tracking"]["exclude"] = ["tracking.group"]
    (run / "config.yaml").write_text(yaml.safe_dump(data))
    assert evorl.load(run).config.tracking.exclude == ("tracking.group",)
    for command in (["list"], ["lineage", str(run), "--settings"], ["evaluate", str(run), "--episodes", "1"]):
        assert run_program(run_command, command) == 0
    capsys.readouterr()
    assert run_program(run_command, ["resume", str(run)]) == 2
    line = error_line(capsys)
    assert "tracking.group: removed; leave it out (to resume a run that sets it, add tracking.group=null)" in line
    assert "run.lock_timeout: removed" in line
    assert "evolution.every" not in line
    given = ["tracking.group=null", "run.lock_timeout=10.0", "training.max_steps=160"]
    assert set(given) < set(resume_command(run, given, ROOT / "demos" / "online.py", None))
    for moved in ("run.name=other", "run={name: other}", "--run.resume=never"):
        with pytest.raises(UserError, match=r"a resumed run stays in its directory, .* with population\.from="):
            resume_command(run, [moved], ROOT / "demos" / "online.py", None)
