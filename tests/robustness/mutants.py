"""Mutation testing: change single tokens of the program, at random, and see which of the changes the tests notice.

    OMP_NUM_THREADS=1 python tests/robustness/mutants.py [--count 60] [--seed 1] [--skip N] [--at FILE[:LINE] ...]
        [--whole-suite] [--limit 60] [--tree DIRECTORY]

A mutant swaps an operator (`+` and `-`, `*` and `/`, `<` and `<=`, `==` and `!=`, `and` and `or`, `&` and `|`, ...),
takes a `not` away, turns a truth value round, or adds or takes 1 from a number, in a copy of the tree. The quick tests
of its own package are run first, those that name the mutated module or function before the others, then the quick tests
of other packages that name it, and with `--whole-suite` all remaining tests. The first test that fails kills the
mutant; so does one that takes longer than `--limit` seconds. A test that fails without the mutant too ends the program.

The same seed draws the same mutants from the same code, and a larger count draws more of the same sequence, so that
`--tree` compares the tests of two revisions. `--at` draws from the mutants of some files, or tries all of a line.
Prints each mutant with what killed it, the survivors, and the share killed; exits with 1 if one survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("algorithms", "envs", "evolution", "networks", "population", "replay")
LEFT_OUT = (".git", ".*_cache", ".hypothesis", "__pycache__")
"""What a copy of the tree does not need."""
QUICK = "not slow and not two_process"
RUN_LIMIT = 1800.0
"""Seconds for all tests of a stage together; a test's own limit does not reach what hangs outside of tests."""
MEMORY = 32 * 2**30

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one token, or of a two-word operator; lines count from 1, columns from 0."""

    path: str
    line: int
    column: int
    old: str
    new: str
    names: tuple[str, ...]
    """The classes and functions around it, and its module."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.old} -> {self.new}"

    def apply(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1]
        assert line[self.column :].startswith(self.old), self
        lines[self.line - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        return "".join(lines)


@dataclass(frozen=True)
class Outcome:
    """What pytest said: the test that failed, if any, and whether a limit ended it."""

    failed: str | None
    late: bool
    text: str


class Finder(ast.NodeVisitor):
    """Collects the mutants of a file. Annotations are not evaluated, and texts are not behaviour."""

    def __init__(self, text: str, path: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._around = [Path(path).stem]
        self._lines = text.splitlines()
        self._tokens = [
            (token.start, token.string)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER)
        ]

    def _position(self, line: int, offset: int) -> tuple[int, int]:
        """Return a position in characters; `ast` counts bytes."""
        return line, len(self._lines[line - 1].encode()[:offset].decode())

    def _add(self, start: tuple[int, int], old: str, new: str) -> None:
        self.found.append(Mutant(self._path, *start, old, new, tuple(self._around)))

    def _operator(self, kind: ast.AST, left: ast.expr) -> None:
        """Add the mutant of the operator that follows an expression."""
        if type(kind) not in OPERATORS:
            return
        old, new = OPERATORS[type(kind)]
        assert left.end_lineno is not None
        assert left.end_col_offset is not None
        end = self._position(left.end_lineno, left.end_col_offset)
        first = old.split()[0]
        for start, string in self._tokens:
            if start >= end and string in (first, f"{first}="):
                if self._lines[start[0] - 1][start[1] :].startswith(old):
                    self._add(start, old, new)
                return

    def _scope(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._around.append(node.name)
        self.generic_visit(node)
        self._around.pop()

    visit_ClassDef = visit_FunctionDef = _scope

    def visit_arg(self, node: ast.arg) -> None:
        """Pass over a parameter, which has nothing but an annotation."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Pass over formatted text."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operator(node.op, node.left)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._operator(node.op, node.target)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values[:-1]:
            self._operator(node.op, value)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, kind in zip((node.left, *node.comparators), node.ops, strict=False):
            self._operator(kind, left)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(self._position(node.lineno, node.col_offset), "not ", "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start = self._position(node.lineno, node.col_offset)
        if isinstance(node.value, bool):
            self._add(start, str(node.value), str(not node.value))
        elif isinstance(node.value, int | float):
            (old,) = (string for at, string in self._tokens if at == start)
            # By its place, so that a file's other mutants stay what they are when a line is added.
            self._add(start, old, repr(node.value + 1) if sum(start) % 2 else f"({node.value - 1!r})")


def mutants(tree: Path, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Return all mutants of the rooms of a tree."""
    found: list[Mutant] = []
    for path in sorted(path for room in rooms for path in (tree / "evorl" / room).rglob("*.py")):
        text = path.read_text()
        finder = Finder(text, path.relative_to(tree / "evorl").as_posix())
        # The return annotation is the only part of a function that NodeVisitor cannot pass over by its type.
        parsed = ast.parse(text)
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef):
                node.returns = None
        finder.visit(parsed)
        found += finder.found
    return found


class Workplace:
    """A copy of a tree in which mutants are tried, by processes that are forked after the large imports."""

    def __init__(self, tree: Path, scratch: Path, limit: float) -> None:
        self._tree = scratch / "tree"
        self._scratch = scratch
        self._limit = limit
        self._sound: dict[str, bool] = {}
        shutil.copytree(tree, self._tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)

    def stages(self, mutant: Mutant, whole_suite: bool) -> Iterator[list[str]]:
        """Yield the arguments of pytest that select tests: the mutant's own room, other rooms, all."""
        room, module = mutant.path.split("/")[0], mutant.path.removesuffix(".py").replace("/", ".")
        own, others = {}, {}
        for path in sorted((self._tree / "tests").rglob("test_*.py")):
            text, name = path.read_text(), path.relative_to(self._tree).as_posix()
            imports = f"evorl.{module} " in text or f"evorl.{module}." in text
            mentions = sum(bool(re.search(rf"\b{each}\b", text)) for each in mutant.names if not each.startswith("__"))
            score = -10 * imports - mentions
            if path.parent.name == room:
                own[name] = score
            elif imports or (mentions and f"evorl.{room}" in text):
                others[name] = score
        for scores in (own, others):
            if scores:
                yield ["-m", QUICK, *sorted(scores, key=lambda name: (scores[name], name))]
        if whole_suite:
            yield ["tests"]

    def tried(self, mutant: Mutant, whole_suite: bool = False) -> Outcome:
        """Return what the tests say of a mutant. Raises RuntimeError if a test that fails does so without it too."""
        path = self._tree / "evorl" / mutant.path
        original = path.read_text()
        outcome = Outcome(None, False, "")
        for chosen in self.stages(mutant, whole_suite):
            self._write(path, mutant.apply(original))
            try:
                outcome = self.run(*chosen)
            finally:
                self._write(path, original)
            if outcome.failed is not None:
                self._check_sound(outcome, chosen)
                break
        return outcome

    def _check_sound(self, outcome: Outcome, chosen: Sequence[str]) -> None:
        """Raise RuntimeError if what failed does so without a mutant too."""
        assert outcome.failed is not None
        # If it is not a test it is an import, of a test's file or of what all of them use.
        again = [outcome.failed] if "::" in outcome.failed else ["--collect-only", *chosen]
        key = " ".join(again)
        if key not in self._sound:
            self._sound[key] = self.run(*again).failed is None
        if not self._sound[key]:
            raise RuntimeError(f"{outcome.failed} fails without a mutant too:\n{outcome.text[-3000:]}")

    def run(self, *chosen: str) -> Outcome:
        """Run tests until the first that fails."""
        out, temporary = self._scratch / "out", self._scratch / "temporary"
        words = ["-x", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider", f"--basetemp={temporary}"]
        pid = os.fork()
        if pid == 0:
            self._test([*words, f"--timeout={self._limit}", *chosen], out)
        deadline, ended = time.monotonic() + RUN_LIMIT, (0, 0)
        try:
            while not ended[0] and time.monotonic() < deadline:
                time.sleep(0.02)
                ended = os.waitpid(pid, os.WNOHANG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not ended[0]:
                os.waitpid(pid, 0)
        shutil.rmtree(temporary, ignore_errors=True)
        text = out.read_text(errors="replace")
        code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
        if code in (0, 5):
            return Outcome(None, False, text)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        name = failed[1] if failed else "an import"
        return Outcome(name, code is None or bool(re.search(r"Timeout \(?>", text)), text)

    def _test(self, arguments: Sequence[str], out: Path) -> None:
        """Become a process that runs the tests of the copy, and of no other tree."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(opened, number)
        os.chdir(self._tree)
        os.environ["PYTHONPATH"] = str(self._tree)
        sys.path[:] = [str(self._tree), *(place for place in sys.path if not Path(place).is_relative_to(ROOT))]
        import pytest

        code = 3
        try:
            code = int(pytest.main([*arguments]))
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _write(self, path: Path, text: str) -> None:
        """Write a module, and remove its bytecode: a second and a size tell Python too little of what has changed."""
        path.write_text(text)
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink(missing_ok=True)


def warm() -> None:
    """Import what every test needs, but nothing of the tree."""
    import accelerate  # noqa: F401
    import gymnasium  # noqa: F401
    import hypothesis  # noqa: F401
    import pydantic  # noqa: F401
    import torch

    torch.set_num_threads(1)


def chosen_mutants(tree: Path, parsed: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the arguments ask for."""
    if not parsed.at:
        return _drawn(mutants(tree), parsed)
    some = mutants(tree, sorted({at.partition("/")[0] for at in parsed.at}))
    chosen = [mutant for mutant in some if f"{mutant.path}:{mutant.line}" in parsed.at]
    return chosen + _drawn([mutant for mutant in some if mutant.path in parsed.at], parsed)


def _drawn(mutants: Sequence[Mutant], parsed: argparse.Namespace) -> list[Mutant]:
    order = np.random.default_rng(parsed.seed).permutation(len(mutants))
    return [mutants[index] for index in order[parsed.skip : parsed.count]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="so many of the first mutants were tried before")
    parser.add_argument("--at", action="append", metavar="FILE[:LINE]", help="such as envs/vector.py:9")
    parser.add_argument("--whole-suite", action="store_true", help="run all other tests on what survives")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a test")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to test")
    parsed = parser.parse_args(arguments)
    # What was started ends with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    warm()
    survivors = []
    chosen = chosen_mutants(parsed.tree, parsed)
    with tempfile.TemporaryDirectory() as name:
        workplace = Workplace(parsed.tree.resolve(), Path(name).resolve(), parsed.limit)
        for mutant in chosen:
            began = time.monotonic()
            outcome = workplace.tried(mutant, parsed.whole_suite)
            said = f"killed by {'the limit in ' if outcome.late else ''}{outcome.failed}"
            if outcome.failed is None:
                survivors.append(mutant)
                said = "SURVIVES"
            print(f"{mutant}: {said} ({time.monotonic() - began:.1f} s)", flush=True)
    print("\nsurvivors:", *(map(str, survivors) if survivors else ["none"]), sep="\n  ")
    share = 1 - len(survivors) / max(1, len(chosen))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed ({share:.0%})")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
