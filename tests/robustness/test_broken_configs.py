"""Broken configurations: each ends with one line and code 2, and nothing begins."""

import random

import pytest
from helpers.support import ROOT, error_line, train

from evorl.runs.launch import load_config
from evorl.types.outcomes import UserError

SHIPPED = sorted((ROOT / "configs" / "training").glob("*.yaml"))
COUNT = 1000
"""Configurations of the campaign."""
FILE = (ROOT / "configs" / "training" / "dqn.yaml").read_text()
BROKEN = {
    "misspelt key": "algorithm: {gama: 0.9}",
    "module that is not there": "environment: {id: 'no.module:X-v0'}",
    "function that is no environment": "environment: {id: 'os:system'}",
    "list for a number": "seed: [1]",
    "null": "training: {max_steps: null}",
    "not a number": "algorithm: {gamma: .nan}",
    "huge number": "training: {max_steps: 1e300}",
    "tab": "run:\n\tname: a",
    "truncated": FILE[: FILE.index("algorithm:") + 7],
    "binary": b"\xff" + FILE.encode(),
    "hyperparameter range": "evolution: {hyperparameters: {learning_rate: {min: 2e-3, max: 1e-3}}}",
    "network of no module": "network: {name: module, factory: 'os:getcwd'}",
    "run outside its directory": "run: {name: ../x}",
    "object of Python": "seed: !!python/object:os.system x",
}
ARGUMENTS = {
    "unknown section": ["x=1"],
    "file that is not there": ["--config", "none.yaml"],
    "file that never ends": ["--config", "/dev/zero"],
}


@pytest.fixture(autouse=True)
def _no_training(monkeypatch):
    def began(*_):
        raise AssertionError("training began")

    monkeypatch.setattr("evorl.runs.run.Run.steps", began)


def check_refused(text, arguments, directory, capsys):
    path = directory / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert train(*arguments, configuration="config.yaml") == 2
    error = error_line(capsys)
    assert error[:-1].isprintable()
    assert len(error) < 20_200
    assert list(directory.iterdir()) == [path]


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_configuration_ends_with_one_line_and_code_2(text, in_directory, capsys):
    check_refused(text, [], in_directory, capsys)


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_broken_command_line_ends_with_one_line_and_code_2(arguments, in_directory, capsys):
    check_refused(FILE, arguments, in_directory, capsys)


def mutated(text, rng):
    """A file with some bytes or lines removed, doubled or replaced."""
    for _ in range(rng.randrange(1, 4)):
        at, length = rng.randrange(len(text)), rng.randrange(1, 30)
        new = rng.choice([b"", text[at : at + length] * 2, rng.randbytes(3), b"-1", b"null", b"[", b"\t", b"9" * 400])
        text = text[:at] + new + text[at + length :]
    return text


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore::evorl.types.outcomes.EvorlWarning")
@pytest.mark.timeout(3600)
def test_many_mutated_configurations_are_read_or_refused(tmp_path):
    rng, path = random.Random(1), tmp_path / "config.yaml"
    for number in range(COUNT):
        path.write_bytes(mutated(rng.choice(SHIPPED).read_bytes(), rng))
        message = ""
        try:
            load_config([], path)
        except UserError as error:
            message = str(error)
        except BaseException as error:
            raise AssertionError(f"input {number}: {path.read_bytes()!r}") from error
        assert message.isprintable(), f"input {number}: {path.read_bytes()!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: " + "[" * 5000, "it is nested too deeply"),
        ("#" + "x" * 2**17, "it has more than 131072 bytes"),
        ("seed: 0x" + "f" * 5000, "seed: this int is out of range"),
        ('"a\\nb\\x1b": 1', r"a\\nb\\x1b: unknown key"),
        ("network: {hidden_sizes: [65536, 65536]}", "with the layers of network.hidden_sizes: .* do not fit"),
        ("population: {size: 1000}\nenvironment: {num_envs: 100}", "num_envs: 100 for each of 1000 agents"),
    ],
    ids=["deep", "long", "large number", "control characters", "large network", "many environments"],
)
def test_values_that_would_take_all_memory_are_refused(text, message, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_config([], path)
    assert str(caught.value).isprintable()


def test_module_that_cannot_be_imported_is_named_in_one_line(in_directory, capsys):
    (in_directory / "broken_module.py").write_text("def f(:\n")
    assert train("environment.id=broken_module:X-v0") == 2
    assert "SyntaxError in 'broken_module'" in capsys.readouterr().err
