"""Configurations that are wrong in a hundred ways: each ends with one line and code 2, and nothing begins."""

import itertools
import random
from copy import deepcopy
from functools import cache

import pytest
import yaml
from helpers.support import ROOT, error_line, train

from evorl.runs.launch import load_config
from evorl.types import UserError

SHIPPED = sorted((ROOT / "configs" / "training").glob("*.yaml"))
COUNT = 1000
"""Configurations of the campaign."""

COUNTS = (
    "environment.num_envs", "network.recurrent_size", "replay.capacity", "population.size", "evolution.steps",
    "evolution.selection.size", "evolution.architecture.max_units", "evolution.architecture.min_channels",
    "evaluation.episodes", "evaluation.max_steps", "training.max_steps", "checkpoint.keep",
)  # fmt: skip
NUMBERS = (
    *COUNTS, "seed", "run.timeout", "algorithm.gamma", "algorithm.learning_rate", "evolution.mutation.none",
    "evolution.mutation.strength", "evolution.mutation.new_layer", "evolution.selection.replace", "tracking.timeout",
    "replay.learning_starts", "evaluation.confirmation_episodes", "evolution.mutation.dormant_threshold",
)  # fmt: skip
SECTIONS = (
    "run", "environment", "algorithm", "network", "replay", "population", "evolution", "evolution.selection",
    "evolution.mutation", "evolution.hyperparameters", "evolution.architecture", "evaluation", "training", "tracking",
    "checkpoint", "environment.kwargs",
)  # fmt: skip
NAMES = {
    "algorithm.name": ("dqm", "PPO", "", "a2c ", "дqn"),
    "network.name": ("standart", "", "Standard", "../standard"),
    "network.activation": ("rely", "ReLU", "", "tаnh"),
    "network.recurrent": ("lstn", "rnn", "GRU "),
    "evolution.selection.name": ("turnament", "", "best"),
    "evolution.architecture.activations": (["relu", "sigmoidd"], [""], []),
    "tracking.backends": (["wandbb"], ["wandb", "tensorbord"], [""], ["WANDB"]),
    "tracking.mode": ("onlin", "", "dryrun"),
    "environment.id": (
        "", ":", "LunarLandr-v3", "CartPole-v99", "ALE/Pung-v5", "no.module:X-v0", "..up:X-v0", ":CartPol-v1", "a b",
        "os:system", "json:X-v0", "CartPole-v1\n", "CartPole-v1\0", "🎮-v0", "../CartPole-v1", "x" * 5000,
    ),
    "environment.vectorization": ("asink", "", "threads"),
    "evolution.mutation.architectur": (1, 0.5),
    "population.placement": ("shared", "", "REPLICATED"),
}  # fmt: skip
STRANGE_RUNS = (
    "../x", "/x", "/", "..", ".", "", "a/../../x", "x\0y", "x\ny", "\x1b[2J", "x" * 300, "é" * 200, "a/" + "y" * 256,
)  # fmt: skip
MALFORMED = (
    "seed", "=3", "a..b=1", ".seed=1", "seed.=1", "seed=[1", "seed=&a", "seed=*a", "seed.x=1", "seed={", "seed='1",
    "seed=" + "9" * 5000, "seed=0x" + "f" * 5000, "seed=" + "[" * 3000, "seed=!!python/object:os.system x", "x=1",
    "run.name.x=1", "environment.kwargs.a.b", "population=4", "seed=2020-13-45", "sеed=1", "seed\n=1", "\x1b[2Jx=1",
    "seed=\t1\t:", "algorithm.name=[dqn]", "network.hidden_sizes=64,64", "evolution={1: 2}", "1=2", "null=1",
    "evolution.mutation={1: 2}", "evolution.mutation={null: 0.1}", "algorithm={? [a] : 1}",
)  # fmt: skip
HUGE = ("1000000000000000000", "1e18", "1e300", "9" * 400, "99999999999999")
WRONG = ("many", "1,000", "10k", "0.5.1", "one", "--1", "~1", "!", "1 000", "½", "١a", "2020-01-01", "<<", "{{ size }}")


def placed(data, path, value):
    """The file with another value at `path`."""
    data = deepcopy(data)
    *sections, last = path.split(".")
    section = data
    for name in sections:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[last] = value
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")


def literal(data, path, text):
    """The file with a value at `path` that stands there as it is written."""
    return placed(data, path, "PLACE").replace(b"PLACE", text.encode())


def keys(text):
    """The lines of a file that begin with a key of the configuration, and that key."""
    lines = [(number, line.split("#")[0]) for number, line in enumerate(text.splitlines())]
    found = [(number, line.strip().split(":")[0]) for number, line in lines if ":" in line]
    # Keywords for the environment are its own, and flow lines hold several keys.
    return [(number, key) for number, key in found if key.isidentifier() and key != "repeat_action_probability"]


