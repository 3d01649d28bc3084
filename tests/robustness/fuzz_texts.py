"""Hostile texts: configurations of a run that somebody sends, and command lines that somebody mistypes."""

from __future__ import annotations

import base64
import contextlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import broken_configs
import numpy as np
import yaml
from broken_configs import placed
from fuzz_rooms import RUN, Case, Room

from evorl.algorithms import SETTINGS
from evorl.config import validate

Family = Callable[[np.random.Generator, Path], Case]
"""Draws a case; the path is of a run that is whole."""
Item = TypeVar("Item")
CODE = {"environment.id": "evilmod:CartPole-v1", "network.factory": "evilmod:make"}
ODD = (
    "null", "~", "''", "3", "-1", "0", "1e400", "-1e400", ".nan", ".inf", "9" * 400, "9" * 5000, "0x" + "f" * 4000,
    "1:59:59", "true", "[]", "{}", "[[]]", "[null]", "{null: null}", "{1: 2}", "{a: {b: {c: d}}}", "[1, 2, 3]",
    "'" + "x" * 5000 + "'", '"\\0"', '"\\e[2J"', '"\\ud800"', '"a\\nb"', '"\\u202e"', "2020-01-01",
    "2020-01-01 00:00:00", "1_000", "0o17", "017", "0b11", "=", "<<", "~x", "evil mod", "../../x", "/etc/passwd",
    "$HOME", "!!binary /w==", "!!binary AAAA", "!!binary " + "QUFB" * 2000, "!!set {a, b}", "!!omap [a: 1]",
    "!!pairs [a: 1, a: 2]", "!!timestamp 2020-01-01", "!!float 1", "!!int 1", "!!str 1", "!!bool yes", "!!null ''",
)  # fmt: skip
TAGGED = (
    "!!python/object/apply:evilmod.make []", "!!python/object/apply:os.system ['touch canary-tag']",
    "!!python/object/new:evilmod.Thing []", "!!python/object:evilmod.Thing {}", "!!python/name:evilmod.make ''",
    "!!python/module:evilmod ''", "!!python/tuple [1, 2]", "!!python/bytes eA==", "!!python/none ''", "!evil x",
    "!!int ''", "!!int x", "!!int '-'", "!!int '0x'", "!!int '1:x'", "!!int '_'", "!!int [1]", "!!float ''",
    "!!float x", "!!float '-'", "!!float '_'", "!!float {}", "!!bool maybe", "!!bool ''", "!!bool [1]", "!!null x",
    "!!timestamp x", "!!timestamp 2020-13-45", "!!timestamp 2020-01-01 99:99:99", "!!timestamp []", "!!str [1]",
    "!!timestamp '0000-01-01'", "!!timestamp '2020-01-01 00:00:00 +99:99'", "!!timestamp '9999-12-31 23:59:59 -23:00'",
    "!!map [1]", "!!map x", "!!seq {a: 1}", "!!seq x", "!!set x", "!!set [a]", "!!set {[a]: 1}", "!!omap x",
    "!!omap {a: 1}", "!!omap [a]", "!!omap [{a: 1, b: 2}]", "!!pairs x", "!!pairs [1]", "!!binary 'no base64 !'",
    "!!binary [1]", "!!binary ''", "!!value x", "!!merge x", "! x", "!<x> y", "!<tag:yaml.org,2002:binary> eA==",
    "{? [a] : 1}", "{? {a: 1} : 1}", "{!!binary eA==: 1}", "{!!set {a}: 1}", "{<<: 1}", "{<<: [1]}", "{<<: {a: 1}}",
    "{=: 1}", "&a [*a]", "&a {a: *a}", "&a {*a : 1}", "&a !!omap [a: *a]", "&a !!set {*a }", "&a {<<: *a}", "*a",
    "{.nan: 1}", "{.inf: 1, -.inf: 2}", "{1.0: 1, 1: 2}", "{2020-01-01: 1}", "{true: 1, 1: 2}", "{null: 1}",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "-1", "1.5", "1e3", "nan", "inf", "", " ", "1 ", "١", "1_0", "0x10", "1,000", "1" + "0" * 9,
    "1" + "0" * 12, "1" + "0" * 18, "1" + "0" * 40, "9" * 4000, "9" * 5000, "-" + "9" * 5000, "\x1b[2J", "\n",
    "x" * 9000, "--", "-", "=", "\udcff",
)  # fmt: skip
TOKENS = (
    "evaluate", "resume", RUN, "--json", "--allow-code", "--allow", "--all", "--episodes", "--episodes=1", "--ep",
    "--e", "--seed", "--seed=1", "--processes", "--processes=1", "--program", "--", "-", "-h", "-x", "--help",
    "--unknown", "", " ", "=", "a=b", "seed=1", "training.max_steps=500", "run.name=x", "Evaluate", "eval", "1", "-1",
    "-1=2", "--=", "---", "@file", "\x1b[2J", "--\x1b[2J", "a\nb", "--a\nb", "\udcff", "--\udcff", "é" * 300,
    "--" + "x" * 2000, "x" * 100_000, "\u202e", "--json=1", "--json=", "--program=", "--program=/", "--program=\n",
)  # fmt: skip
KEYS = ("", ".", "a.b", "a." * 400 + "a", "a" * 9000, "\x1b[2J", "a\nb", "\udcff", "__class__", "run.run", "a..b")
LONG = ("x" * 100_000, "[" * 50_000, "- " * 50_000, "9" * 100_000, "\udcff", "\x1b[2J", "é" * 9000, "1:" * 50_000 + "1")
PIECES = (
    "- ", "? ", "[", "{a: ", "&a ", "!!a ", "'", '"\\x41', "*a ", ": ", "---\n", "...\n", "#", "\t", "\u2028", "\ufeff",
    "a: 1\n", "a:\n- ", "- - ", "? - ", "[a, ", "{? ", "%YAML 1.1\n", "%TAG ! x\n", "| \n", ">\n ", "<<: ", "1:", "1_",
    "a: [", "? [", "-\n", "'' ", "x\n", "!<x> ", "@", "`", "{}, ", "!", "&", "\\", "}", "]", "- [", "- {", "&a [",
)  # fmt: skip
PLACES = (
    "", ".", "..", "/", "/etc/passwd", "/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self", "/root/x", "~", "-",
    "--", "none", "none/none", "runs", "runs/a/config.yaml", "runs/a/config.yaml/x", "runs/a/../a", "runs/a/",
    "runs//a", "x" * 255, "x" * 256, "x" * 5000, "x/" * 3000, "é" * 200, "a\nb", "\x1b[2J", "\udcff", "../" * 2000,
    "hidden/a", "hidden", "loop", "loop/a", "dangling", "pipe", "runs/a/elite", "runs/a/checkpoints", "name\n", "-x",
)  # fmt: skip


