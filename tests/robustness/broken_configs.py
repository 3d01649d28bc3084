"""Broken configurations, as users break them: each must end soon, with one line and exit code 2.

OMP_NUM_THREADS=1 python tests/robustness/broken_configs.py --count 300 --seed 1

Prints a table by kind, and exits with 1 if any breakage ends otherwise. No kind leaves a configuration valid.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted((ROOT / "configs" / "training").glob("*.yaml"))
SLOWEST = 3.0
GIVEN_UP = 20.0
"""Seconds after which a program surely trains."""

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


@dataclass(frozen=True)
class Breakage:
    """A configuration that is wrong: what is in the file, and what stands on the command line."""

    kind: str
    file: bytes
    arguments: Sequence[str] = field(default=())


Data = dict[str, Any]
Break = Callable[[random.Random, str, Data], bytes | Sequence[str]]
"""From a shipped configuration, as its text and its settings, to a broken file or to broken arguments."""


def placed(data: Data, path: str, value: Any) -> bytes:
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


def literal(data: Data, path: str, text: str) -> bytes:
    """The file with a value at `path` that stands there as it is written."""
    return placed(data, path, "PLACE").replace(b"PLACE", text.encode())


def keys(text: str) -> list[tuple[int, str]]:
    """The lines of a file that begin with a key of the configuration, and that key."""
    lines = [(number, line.split("#")[0]) for number, line in enumerate(text.splitlines())]
    found = [(number, line.strip().split(":")[0]) for number, line in lines if ":" in line]
    # Keywords for the environment are its own, and flow lines hold several keys.
    return [(number, key) for number, key in found if key.isidentifier() and key != "repeat_action_probability"]


def misspelt(rng: random.Random, text: str, data: Data) -> bytes:
    number, key = rng.choice(keys(text))
    lines, at = text.splitlines(), rng.randrange(len(key) + 1)
    lines[number] = lines[number].replace(key, key[:at] + rng.choice("qQ_ж0 ") + "q" + key[at:], 1)
    return "\n".join(lines).encode()


def twice(rng: random.Random, text: str, data: Data) -> bytes:
    lines = text.splitlines()
    number = rng.choice([number for number, line in enumerate(lines) if ":" in line and line[:1].isalpha()])
    return "\n".join([*lines, f"{lines[number].split(':')[0]}: {{}}"]).encode()


def tabbed(rng: random.Random, text: str, data: Data) -> bytes:
    lines = text.splitlines()
    number = rng.choice([number for number, line in enumerate(lines) if line.startswith("  ") and ":" in line])
    lines[number] = "\t" + lines[number].strip()
    return "\n".join(lines).encode()


def truncated(rng: random.Random, text: str, data: Data) -> bytes:
    lines = text.splitlines()
    number, key = rng.choice(keys(text)[1:])
    indent = len(lines[number]) - len(lines[number].lstrip())
    return "\n".join([*lines[:number], lines[number][: indent + rng.randrange(1, len(key) + 1)]]).encode()


def garbage(rng: random.Random, text: str, data: Data) -> bytes:
    noise = rng.randbytes(rng.randrange(1, 4000))
    return rng.choice(
        (b"\xff" + noise, text.encode() + b"\xc3\x28" + noise, b"\x00" + text.encode(), text.encode("utf-16"))
    )


def no_mapping(rng: random.Random, text: str, data: Data) -> bytes:
    return rng.choice((b"[]", b"3", b'""', b"- seed: 1", b"seed=1", b"[" * 5000, b"a: b: c", b"{", b"--- 1\n--- 2"))


def bomb(rng: random.Random, text: str, data: Data) -> bytes:
    path = rng.choice(("seed", "environment.kwargs", "tracking.exclude", "run", "network.hidden_sizes", "evolution"))
    doubled = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    merged = "\n".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 9))
    last = path.split(".")[-1]
    bombs = (
        f"a0: &a0 [x, x]\n{doubled}\n{last}: *a11",
        f"m0: &m0 {{x: 1}}\n{merged}\n{last}: *m8",
        literal(data, path, "&a [*a, *a]").decode(),
        literal(data, path, "&a {b: *a}").decode(),
        literal(data, path, "*nothing").decode(),
        literal(data, path, "{" + ", ".join(f"k{n}: {n}" for n in range(20_000)) + "}").decode(),
        text + "\n#" + "x" * 2**20,
    )
    return rng.choice(bombs).encode()


def no_range(rng: random.Random, text: str, data: Data) -> bytes:
    ranges: list[Any] = [
        {"min": 2e-3, "max": 1e-3}, {"min": 1e-3, "max": 1e-3}, {"min": 1e-3}, {"max": 1}, {"min": -1e-3, "max": 1e-3},
        {"min": 0.0, "max": 1e-3}, {"min": 1e-3, "max": float("inf")}, {"min": "a", "max": "b"}, [1e-3, 1e-2], 1e-3,
        {"min": 1e-3, "max": 1e-2, "scale": "lag"}, {"min": 1e-3, "max": 1e-2, "grow": 0.9}, None,
        {"min": 1e-3, "max": 1e-2, "shrink": 1.1}, {"min": 1e-3, "max": 1e-2, "grow": float("inf")},
    ]  # fmt: skip
    if rng.random() < 0.2:
        name = rng.choice(("learning_rat", "name", "hyperparameters", "double", "", "a.b", "x\ny"))
        return placed(data, "evolution.hyperparameters", {name: {"min": 1e-3, "max": 1e-2}})
    return placed(data, "evolution.hyperparameters", {"learning_rate": rng.choice(ranges)})


def images(rng: random.Random, text: str, data: Data) -> bytes:
    atari = "dqn_atari.yaml" if rng.random() < 0.5 else "ppo_atari.yaml"
    data = yaml.safe_load((ROOT / "configs" / "training" / atari).read_text())
    first = rng.choice(({"kernel": 64}, {"kernel": 8, "stride": 64}, {"kernel": 40, "stride": 16}))
    layers = [{"channels": 8, **first}, {"channels": 8, "kernel": rng.randrange(30, 65)}]
    return placed(data, "network.convolutions", layers)


def combined(rng: random.Random, text: str, data: Data) -> bytes:
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


def misnamed(rng: random.Random, text: str, data: Data) -> bytes:
    path = rng.choice(list(NAMES))
    return placed(data, path, rng.choice(NAMES[path]))


def wrong_files(rng: random.Random, text: str, data: Data) -> Sequence[str]:
    path = rng.choice((".", "/", "none.yaml", "x" * 300, "/dev/zero", "a\nb.yaml", "config.yaml/x", "/proc/self/mem"))
    return rng.choice((["--config", path], ["run.directory=config.yaml"], ['run.directory="\\0"'], ["run.directory=3"]))


KINDS: dict[str, Break] = {
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
    "aliases without end": bomb,
    "hyperparameter range": no_range,
    "kernel above image": images,
    "does not fit": combined,
    "strange run name": lambda rng, text, data: placed(data, "run.name", rng.choice(STRANGE_RUNS)),
    "malformed override": lambda rng, text, data: [rng.choice(MALFORMED)],
    "wrong path": wrong_files,
}


@cache
def shipped(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a shipped configuration as text and as data."""
    text = path.read_text()
    return text, yaml.safe_load(text)