def misspelt(rng, text, data):
    number, key = rng.choice(keys(text))
    lines, at = text.splitlines(), rng.randrange(len(key) + 1)
    lines[number] = lines[number].replace(key, key[:at] + rng.choice("qQ_ж0 ") + "q" + key[at:], 1)
    return "\n".join(lines).encode()


def twice(rng, text, data):
    lines = text.splitlines()
    number = rng.choice([number for number, line in enumerate(lines) if ":" in line and line[:1].isalpha()])
    return "\n".join([*lines, f"{lines[number].split(':')[0]}: {{}}"]).encode()


def tabbed(rng, text, data):
    lines = text.splitlines()
    number = rng.choice([number for number, line in enumerate(lines) if line.startswith("  ") and ":" in line])
    lines[number] = "\t" + lines[number].strip()
    return "\n".join(lines).encode()


def truncated(rng, text, data):
    lines = text.splitlines()
    number, key = rng.choice(keys(text)[1:])
    indent = len(lines[number]) - len(lines[number].lstrip())
    return "\n".join([*lines[:number], lines[number][: indent + rng.randrange(1, len(key) + 1)]]).encode()


def garbage(rng, text, data):
    noise = rng.randbytes(rng.randrange(1, 4000))
    return rng.choice(
        (b"\xff" + noise, text.encode() + b"\xc3\x28" + noise, b"\x00" + text.encode(), text.encode("utf-16"))
    )


def no_mapping(rng, text, data):
    return rng.choice((b"[]", b"3", b'""', b"- seed: 1", b"seed=1", b"[" * 5000, b"a: b: c", b"{", b"--- 1\n--- 2"))


def no_range(rng, text, data):
    ranges = [
        {"min": 2e-3, "max": 1e-3}, {"min": 1e-3, "max": 1e-3}, {"min": 1e-3}, {"max": 1}, {"min": -1e-3, "max": 1e-3},
        {"min": 0.0, "max": 1e-3}, {"min": 1e-3, "max": float("inf")}, {"min": "a", "max": "b"}, [1e-3, 1e-2], 1e-3,
        {"min": 1e-3, "max": 1e-2, "scale": "lag"}, {"min": 1e-3, "max": 1e-2, "grow": 0.9}, None,
        {"min": 1e-3, "max": 1e-2, "shrink": 1.1}, {"min": 1e-3, "max": 1e-2, "grow": float("inf")},
    ]  # fmt: skip
    if rng.random() < 0.2:
        name = rng.choice(("learning_rat", "name", "hyperparameters", "double", "", "a.b", "x\ny"))
        return placed(data, "evolution.hyperparameters", {name: {"min": 1e-3, "max": 1e-2}})
    return placed(data, "evolution.hyperparameters", {"learning_rate": rng.choice(ranges)})


def images(rng, text, data):
    atari = "dqn_atari.yaml" if rng.random() < 0.5 else "ppo_atari.yaml"
    data = yaml.safe_load((ROOT / "configs" / "training" / atari).read_text())
    first = rng.choice(({"kernel": 64}, {"kernel": 8, "stride": 64}, {"kernel": 40, "stride": 16}))
    layers = [{"channels": 8, **first}, {"channels": 8, "kernel": rng.randrange(30, 65)}]
    return placed(data, "network.convolutions", layers)


def combined(rng, text, data):
    broken = {
        "replay": {"capacity": 100, "learning_starts": 101},
        "evolution.selection": {"name": "tournament", "size": 5000},
        "evolution.mutation": {"none": 0, "architecture": 0, "parameters": 0, "hyperparameters": 0},
        "evolution.architecture": {"min_units": 65, "max_units": 64},
        "network": {"name": "module"},
        "network.factory": "os:getcwd",
        "environment.kwargs": {"nonsense": 1},
        "environment.observation_indices": rng.choice(([99], [], [-1], [0.5])),
        "algorithm": {"name": "a2c", "epochs": 3},
        "network.hidden_sizes": [65536] * 3,
        "network.convolutions": [{"channels": 4096, "kernel": 64}] * 2,
        "population": {"size": 60_000, "placement": "sharded", "agents": 1},
        "environment.num_envs": 1_000_000,
    }
    factories = ("os:getcwd", "nowhere", "no.where:f", ":", "json:nothing", "..x:y", "os:\0")
    broken |= {f"network={at}": {"name": "module", "factory": at} for at in factories}
    chosen = rng.choice(list(broken))
    return placed(data, chosen.partition("=")[0], broken[chosen])


def misnamed(rng, text, data):
    path = rng.choice(list(NAMES))
    return placed(data, path, rng.choice(NAMES[path]))


