"""A file imports only from floors below its own, or from its own room."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "evorl"
FLOORS = [
    {"seeding"},
    {"types"},
    {"system"},
    {"config"},
    {"kernels"},
    {"distributed"},
    {"envs"},
    {"networks"},
    {"replay"},
    {"evolution"},
    {"algorithms"},
    {"population"},
    {"league"},
    {"tracking"},
    {"actors"},
    {"runs/agents"},
    {"runs/storage"},
    {"runs/reading"},
    {"runs/output"},
    {"runs"},
    {"report"},
    {"export"},
    {"commands"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ALONE = {
    "evorl.distributed.local_launch": "it is run, not imported",
}
"""Small files with fewer than two users, and why."""
REGISTRIES = PACKAGE / "algorithms" / "__init__.py", PACKAGE / "tracking" / "trackers.py"
"""Files of registries, each entry of which has a file of its own."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(parts):
    """The room of a module or package within evorl: its folder, or its folder there if that has a floor."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOOR else parts[0]


@cache
def imported(path):
    """Modules that a file imports, anywhere in it, and names that it imports from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_imports_go_down():
    for path in FILES:
        here = room(path.relative_to(PACKAGE).with_suffix("").parts)
        assert here in FLOOR, f"{here} is new and needs a floor"
        for other in {room(name.split(".")[1:]) for name in imported(path) if name.startswith("evorl.")} & FLOOR.keys():
            assert other == here or FLOOR[other] < FLOOR[here], (
                f"{path} (floor {FLOOR[here]}) imports {other} (floor {FLOOR[other]})"
            )


def test_only_one_file_talks_to_the_other_processes():
    for path in FILES:
        text = path.read_text()
        # The launcher is a program of its own, which starts the processes.
        if path.relative_to(PACKAGE).as_posix() not in ("distributed/ranks.py", "distributed/local_launch.py"):
            assert not re.search("import accelerate|from accelerate|torch.distributed", text), path
        assert "pickle" not in text or path.name == "formats.py", path
        assert "torch.load" not in text, path


def test_no_files_import_each_other():
    """Also not by way of other files, and not by imports within functions."""
    modules = {".".join(("evorl", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    imports = {module: imported(path) & modules.keys() for module, path in modules.items()}
    # Take away files that import none of those left, until nothing changes: what stays is on a circle or leads to one.
    left = set(modules)
    while free := {module for module in left if not imports[module] & left}:
        left -= free
    assert not left


def test_a_small_file_has_more_than_one_user():
    """A file that only one other imports is a section of that one, unless it is a subject of its own."""
    modules = {path: ".".join(("evorl", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES}
    texts = {path: path.read_text() for path in [*FILES, PACKAGE / "__init__.pyi"]}
    for path, module in modules.items():
        if len(texts[path].splitlines()) >= 60 or path.name.startswith("__") or module in ALONE:
            continue
        package, _, name = module.rpartition(".")
        by_name = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        users = [other for other in texts if other != path and by_name.search(texts[other])]
        is_entry = users in ([registry] for registry in REGISTRIES)
        assert len(users) > 1 or is_entry, f"{path.name} is imported by {users[0].name if users else 'nobody'} alone"
