"""A file imports only from floors below its own, or from its own room."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "evorl"
FLOORS = [
    {"seeding"},
    {"types"},
    {"config"},
    {"system"},
    {"distributed"},
    {"envs"},
    {"networks"},
    {"replay"},
    {"evolution"},
    {"algorithms"},
    {"population"},
    {"tracking"},
    {"actors"},
    {"runs"},
    {"report"},
    {"export"},
    {"commands"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name.startswith("evorl."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = room(path)
    assert here in FLOOR, "a new room needs a floor"
    for other in imported(path):
        assert other == here or FLOOR[other] < FLOOR[here], (
            f"{path.name} (floor {FLOOR[here]}) imports {other} (floor {FLOOR[other]})"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_file_talks_to_the_other_processes(path):
    text = path.read_text()
    # The launcher is a program of its own, which starts the processes.
    if path.relative_to(PACKAGE).as_posix() not in ("distributed/ranks.py", "distributed/local_launch.py"):
        assert "import accelerate" not in text
        assert "from accelerate" not in text
        assert "torch.distributed" not in text
    assert "pickle" not in text or path.name == "formats.py"
    assert "torch.load" not in text