def breakages(seed: int) -> Iterator[Breakage]:
    """Breakages without end, the kinds in turn."""
    rng = random.Random(seed)
    while True:
        for kind, broken in KINDS.items():
            text, data = shipped(rng.choice(SHIPPED))
            result = broken(rng, text, deepcopy(data))
            yield Breakage(kind, result) if isinstance(result, bytes) else Breakage(kind, text.encode(), result)


@dataclass(frozen=True)
class Outcome:
    """How a program ended that was given a broken configuration."""

    code: int | None
    error: str
    seconds: float

    @property
    def complaint(self) -> str:
        """What is not as it should be; nothing where all is."""
        if self.code is None:
            return f"still runs after {GIVEN_UP:g} s"
        if self.code != 2:
            return f"exit code {self.code}"
        if not self.error.startswith("error: ") or self.error.count("\n") != 1:
            return f"{self.error.count(chr(10))} lines of error"
        return f"{self.seconds:.1f} s" if self.seconds >= SLOWEST else ""


def tried(breakage: Breakage) -> Outcome:
    """Start the demo as a user does, in an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.yaml").write_bytes(breakage.file)
        command = [sys.executable, str(ROOT / "demos" / "online.py"), "--config", "config.yaml", *breakage.arguments]
        environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            code: int | None = None
            try:
                _, error = process.communicate(timeout=GIVEN_UP)
                code = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                _, error = process.communicate()
        return Outcome(code, error.decode(errors="replace"), time.perf_counter() - began)


def bare() -> float:
    """Seconds in which Python imports what every program of this kind needs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, accelerate, gymnasium"], check=True)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="skip so many breakages")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    imports = statistics.median(bare() for _ in range(5))
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    wrong = 0
    for number, breakage in zip(range(options.first + options.count), breakages(options.seed), strict=False):
        if number < options.first:
            continue
        outcome = tried(breakage)
        if outcome.code == 2 and outcome.seconds >= SLOWEST:
            # Another program may have had the cores; twice is no accident.
            outcome = min(outcome, tried(breakage), key=lambda each: each.seconds)
        outcomes[breakage.kind].append(outcome)
        if outcome.complaint:
            wrong += 1
            tail = outcome.error.strip().splitlines()[-1:]
            print(f"{number} {breakage.kind}: {outcome.complaint} {list(breakage.arguments)} {tail}", flush=True)
    print(f"{'kind':24}{'tried':>7}{'wrong':>7}{'median s':>10}{'max s':>8}")
    for kind, each in outcomes.items():
        seconds = [outcome.seconds for outcome in each]
        amiss = sum(bool(outcome.complaint) for outcome in each)
        print(f"{kind:24}{len(each):7}{amiss:7}{statistics.median(seconds):10.2f}{max(seconds):8.2f}")
    every = [outcome.seconds for each in outcomes.values() for outcome in each]
    print(f"{'all':24}{len(every):7}{wrong:7}{statistics.median(every):10.2f}{max(every):8.2f}")
    print(f"imports of torch, accelerate and gymnasium alone: {imports:.2f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
