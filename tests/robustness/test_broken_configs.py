"""Configurations that are wrong in a hundred ways: each ends with one line and code 2, and nothing begins."""

import itertools

import broken_configs
import pytest
from helpers.support import error_line, train

from evorl.config.errors import MAX_TOLD
from evorl.runs.launch import load_config
from evorl.types import UserError

COUNT = 5 * len(broken_configs.KINDS)
BREAKAGES = list(itertools.islice(broken_configs.breakages(seed=2), COUNT))


def began(*_):
    raise AssertionError("training began")


@pytest.mark.parametrize("breakage", BREAKAGES, ids=[f"{b.kind}-{n}" for n, b in enumerate(BREAKAGES)])
def test_a_broken_configuration_ends_with_one_line_and_code_2(breakage, in_directory, monkeypatch, capsys):
    monkeypatch.setattr("evorl.runs.run.Run.steps", began)
    path = in_directory / "config.yaml"
    path.write_bytes(breakage.file)
    assert train(*breakage.arguments, configuration="config.yaml") == 2
    error = error_line(capsys)
    assert error[:-1].isprintable()
    assert len(error) < MAX_TOLD + 200
    assert list(in_directory.iterdir()) == [path]


def test_the_same_seed_breaks_the_same():
    again = itertools.islice(broken_configs.breakages(seed=2), COUNT)
    assert [(b.kind, b.file, tuple(b.arguments)) for b in again] == [
        (b.kind, b.file, tuple(b.arguments)) for b in BREAKAGES
    ]


def test_what_is_not_as_it_should_be_is_said():
    outcome = broken_configs.Outcome
    assert outcome(2, "error: seed: -1 is out of range\n", 1.0).complaint == ""
    assert outcome(None, "", 20.0).complaint == "still runs after 20 s"
    assert outcome(1, "error: x\n", 1.0).complaint == "exit code 1"
    assert outcome(2, "Traceback\nerror: x\n", 1.0).complaint == "2 lines of error"
    assert outcome(2, "error: x\n", 3.5).complaint == "3.5 s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [" + "*a, " * 99 + "]\nseed: [" + "*b, " * 99 + "]", "it stands for more than 10000"),
        ("run: &a {x: *a}", "it stands for more than 10000 values"),
        ("seed: " + "[" * 5000, "it is nested too deeply"),
        ("#" + "x" * 2**17, "it has more than 131072 bytes"),
        ("seed: 0x" + "f" * 5000, "a whole number is beyond 64 bits"),
        ('"a\\nb\\x1b": 1', r"a\\nb\\x1b: unknown key"),
        ("run: {name: ../x}", "run.name: '../x' would not lie below run.directory; use a plain name"),
        ("run: {timeout: 1e300}", "run.timeout: 1e[+]300 is out of range; .* at most 1000000"),
        ("network: {hidden_sizes: [65536, 65536]}", "network: hidden_sizes have 4294967296 weights between them"),
        ("population: {size: 1000}\nenvironment: {num_envs: 100}", "num_envs: 100 for each of 1000 agents"),
        ("training: {target_fitness: .nan}", "training.target_fitness: nan is out of range; .* a finite number"),
        ("evolution: {mutation: {none: 1e308}}", "evolution.mutation.none: 1e[+]308 is out of range"),
    ],
)  # fmt: skip
def test_what_would_take_all_memory_or_leave_the_run_is_refused(text, message, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_config([], path)
    assert str(caught.value).isprintable()


def test_anchors_may_be_used(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("network: {hidden_sizes: &two [8, 8]}\nevolution: {architecture: {unit_steps: *two}}")
    assert load_config([], path).evolution.architecture.unit_steps == (8, 8)


def test_a_module_that_cannot_be_imported_is_told_in_one_line(in_directory, capsys):
    (in_directory / "broken_module.py").write_text("def f(:\n")
    assert train("environment.id=broken_module:X-v0") == 2
    assert "SyntaxError in 'broken_module'" in capsys.readouterr().err
