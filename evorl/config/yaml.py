"""Parsing of settings: YAML files, command-line overrides, and the configurations shipped with the package."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evorl.config.fields import EXPONENT, algorithm_of, without
from evorl.config.run import Environment
from evorl.config.task import OF_ALGORITHM, OF_TASK, Tuned, environment_of, suite_of
from evorl.types.messages import message_of, nearest, on_one_line, shown
from evorl.types.outcomes import UserError

MAX_BYTES = 2**17
"""Maximum size of a configuration in bytes; the largest shipped one has some thousands."""
DEFAULT_ID: str = Environment.model_fields["id"].default
SHORT = {"environment": "id", "algorithm": "name", "evaluation.environment": "id"}
"""The key that a bare string in place of a section sets, as in `environment: CartPole-v1`."""
OFF = {"evolution": "selection.name"}
"""The key that `false` in place of a section sets to `none`, as in `evolution: false`."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects tags, duplicate keys and keys that are no texts.

    As in YAML 1.2, 1e-3 is a number, 010 is ten, and 1:30, which is ninety in YAML 1.1, is a text.
    """

    def fetch_tag(self) -> None:
        # Constructors of tags raise AttributeError and KeyError for values that do not fit them.
        raise yaml.scanner.ScannerError(None, None, "it has a tag (`!`); values are plain", self.get_mark())

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "")
        # As in YAML 1.2, a leading 0 makes no octal number.
        number: int = int(text) if text.lstrip("+-").isdecimal() else super().construct_yaml_int(node)
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for key in mapping:
            if not isinstance(key, str):
                # Numeric keys would not survive the round trip through a run's saved configuration.
                reason = f"key {shown(key)} is not a string"
                raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for letter in "-+0123456789":
    # Before the others, which read minutes and seconds as one number.
    of_times = ("tag:yaml.org,2002:str", re.compile(r"^[-+]?\d[\d_]*(:\d+)+(\.[\d_]*)?$"))
    _Loader.yaml_implicit_resolvers[letter].insert(0, of_times)
_Loader.add_implicit_resolver(*EXPONENT)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises UserError if it is unreadable or not a mapping."""
    where = on_one_line(str(path))
    try:
        with path.open("rb") as file:
            payload = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{where}: cannot read the configuration: {error.strerror}") from error
    return parse_settings(payload, where)


