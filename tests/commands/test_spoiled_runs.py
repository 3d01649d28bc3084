"""Runs whose files hold what no run writes: refused in one line, or read without it, by every command."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.support import lines

import evorl
from evorl.commands.command import run_command
from evorl.commands.train import summary_lines
from evorl.config import override, read_yaml
from evorl.runs.program import run_program
from evorl.system.untrusted_json import parse_json
from evorl.types import UserError

NAN = float("nan")
HUGE = "0x" + "f" * 4000
SURROGATE = "\ud800"


@pytest.fixture
def run(trained_run, in_directory):
    """A run to be spoiled, beside one that is not."""
    shutil.copytree(trained_run, in_directory / "runs" / "b")
    return shutil.copytree(trained_run, in_directory / "runs" / "a")


def setting(text):
    """Write a setting into the configuration as YAML has it."""

    def spoil(run):
        path, _, value = text.partition("=")
        data = yaml.safe_load((run / "config.yaml").read_text())
        *sections, last = path.split(".")
        section = data
        for name in sections:
            section = section[name]
        section[last] = "PLACE"
        (run / "config.yaml").write_text(yaml.safe_dump(data).replace("PLACE", value))

    return spoil


def last_line(name, **changes):
    """Change the last line of a log."""

    def spoil(run):
        *others, last = lines(run / name)
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in (*others, last | changes)))

    return spoil


def member(name, **changes):
    """Change the object in a file."""

    def spoil(run):
        value = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(value | changes))

    return spoil


SPOILED = {
    "a target of NaN": setting("training.target_fitness=.nan"),
    "an infinite target": setting("training.target_fitness=.inf"),
    "a seed of 16,000 bits": setting(f"seed={HUGE}"),
    "keys of mixed types": setting("environment.kwargs={1: 2, a: 3}"),
    "a key that is true": setting("mine={on: 1, b: 2}"),
    "a surrogate for the environment": setting('environment.id="\\ud800"'),
    "an environment of 5,000 letters": setting("environment.id=" + "x" * 5000),
    "control letters for the environment": setting('environment.id="\\e[2J"'),
    "NaN for a fitness": last_line("lineage.jsonl", fitness=NAN),
    "NaN for a hyperparameter": last_line("lineage.jsonl", hyperparameters={"learning_rate": NAN}),
    "a fitness that cannot be squared": last_line("lineage.jsonl", fitness=1e308),
    "an id of 1,000 bits": last_line("lineage.jsonl", id=2**1000),
    "a surrogate for a mutation": last_line("lineage.jsonl", mutation={"kind": SURROGATE}),
    "steps of text": last_line("metrics.jsonl", agent_steps="many"),
    "steps of 1,000 bits": last_line("metrics.jsonl", agent_steps=2**1000, elite_fitness=2**1000),
    "a fitness of a list": last_line("metrics.jsonl", elite_fitness=[1]),
    "a summary's steps of text": member("summary.json", agent_steps="many"),
    "a summary's fitness of 1,000 bits": member("summary.json", best_fitness=2**4000),
    "a summary's seconds of NaN": member("summary.json", wall_clock_seconds=NAN),
    "a summary's end of a list": member("summary.json", ended=["x"]),
    "a summary's surrogate": member("summary.json", ended=SURROGATE),
    "an agent's id of a list": member("elite/agent.json", id=[1]),
}
COMMANDS = {
    "list": ("list", "runs"),
    "lineage": ("lineage", "runs/a"),
    "lineage --settings": ("lineage", "runs/a", "--settings"),
    "plot": ("plot", "runs/a", "-o", "plot.svg"),
    "report": ("report", "runs/a", "runs/b"),
    "config": ("config", "runs/a/config.yaml"),
}


def ended(command, capsys):
    """The exit code of a command, with what it has printed."""
    capsys.readouterr()
    code = run_program(run_command, COMMANDS[command])
    printed = capsys.readouterr()
    assert all(line.isprintable() for line in (printed.out + printed.err).split("\n"))
    return code, printed.out, printed.err


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_run_does_not_hide_the_others_of_its_folder(spoil, run, capsys):
    whole = ended("list", capsys)[1].splitlines()
    spoil(run)
    code, out, _ = ended("list", capsys)
    assert code == 0
    (row,) = (line for line in out.splitlines() if line.startswith("b "))
    assert row.split() == next(line for line in whole if line.startswith("b ")).split()
    assert re.search(r"^a ", out, re.MULTILINE)
    assert len(summary_lines([(1, run.with_name("b"))])) == 3


def test_a_folder_that_nobody_may_look_into_does_not_hide_the_others(run, capsys, monkeypatch):
    """As root one may look anywhere, so that the refusal is put in its place."""
    usual = Path.stat

    def refusing(path, **options):
        if path.parent == Path("runs/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", refusing)
    code, out, _ = ended("list", capsys)
    assert code == 0
    told = {line.split()[0]: line for line in out.splitlines()}
    assert "cannot be read" in told["a"]
    assert "CartPole-v1" in told["b"]
    for read in (evorl.read_run, evorl.load):
        with pytest.raises(UserError, match="Permission denied"):
            read("runs/a")


@pytest.mark.filterwarnings("ignore:a, b. the same settings")  # The other run is a copy.
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "list"])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_run_is_read_or_refused_in_one_line(spoil, command, run, capsys, monkeypatch):
    for package in ("matplotlib", "plotly", "jinja2"):
        if command in ("plot", "report"):
            pytest.importorskip(package)
    monkeypatch.setattr("os.execv", lambda path, command: None)
    spoil(run)
    code, _, err = ended(command, capsys)
    assert code in (0, 2)
    assert [line.startswith("error: ") for line in err.splitlines()].count(True) == (code == 2)


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_run_is_read_by_python_or_refused(spoil, run):
    spoil(run)
    with contextlib.suppress(UserError):
        record = evorl.read_run(run)
        evorl.columns(record.metrics)
        evorl.columns(record.lineage)
        summary_lines([(1, run)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed: {HUGE}", "a whole number is beyond 64 bits"),
        ("seed: " + "9" * 30, "a whole number is beyond 64 bits"),
        ('run: {name: "\\ud800"}', "text has an unpaired surrogate"),
        ("environment: {kwargs: {1: 2}}", "key 1 is not a string"),
        ("{environment: {kwargs: {map: {on: 2}}}}", "key True is not a string"),
    ],
)
def test_what_no_configuration_may_hold_is_refused_where_it_is_read(text, message, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_yaml(tmp_path / "config.yaml")
    with pytest.raises(UserError):
        override({}, [f"mine={text.partition(': ')[2].removesuffix('}')}"])


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"\\uDFFF": 1}', "[[9223372036854775808]]", '{"a": -99999999999999999999}', "[" * 100_000]
)
def test_json_that_no_run_writes_is_refused(text):
    with pytest.raises(ValueError, match=r"surrogate|64 bits|deeply"):
        parse_json(text.encode())


def test_json_of_runs_is_read_as_it_is():
    value = {"a": [9223372036854775807, 1.2345678901234567e-30, 0.00012345678901234567890, None, "😀", NAN]}
    assert json.dumps(parse_json(json.dumps(value).encode())) == json.dumps(value)
