"""The configurations and programs that are shipped with the package, in a clone and in an installed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evorl.config.errors import nearest, shown
from evorl.config.reader import override, read_yaml
from evorl.types import UserError

PACKAGE = Path(__file__).parent.parent
ROOT = installed if (installed := PACKAGE / "shipped").is_dir() else PACKAGE.parent
"""The folder of `configs` and `demos`: an installed package has them inside, a clone beside it."""
ACCELERATE = ROOT / "configs" / "accelerate" / "accelerate.yaml"
TRAINING = ROOT / "configs" / "training"
OF_ALGORITHM = ("algorithm", "replay", "actors")
"""The sections whose keys mean nothing to another algorithm."""


def shipped_names() -> list[str]:
    """Return the names of the shipped training configurations, such as `ppo` and `ppo_continuous`."""
    return sorted(path.stem for path in TRAINING.glob("*.yaml"))


def configuration_file(name: str) -> Path:
    """Return the file that a person names: a shipped configuration, or a file of their own. Raises UserError."""
    own = Path(name)
    if own.suffix in (".yaml", ".yml") or own.is_file():
        return own
    if name in shipped_names():
        return TRAINING / f"{name}.yaml"
    raise UserError(f"{shown(name)} is no file and no shipped configuration" + nearest(name, shipped_names()))


def read_settings(path: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a file with `key.path=value` assignments applied. Raises UserError.

    Where they change the algorithm's name, and it has a shipped configuration, that takes the place of a shipped file;
    of another file it replaces the sections that belong to the algorithm, and the ranges of its hyperparameters.
    """
    data = read_yaml(path)
    changed = override(data, assignments)
    before, after = (_algorithm(each) for each in (data, changed))
    named = any(each.startswith(("algorithm.name=", "algorithm=")) and "{" not in each for each in assignments)
    if not named or before == after or after not in shipped_names():
        return changed
    other = read_yaml(TRAINING / f"{after}.yaml")
    if path.resolve().parent == TRAINING.resolve():
        return override(other, assignments)
    kept = {name: section for name, section in data.items() if name not in OF_ALGORITHM}
    kept |= {name: other[name] for name in OF_ALGORITHM if name in other}
    if isinstance(evolution := data.get("evolution"), dict) and "hyperparameters" in evolution:
        ranges = other.get("evolution", {}).get("hyperparameters")
        kept["evolution"] = {**evolution, "hyperparameters": ranges}
    return override(kept, assignments)


def _algorithm(data: dict[str, Any]) -> Any:
    section = data.get("algorithm", {})
    name = section.get("name", "dqn") if isinstance(section, dict) else section
    return name if isinstance(name, str) else None
