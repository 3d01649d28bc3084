"""The configurations and programs shipped with the package, in a clone or an installation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evorl.config.errors import nearest, on_one_line, shown
from evorl.config.origins import Origins
from evorl.config.reader import SHORT, override, read_yaml
from evorl.config.schema import Environment
from evorl.config.task import environment_of, for_another, paths_in
from evorl.types import UserError

PACKAGE = Path(__file__).parent.parent
ROOT = installed if (installed := PACKAGE / "shipped").is_dir() else PACKAGE.parent
"""The folder of `configs` and `demos`: inside an installed package, beside the package in a clone."""
ACCELERATE = ROOT / "configs" / "accelerate" / "accelerate.yaml"
TRAINING = ROOT / "configs" / "training"
OF_ALGORITHM = ("algorithm", "replay", "actors")
"""Sections that are specific to an algorithm."""


def shipped_names() -> list[str]:
    """Return the names of the shipped training configurations, such as `ppo` and `ppo_continuous`."""
    return sorted(path.stem for path in TRAINING.glob("*.yaml"))


def configuration_file(name: str) -> Path:
    """Resolve a configuration name: a shipped configuration or a file path. Raises UserError."""
    own = Path(name)
    if own.suffix in (".yaml", ".yml") or own.is_file():
        return own
    if name in shipped_names():
        return TRAINING / f"{name}.yaml"
    raise UserError(f"{shown(name)} is no file and no shipped configuration" + nearest(name, shipped_names()))


def read_settings(path: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Read a file's settings with `key.path=value` overrides applied. Raises UserError.

    If they change the algorithm to one with a shipped configuration, that configuration replaces a shipped file; in any
    other file it replaces the algorithm's sections and the ranges of its hyperparameters. If they change the
    environment, settings specific to the file's own environment are dropped (`evorl/config/task.py`).
    """
    return settings_and_origins(path, assignments)[0]


def settings_and_origins(path: Path, assignments: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """Read a file's settings with overrides applied, as in `read_settings`, and their origins."""
    file, data = _with_algorithm(path, assignments)
    given = tuple(_path_of(each) for each in assignments)
    changed = override(data, assignments)
    own, asked = environment_of(data), environment_of(changed) or Environment.model_fields["id"].default
    left_out: dict[str, Any] = {}
    if own and own != asked:
        kept, left_out = for_another(data, asked, is_shipped=_is_shipped(path))
        changed = override(kept, assignments)
        data = kept
    in_file = frozenset(paths_in(data))
    left_out = {key: value for key, value in left_out.items() if not Origins(given=given).is_given(key)}
    return changed, Origins(_name_of(file), in_file, given, own, left_out)


def _path_of(assignment: str) -> str:
    """Return the path of the setting or section that an override sets."""
    path = assignment.partition("=")[0]
    return f"{path}.{SHORT[path]}" if path in SHORT and "{" not in assignment else path


def _with_algorithm(path: Path, assignments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Return the effective file and its settings, for the algorithm that the overrides name."""
    data = read_yaml(path)
    before, after = (_algorithm(each) for each in (data, override(data, assignments)))
    named = any(each.startswith(("algorithm.name=", "algorithm=")) and "{" not in each for each in assignments)
    if not named or before == after or after not in shipped_names():
        return path, data
    file = TRAINING / f"{after}.yaml"
    other = read_yaml(file)
    if _is_shipped(path):
        return file, other
    kept = {name: section for name, section in data.items() if name not in OF_ALGORITHM}
    kept |= {name: other[name] for name in OF_ALGORITHM if name in other}
    if isinstance(evolution := data.get("evolution"), dict) and "hyperparameters" in evolution:
        ranges = other.get("evolution", {}).get("hyperparameters")
        kept["evolution"] = {**evolution, "hyperparameters": ranges}
    return path, kept


def _algorithm(data: dict[str, Any]) -> Any:
    section = data.get("algorithm", {})
    name = section.get("name", "dqn") if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


def _is_shipped(path: Path) -> bool:
    return path.resolve().parent == TRAINING.resolve()


def _name_of(path: Path) -> str:
    """Return a file's display name: relative to the shipped folder or the working directory, else its base name."""
    path = path.absolute()
    for place in (ROOT.absolute(), Path.cwd()):
        if path.is_relative_to(place):
            return on_one_line(str(path.relative_to(place)))
    return on_one_line(path.name)