def pick(rng: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(rng.integers(len(items)))]


def sizes(rng: np.random.Generator, least: float, most: float) -> int:
    """A number whose logarithm is uniform between those of both."""
    return int(10 ** rng.uniform(np.log10(least), np.log10(most)))


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def settings(run: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return data


def known(run: Path) -> list[str]:
    """The paths of all settings there are."""
    return leaves(validate(settings(run), SETTINGS).model_dump(mode="json"))


def leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
    """The paths of all values, and of the sections they stand in."""
    found = []
    for key, value in data.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += leaves(value, f"{prefix}{key}.")
    return found


def literal(data: dict[str, Any], path: str, text: str) -> bytes:
    """The file with a value that stands there as it is written, whatever it is."""
    return placed(data, path, "PLACE").replace(b"PLACE", text.encode("utf-8", "surrogatepass"))


def asked(rng: np.random.Generator) -> tuple[str, ...]:
    return pick(rng, [("evaluate", RUN, "--episodes", "1"), ("resume", RUN, "training.max_steps=100000")])


def configured(family: str, rng: np.random.Generator, payload: bytes) -> Case:
    """A run with this configuration; half of the time it is also the working directory."""
    inside = bool(rng.random() < 0.5)
    return Case(family, asked(rng), lambda room: room.put("config.yaml", payload), inside=inside)


def odd_values(rng: np.random.Generator, run: Path) -> Case:
    data = settings(run)
    payload = literal(data, pick(rng, known(run)), pick(rng, ODD))
    return configured("config: odd values", rng, payload)


def tags(rng: np.random.Generator, run: Path) -> Case:
    data = settings(run)
    text = pick(rng, TAGGED)
    if rng.random() < 0.2:
        return configured("config: tags", rng, text.encode())
    return configured("config: tags", rng, literal(data, pick(rng, known(run)), text))


def code(rng: np.random.Generator, run: Path) -> Case:
    """A configuration that names code in one of the many ways to write a text."""
    data = settings(run)
    path = pick(rng, list(CODE))
    (section, key), value = path.split("."), CODE[path]
    escapes = "".join(f"\\x{ord(letter):02x}" for letter in value)
    forms = (
        f"{key}: {value}", f"'{key}': '{value}'", f'{key}: "{escapes}"', f"{key}: >-\n    {value}",
        f"{key}: |-\n    {value}", f"{key}: !!binary {encoded(value)}", f"{key}: !!str {value}", f"{key}: [{value}]",
        f"!!binary {encoded(key)}: {value}", f"? {key}\n  : {value}", f"<<: {{{key}: '{value}'}}",
        f"<<: [{{{key}: '{value}'}}]", f"{key}: !!set {{'{value}'}}", f"{key}: !!omap [{{{key}: '{value}'}}]",
        f"{key}: !!python/name:evilmod.make ''", f"{key}: &x '{value}'", f"{key}: ! '{value}'",
        f"{key}: !<tag:yaml.org,2002:binary> {encoded(value)}", f"? !!str {key}\n  : !!binary {encoded(value)}",
        f"{key}: !!binary |\n    {encoded(value)}", f'"\\x{ord(key[0]):02x}{key[1:]}": {value}',
        f"{key}: CartPole-v1\n  {key}: {value}", f"{key}: {value}\n  <<: {{{key}: CartPole-v1}}",
    )  # fmt: skip
    rest = {name: part for name, part in data.items() if name != section}
    other = "name: module" if section == "network" else "num_envs: 2"
    quoted = f'"\\x{ord(section[0]):02x}{section[1:]}"'
    head = pick(rng, (section, f"!!binary {encoded(section)}", f"!!str {section}", quoted))
    text = yaml.safe_dump(rest) + f"{head}:\n  {other}\n  {pick(rng, forms)}\n"
    return configured("config: names code", rng, text.encode())


def broken(rng: np.random.Generator, run: Path) -> Case:
    """A breakage of the users' own kind, as it would come from somebody else."""
    own = random.Random(int(rng.integers(2**32)))
    text = pick(rng, broken_configs.SHIPPED).read_text()
    made = pick(rng, list(broken_configs.KINDS.values()))(own, text, yaml.safe_load(text))
    if isinstance(made, bytes):
        return configured("config: broken", rng, made)
    return Case("config: broken", ("resume", RUN, *made))


def flipped(rng: np.random.Generator, run: Path) -> Case:
    """A configuration in which some letters have changed."""
    payload = bytearray((run / "config.yaml").read_bytes())
    letters = b"\0\t\n\x1b:{}[]&*!|>'\"%@`#,?-<=~\\\xff\xc3\xed09.eE+_ "
    for _ in range(int(rng.integers(1, 30))):
        place = int(rng.integers(len(payload)))
        length = int(rng.integers(1, 8)) if rng.random() < 0.3 else int(rng.integers(2))
        payload[place : place + length] = bytes([pick(rng, letters)]) if rng.random() < 0.8 else b""
    return configured("config: letters changed", rng, bytes(payload))


def long_values(count: int) -> tuple[str, ...]:
    """Values of about so many letters that a parser could take long over."""
    return (
        "1" + ":59" * count, "0x" + "f" * count, "0b" + "1" * count, "1" + "_" * count, "9" * count + ".0",
        "0" + "7" * count, "1e" + "9" * count, "." + "0" * count + "e1", "-" * count, "+" * count, "<" * count,
        "2020-01-01T00:00:00." + "9" * count, "'" + "''" * count + "'", '"' + "\\u0041" * count + '"',
        "[" + "a, " * count + "]", "{" + ", ".join(f"k{n}: 1" for n in range(count // 6)) + "}",
        ">\n" + "    x\n\n" * (count // 2), "|\n" + "    x\n" * count, "!!binary " + "QUFB" * count,
        "[&a [" + "x, " * min(count, 90) + "], " + "*a, " * min(count, 100) + "]", "!!int 1" + ":59" * count,
        "{<<: [" + "{a: 1}, " * (count // 8) + "]}", "!!float 1" + ":59" * count, "1" + ":59" * count + ".5",
        "\n".join(" " * n + "- " for n in range(3, min(count, 500))), "!!timestamp " + "9" * count,
    )  # fmt: skip


def endless(rng: np.random.Generator, run: Path) -> Case:
    """A configuration that is long, deep, or both, within the limit on its length or just above it."""
    count = sizes(rng, 10, 70_000)
    piece, value = pick(rng, PIECES), pick(rng, long_values(count))
    deep = "\n".join(" " * n + "a:" for n in range(min(count, 505)))
    texts = (piece * count, f"a: {piece * count}", f"seed: {value}", deep, f"a: {value}", f"? {value}\n: 1")
    return configured("config: without end", rng, pick(rng, texts).encode()[: 2**17 + 1])


def overrides(rng: np.random.Generator, run: Path) -> Case:
    """Settings on the command line; those that name code are the user's own and not tried."""
    keys = known(run)
    given: list[str] = []
    for _ in range(int(rng.integers(1, 4))):
        key = pick(rng, keys) if rng.random() < 0.7 else pick(rng, KEYS)
        value = pick(rng, (*ODD, *TAGGED)) if rng.random() < 0.9 else pick(rng, LONG)
        given.append(pick(rng, (f"{key}={value}",) * 6 + (key, value, f"{key}={value}={value}", f" {key} = {value} ")))
        if rng.random() < 0.15:
            given.append(pick(rng, broken_configs.MALFORMED))
    # A letter that ends a text cannot stand in a command line.
    return Case("command line: overrides", ("resume", RUN, *(text.replace("\0", "") for text in given)))


def options(rng: np.random.Generator, run: Path) -> Case:
    """Words of a command line in any order; those that ask for many episodes are tried elsewhere."""
    words = [pick(rng, TOKENS) for _ in range(int(rng.integers(0, 7)))]
    if rng.random() < 0.7:
        words[:0] = [pick(rng, ("evaluate", "resume")), RUN]
    # Without a number a hundred episodes would be played.
    if words[:1] == ["evaluate"]:
        words[1:1] = ["--episodes", "1"]
    return Case("command line: words", words)


def numbers(rng: np.random.Generator, run: Path) -> Case:
    option = pick(rng, ("--episodes", "--seed", "--processes", "--program"))
    command = "evaluate" if option in ("--episodes", "--seed") else "resume"
    few = ("--episodes", "1") if option == "--seed" else ()
    value = pick(rng, NUMBERS)
    given = (option, value) if rng.random() < 0.5 else (f"{option}={value}",)
    return Case("command line: numbers", (command, RUN, *few, *given))


def _strange_places(room: Room) -> None:
    """Make what some of PLACES name."""
    (room.path / "hidden" / "a").mkdir(parents=True)
    (room.path / "loop").symlink_to("loop")
    (room.path / "dangling").symlink_to("nowhere")
    os.mkfifo(room.path / "pipe")
    for name in ("\udcff", "name\n", "\x1b[2J"):
        with contextlib.suppress(OSError):  # Not every file system has such names.
            (room.path / name).symlink_to("runs/a")
    (room.path / "hidden").chmod(0)


def paths(rng: np.random.Generator, run: Path) -> Case:
    place = pick(rng, PLACES)
    evaluate = ("evaluate", place, "--episodes", "1")
    command = pick(
        rng, (evaluate, ("resume", place), ("resume", RUN, "--program", place), ("resume", f"{RUN}/{place}"))
    )
    return Case("command line: paths", command, _strange_places, unprivileged=bool(rng.random() < 0.5))


TEXTS: tuple[Family, ...] = (
    odd_values, tags, code, code, broken, flipped, endless, overrides, options, numbers, paths,
)  # fmt: skip