def parse_settings(payload: bytes, where: str) -> dict[str, Any]:
    """Parse the mapping in a YAML file, named `where` in errors. Raises UserError if it is too large or no mapping."""
    if len(payload) > MAX_BYTES:
        raise UserError(f"{where}: cannot read the configuration: it has more than {MAX_BYTES} bytes")
    try:
        data = _parse(payload.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: cannot read the configuration: it is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {_why(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{where}: the configuration must be a mapping of sections, not a {type(data).__name__}")
    for path, name in SHORT.items():
        *outer, key = path.split(".")
        section = data.get(outer[0]) if outer else data
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = {name: section[key]}
    off = {key: _with_value({}, path.split("."), "none", key) for key, path in OFF.items() if data.get(key) is False}
    return data | off


def plain_assignments(arguments: Sequence[str], *names: str) -> list[str]:
    """Strip the dashes of `--key.path=value` arguments, the form in which `wandb sweep` passes settings.

    This also applies to `names`, and to sections that a bare string may set, which have no dot.
    """
    dashed = re.compile(rf"--(\w+(\.\w+)+|{'|'.join([*SHORT, *OFF, *names])})=")
    return [argument[2:] if dashed.match(argument) else argument for argument in arguments]


def assignment(path: str, value: str) -> str:
    """`path=value` as on the command line, where `value` is read as that text whatever it contains."""
    return f"{path}={json.dumps(value, ensure_ascii=False)}"


def override(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with `key.path=value` overrides applied; values are parsed as YAML. Raises UserError."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise UserError(f"{shown(assignment)}: an override has the form key.path=value")
        where = on_one_line(path, 80)
        try:
            value = _parse(text)
        except yaml.YAMLError as error:
            raise UserError(f"{where}: {shown(text)} is not valid YAML: {_why(error)}") from error
        if _is_cut(text, value):
            raise UserError(f"{where}: {shown(text)} has a comment, which begins at the #; quote a text that has one")
        if path in SHORT and isinstance(value, str):
            keys.append(SHORT[path])
        if path in OFF and value is False:
            keys, value = [path, *OFF[path].split(".")], "none"
        data = _with_value(data, keys, value, where)
    return data


def _parse(text: str) -> Any:
    """Parse YAML. Raises yaml.YAMLError, also for errors of the parser itself."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error


def _why(error: yaml.YAMLError) -> str:
    return on_one_line(message_of(error), 200)


def _is_cut(text: str, value: Any) -> bool:
    """True if a comment ends the value before the text does: what stands before its # then has the same value."""
    for sign in re.finditer(r"(^|\s)#", text):
        with contextlib.suppress(yaml.YAMLError):
            if _parse(text[: sign.start()]) == value:
                return True
    return False


def _with_value(data: Any, keys: list[str], value: Any, where: str) -> dict[str, Any]:
    if data is not None and not isinstance(data, dict):
        raise UserError(f"{where}: there is no such key; the path goes through a value, not a section")
    changed: dict[str, Any] = dict(data or {})
    head, *rest = keys
    changed[head] = _with_value(changed.get(head), rest, value, where) if rest else value
    return changed


PACKAGE = Path(__file__).parent.parent
ROOT = installed if (installed := PACKAGE / "shipped").is_dir() else PACKAGE.parent
"""The folder of `configs` and `demos`: inside an installed package, beside the package in a clone."""
ACCELERATE = ROOT / "configs" / "accelerate" / "accelerate.yaml"
TRAINING = ROOT / "configs" / "training"
TASKS = ROOT / "configs" / "tasks.yaml"
"""The tasks that shipped configurations are tuned for besides their own."""


def shipped_names() -> list[str]:
    """Return the names of the shipped training configurations, such as `ppo` and `ppo_continuous`."""
    return sorted(path.stem for path in TRAINING.glob("*.yaml"))


def tuned_files() -> dict[str, Tuned]:
    """Return the shipped configurations that are tuned for certain tasks, by name (`configs/tasks.yaml`)."""
    return {name: Tuned(entry["algorithm"], entry["tasks"]) for name, entry in read_yaml(TASKS).items()}


def tuned_name(algorithm: str, environment: str) -> str | None:
    """Return the name of the shipped configuration of an algorithm that is tuned for an environment, if there is one.

    The file named like the algorithm is the general one, and never returned.
    """
    for name, tuned in tuned_files().items():
        if tuned.algorithm == algorithm and tuned.settings_for(environment) is not None:
            return name
    return None


def configuration_file(name: str, assignments: Sequence[str] = ()) -> Path:
    """Resolve a configuration name: a file path, or a shipped configuration. Raises UserError.

    Where `name` is an algorithm's and the overrides `assignments` name another one, it is the other's; and the one that
    is tuned for the environment, if there is one. `ppo.yaml` in place of `ppo` is always that file.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        return TRAINING / name if name in (f"{shipped}.yaml" for shipped in shipped_names()) else path
    if name not in shipped_names():
        raise UserError(f"{shown(name)} is neither a file nor a shipped configuration" + nearest(name, shipped_names()))
    before = read_yaml(TRAINING / f"{name}.yaml")["algorithm"]["name"]
    data = override({"algorithm": {"name": before}}, assignments)
    algorithm = algorithm_of(data)
    if name == before and algorithm is not None and algorithm in shipped_names():
        name = algorithm
    if name == algorithm:
        name = tuned_name(algorithm, environment_of(data)) or name
    return TRAINING / f"{name}.yaml"


def read_settings(path: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Read a file's settings and apply `key.path=value` overrides. Raises UserError.

    If the overrides name another algorithm than the file does, the settings of its own are not read. Of a shipped file,
    only what holds for the environment that the overrides name is read: all for its own one, all but the target for
    others of its suite or that it is tuned for, and its algorithm's settings for any other.
    """
    return override(_read(path, assignments)[0], assignments)


def source(path: Path, assignments: Sequence[str]) -> str:
    """Describe in words which file `read_settings` reads, and which of its settings it drops."""
    _, dropped = _read(path, assignments)
    if dropped:
        return f"{_name_of(path)}, without the {' and the '.join(dropped)}"
    return _name_of(path) if _is_shipped(path) else f"{_name_of(path)}, as written"


def _read(path: Path, assignments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings of a file that hold with these overrides; also describe the others in words."""
    file = settings = read_yaml(path)
    changed, dropped = override(file, assignments), []
    section = file.get("algorithm")
    named = section.get("name") if isinstance(section, dict) else None
    if named is not None and named != algorithm_of(changed):
        settings = without(settings, OF_ALGORITHM)
        dropped.append(f"algorithm, replay, actors and ranges of {on_one_line(str(named))}")
    id = environment_of(changed) or DEFAULT_ID
    if not _is_for(path, file, id):
        settings, words = _for_task(path, settings, id)
        dropped.append(f"{words} of {environment_of(file)}")
    return settings, dropped


def is_for_another_task(path: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether `settings` were read from a shipped file of another environment, whose target does not hold."""
    return not _is_for(path, read_yaml(path), environment_of(settings) or DEFAULT_ID)


def _is_for(path: Path, data: Mapping[str, Any], id: str) -> bool:
    return not _is_shipped(path) or environment_of(data) == id


def _for_task(path: Path, data: Mapping[str, Any], id: str) -> tuple[dict[str, Any], str]:
    """Select a shipped file's settings for another environment `id`; also describe the omitted ones in words."""
    tuned = tuned_files().get(path.stem)
    added = None if tuned is None else tuned.settings_for(id)
    if added is None and (suite_of(id) == "" or suite_of(id) != suite_of(environment_of(data))):
        copies = {key: value for key, value in data["environment"].items() if key == "num_envs"}
        return without(data, OF_TASK) | {"environment": copies}, "target, lengths and environment settings"
    settings = without(data, ["training.target_fitness"])
    for key, value in (added or {}).items():
        settings = _with_value(settings, key.split("."), value, key)
    return settings, "target"


def _is_shipped(path: Path) -> bool:
    return path.resolve().parent == TRAINING.resolve()


def _name_of(path: Path) -> str:
    """Return a file's display name: relative to the shipped folder or the working directory, else its base name."""
    path = path.absolute()
    for folder in (ROOT.absolute(), Path.cwd()):
        if path.is_relative_to(folder):
            return on_one_line(str(path.relative_to(folder)))
    return on_one_line(path.name)
