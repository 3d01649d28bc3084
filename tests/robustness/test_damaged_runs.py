"""Fuzzing of runs: files of a run directory that are damaged or malformed are refused in one line, or read without."""

import json
import re
import shutil
import sys
import warnings
from itertools import cycle

import numpy as np
import pytest
import yaml
from helpers.support import contents, lines

from evorl.commands.command import run_command
from evorl.runs.program import run_program
from evorl.types.outcomes import EvorlWarning

COUNT = 3000
"""Inputs of the campaign."""
NAN = float("nan")


def setting(text):
    """A setting of the configuration as YAML has it."""

    def damage(run, rng):
        path, _, value = text.partition("=")
        data = yaml.safe_load((run / "config.yaml").read_text())
        *sections, last = path.split(".")
        section = data
        for name in sections:
            section = section[name]
        section[last] = "PLACE"
        (run / "config.yaml").write_text(yaml.safe_dump(data).replace("PLACE", value))

    return damage


def last_line(name, **changes):
    """Other values in the last line of a log."""

    def damage(run, rng):
        *others, last = lines(run / name)
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in (*others, last | changes)))

    return damage


def member(name, **changes):
    """Other values in a file with one object."""

    def damage(run, rng):
        value = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(value | changes))

    return damage


def file_damage(kind, name):
    """A file of the run, or of its newest checkpoint, that is damaged at a random place."""

    def damage(run, rng):
        path = run / name.replace("NEWEST", max(path.name for path in (run / "checkpoints").iterdir()))
        payload = path.read_bytes()
        at = int(rng.integers(len(payload)))
        path.unlink()
        if kind == "link":
            path.symlink_to(run.parent / "b" / "config.yaml")
        elif kind == "directory":
            path.mkdir()
        elif kind != "missing":
            flipped = payload[:at] + bytes([payload[at] ^ (1 << int(rng.integers(8)))]) + payload[at + 1 :]
            path.write_bytes({"truncated": payload[:at], "flipped": flipped, "noise": rng.bytes(at)}[kind])

    return damage


KINDS = ("truncated", "flipped", "noise", "missing", "link", "directory")
FILES = (
    "config.yaml", "metrics.jsonl", "lineage.jsonl", "summary.json", "elite/agent.json", "elite/agent.safetensors",
    "checkpoints/NEWEST/manifest.json", "checkpoints/NEWEST/state.json", "checkpoints/NEWEST/agents.safetensors",
)  # fmt: skip
TABLE = {
    "target NaN": setting("training.target_fitness=.nan"),
    "seed of 16,000 bits": setting("seed=0x" + "f" * 4000),
    "keys of mixed types": setting("environment.kwargs={1: 2, a: 3}"),
    "fitness NaN": last_line("lineage.jsonl", fitness=NAN),
    "fitness that cannot be squared": last_line("lineage.jsonl", fitness=1e308),
    "fitness of a list": last_line("metrics.jsonl", elite_fitness=[1]),
    "summary: steps of text": member("summary.json", agent_steps="many"),
    "elite: id of a list": member("elite/agent.json", id=[1]),
} | {f"{kind} {name}": file_damage(kind, name) for name in FILES for kind in KINDS}
COMMANDS = {
    "list": ("list", "runs"),
    "lineage": ("lineage", "runs/a"),
    "lineage --settings": ("lineage", "runs/a", "--settings"),
    "evaluate": ("evaluate", "runs/a", "--episodes", "1"),
    "resume": ("resume", "runs/a", "training.max_steps=200"),
    "plot": ("plot", "runs/a", "-o", "plot.svg"),
    "report": ("report", "runs/a", "runs/b"),
    "config": ("config", "runs/a/config.yaml"),
}


@pytest.fixture
def run(run):
    """A run to be damaged, beside one that is not."""
    shutil.copytree(run, run.parent / "b")
    return run


def check(command, run, capsys, monkeypatch):
    """Give a damaged run to a command, which must end with one line of error or none; give its code."""
    for module in ("train", "branch"):
        monkeypatch.setattr(f"evorl.commands.{module}.start", lambda program, arguments, processes: None)
    beside = run.with_name("b")
    before = contents(beside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvorlWarning)
        code = run_program(run_command, COMMANDS[command])
    printed = capsys.readouterr()
    assert code in (0, 2)
    assert all(line.isprintable() for line in (printed.out + printed.err).split("\n"))
    assert [line.startswith("error: ") for line in printed.err.splitlines()].count(True) == (code == 2)
    assert before == contents(beside)
    if command == "list":
        assert code == 0, "a damaged run must not hide the others"
        assert "CartPole-v1" in re.search(r"^b .*", printed.out, re.MULTILINE)[0]
    return code


def skip_without_extras(command):
    for package in ("matplotlib", "plotly", "jinja2"):
        if command in ("plot", "report"):
            pytest.importorskip(package)


SAMPLE = [damage for n, damage in enumerate(TABLE) if (n + n // len(KINDS)) % 4 == 0]
"""A quarter of the damages, of other kinds from file to file."""


@pytest.mark.parametrize(("damage", "command"), [*zip(SAMPLE, cycle(COMMANDS), strict=False)])
def test_damaged_run_is_read_or_refused_in_one_line(damage, command, run, capsys, monkeypatch):
    """A sample of damages, each with one of the commands; the campaign tries all of them."""
    skip_without_extras(command)
    TABLE[damage](run, np.random.default_rng(1))
    check(command, run, capsys, monkeypatch)


def test_commands_read_an_undamaged_run(run, capsys, monkeypatch):
    for command in COMMANDS:
        skip_without_extras(command)
        assert check(command, run, capsys, monkeypatch) == 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_fuzz_runs(run, capsys, monkeypatch):
    """Random damages at random places, two of them in every other run, with every command."""
    whole = shutil.copytree(run, run.parent.parent / "whole")
    for number in range(COUNT):
        rng = np.random.default_rng([1, number])
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        names = [str(name) for name in rng.choice([*TABLE], 1 + number % 2)]
        command = str(rng.choice([*COMMANDS]))
        try:
            for name in names:
                TABLE[name](run, rng)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            continue  # The second damage needs what the first one has taken.
        print(f"input {number}: {names}, {command}", file=sys.__stderr__)
        check(command, run, capsys, monkeypatch)