def wrong_files(rng, text, data):
    path = rng.choice((".", "/", "none.yaml", "x" * 300, "/dev/zero", "a\nb.yaml", "config.yaml/x", "/proc/self/mem"))
    return rng.choice((["--config", path], ["run.directory=config.yaml"], ['run.directory="\\0"'], ["run.directory=3"]))


KINDS = {
    "misspelt key": misspelt,
    "wrong type": lambda rng, text, data: literal(data, rng.choice(NUMBERS), f"'{rng.choice(WRONG)}'"),
    "out of range": lambda rng, text, data: placed(data, rng.choice(COUNTS), rng.choice((0, -1, -(10**18), 0.5))),
    "negative": lambda rng, text, data: placed(data, rng.choice(NUMBERS), -rng.choice((1, 3, 10**6))),
    "null": lambda rng, text, data: placed(data, rng.choice([n for n in NUMBERS if n != "evaluation.max_steps"]), None),
    "list for a number": lambda rng, text, data: placed(data, rng.choice(NUMBERS), rng.choice(([], [1], [[1]], {}))),
    "nan or infinite": lambda rng, text, data: literal(data, rng.choice(NUMBERS), rng.choice((".nan", ".inf"))),
    "huge": lambda rng, text, data: literal(data, rng.choice(NUMBERS), rng.choice(HUGE)),
    "scalar for a section": lambda rng, text, data: placed(data, rng.choice(SECTIONS), rng.choice((3, "x", True, [1]))),
    "unknown name": misnamed,
    "key given twice": twice,
    "tab": tabbed,
    "truncated": truncated,
    "binary": garbage,
    "no mapping": no_mapping,
    "hyperparameter range": no_range,
    "kernel above image": images,
    "does not fit": combined,
    "strange run name": lambda rng, text, data: placed(data, "run.name", rng.choice(STRANGE_RUNS)),
    "malformed override": lambda rng, text, data: [rng.choice(MALFORMED)],
    "wrong path": wrong_files,
}


@cache
def shipped(path):
    """Return a shipped configuration as text and as data."""
    text = path.read_text()
    return text, yaml.safe_load(text)


def broken(kind, rng):
    """The file and the arguments of a configuration that is broken in one way."""
    text, data = shipped(rng.choice(SHIPPED))
    result = KINDS[kind](rng, text, deepcopy(data))
    return (result, []) if isinstance(result, bytes) else (text.encode(), result)


def check(file, arguments, directory, capsys):
    path = directory / "config.yaml"
    path.write_bytes(file)
    assert train(*arguments, configuration="config.yaml") == 2
    error = error_line(capsys)
    assert error[:-1].isprintable()
    assert len(error) < 20_200
    assert list(directory.iterdir()) == [path]


@pytest.fixture(autouse=True)
def _no_training(monkeypatch):
    def began(*_):
        raise AssertionError("training began")

    monkeypatch.setattr("evorl.runs.run.Run.steps", began)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_configuration_ends_with_one_line_and_code_2(kind, in_directory, capsys):
    check(*broken(kind, random.Random(2)), in_directory, capsys)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_broken_configurations(in_directory, capsys):
    rng = random.Random(1)
    for number, kind in zip(range(COUNT), itertools.cycle(KINDS)):
        file, arguments = broken(kind, rng)
        try:
            check(file, arguments, in_directory, capsys)
        except BaseException as error:
            raise AssertionError(f"input {number}, {kind}: {file} {arguments}") from error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: " + "[" * 5000, "it is nested too deeply"),
        ("#" + "x" * 2**17, "it has more than 131072 bytes"),
        ("seed: 0x" + "f" * 5000, "a whole number is beyond 64 bits"),
        ('run: {name: "\\ud800"}', "run.name: it must be a path of printable characters"),
        ("environment: {kwargs: {1: 2}}", "key 1 is not a string"),
        ('"a\\nb\\x1b": 1', r"a\\nb\\x1b: unknown key"),
        ("run: {name: ../x}", "run.name: '../x' would not lie below run.directory; use a plain name"),
        ("run: {timeout: 1e300}", "run.timeout: 1e[+]300 is out of range; .* at most 1000000"),
        ("network: {hidden_sizes: [65536, 65536]}", "network: hidden_sizes have 4294967296 weights between them"),
        ("population: {size: 1000}\nenvironment: {num_envs: 100}", "num_envs: 100 for each of 1000 agents"),
    ],
)  # fmt: skip
def test_values_that_would_take_all_memory_or_leave_the_run_are_refused(text, message, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_config([], path)
    assert str(caught.value).isprintable()


def test_module_that_cannot_be_imported_is_named_in_one_line(in_directory, capsys):
    (in_directory / "broken_module.py").write_text("def f(:\n")
    assert train("environment.id=broken_module:X-v0") == 2
    assert "SyntaxError in 'broken_module'" in capsys.readouterr().err
