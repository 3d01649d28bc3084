"""Which code of a run's configuration is executed: that of runs which this user has trained, and installed classes.

Whatever a user trains with is noted in a list of digests in the user's state directory: a line for each working
directory, from which code is imported, with the names of that code and what is passed to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from evorl.config import AnyConfig
from evorl.config.fields import BENCHMARK, RANDOM
from evorl.config.task import GAMES, SIMULATORS
from evorl.system.files import digest, open_file, read_bytes
from evorl.system.plugins import defined_in, import_from_here, is_installed
from evorl.types.outcomes import UserError

FAILURES = (OSError, RuntimeError, UserError)
"""Errors where there is no working directory, no home, no space on the disk, or a link in place of the list."""


def custom_code(config: AnyConfig) -> dict[str, str]:
    """The settings that name code to import, by their paths."""
    names = {
        "environment.id": config.environment.id,
        "evaluation.environment.id": config.evaluation_environment.id if config.evaluation.environment else "",
        "network.factory": config.network.factory or "",
        BENCHMARK: "" if config.league is None or not is_function(config.league.benchmark) else config.league.benchmark,
    }
    packages = (*GAMES, *SIMULATORS)
    return {
        key: name
        for key, name in names.items()
        if ":" in name and not (_is_environment(key) and name.rpartition(":")[0] in packages)
    }


def _is_environment(key: str) -> bool:
    return key.endswith("environment.id")


def is_function(name: str) -> bool:
    """True if an opponent is named like a function, `package.module:player`, and not like a run or a file."""
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None


def is_run(name: str) -> bool:
    """True if an opponent is named like the directory of a run."""
    return name != RANDOM and not is_function(name)


def code_to_allow(config: AnyConfig) -> dict[str, str]:
    """The part of `custom_code` that needs the user's leave."""
    names = {
        key: path for key, path in custom_code(config).items() if not _is_installed_class(path, _is_environment(key))
    }
    return {} if not names or is_trained(config) else names


def refuse_code(config: AnyConfig, allowed: bool) -> None:
    """Raise UserError if a run's configuration names code that needs the user's leave, unless that is `allowed`."""
    for key, name in {} if allowed else code_to_allow(config).items():
        raise UserError(
            f"{key}: {name!r} names custom code to execute; add --allow-code (allow_code=True in Python) if you "
            "trust this run"
        )


def _is_installed_class(path: str, is_environment: bool) -> bool:
    """True if `module:name` is a class, or the name of an environment registered by a package in site-packages.

    Not for a function, to which `environment.kwargs` could pass anything; a class must be an environment for that.
    """
    module, _, name = path.rpartition(":")
    try:
        named = defined_in(import_from_here(module), name) if is_installed(module) else name
        return isinstance(named, type) or (is_environment and named is None)
    except ImportError:
        return True  # Whoever needs it says why it cannot be imported.


def is_trained(config: AnyConfig) -> bool:
    """True if this user has trained, from this working directory, with all the code that a configuration names."""
    with contextlib.suppress(*FAILURES):
        return _digest(config) in read_bytes(_trained()).split(b"\n")
    return False


def note_trained(config: AnyConfig) -> None:
    """Add the code that a configuration names, if any, to the user's list; nothing where that fails."""
    if not custom_code(config) or is_trained(config):
        return
    with contextlib.suppress(*FAILURES):
        path = _trained()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_file(path, "ab") as file:
            # A line of its own, even after half a line of a killed process.
            file.write(b"\n" + _digest(config) + b"\n")


def _digest(config: AnyConfig) -> bytes:
    """The digest of the code that a configuration names, its arguments and the working directory. Raises OSError."""
    environments = [config.environment, config.evaluation_environment]
    used = [environment.model_dump(mode="json", include={"id", "kwargs"}) for environment in environments]
    content = [str(Path.cwd()), custom_code(config), used]
    return digest(json.dumps(content, sort_keys=True).encode()).encode()


def _trained() -> Path:
    """The user's list, in the directory that the XDG base directory specification names for states."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "evorl" / "trained"
