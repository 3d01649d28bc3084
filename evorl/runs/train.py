"""`evorl.train`: training from a script or a notebook, with the same programs as the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from pydantic import BaseModel

from evorl.config import AnyConfig, Environment, Evolution, Network, model_of
from evorl.config.algorithms import SETTINGS
from evorl.config.errors import keys_of
from evorl.config.evolution import PopulationSettings
from evorl.config.fields import DEFAULT_ALGORITHM, AlgorithmSettings, given_in
from evorl.config.learning import ActorSettings, Replay
from evorl.config.run import Checkpoint, Evaluation, LeagueSettings, RunSettings, Tracking, Training
from evorl.config.schema import Config
from evorl.config.yaml import configuration_file
from evorl.distributed import own_world
from evorl.runs.configuration import program_for, read_config
from evorl.runs.output.callbacks import Callback
from evorl.runs.reading.loaded import LoadedAgent, load
from evorl.runs.reading.read import RunRecord, read_run
from evorl.runs.run import Run
from evorl.runs.storage.directory import from_here, saved_settings
from evorl.seeding import global_generators_restored
from evorl.system.console import digits, warnings_on_one_line
from evorl.system.plugins import SCRIPT, name_of
from evorl.system.processes import keep_freed_memory
from evorl.system.signals import Interrupted, signal_handlers
from evorl.types.messages import shown
from evorl.types.outcomes import UserError

Main = Callable[[Sequence[str], Sequence[Callback]], Run]
"""A demo's `main`: (command line, callbacks) -> the run that has ended."""


def main_of(program: Path) -> Main:
    """Import a program for its `main`. Raises UserError if `program` is not a Python file."""
    spec = importlib.util.spec_from_file_location(f"evorl_demo_{program.stem}", program)
    if spec is None or spec.loader is None or not program.is_file():
        raise UserError(f"{program}: is not a Python program")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Main = module.main
    return main


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended: its directory `path`, and the contents of its `summary.json`."""

    path: Path
    summary: Mapping[str, Any]

    def __repr__(self) -> str:
        task = ""
        with contextlib.suppress(UserError):  # A directory that is gone is no reason to fail at a prompt.
            config = saved_settings(self.path)
            task = f"{config['algorithm']['name']} on {config['environment']['id']}, "
        best = self.summary.get("elite_fitness")
        fitness = "none yet" if best is None else digits(best)
        steps = f"{self.summary.get('agent_steps', 0):,} steps of each agent"
        return (
            f"<TrainedRun {from_here(self.path)}: {task}{self.summary.get('ended')}, {steps}, best fitness {fitness}>"
        )

    def load(self, *, agent: int | None = None, generation: int | None = None, seed: int = 0) -> LoadedAgent:
        """Load the best agent, or another one, as `evorl.load` does, with custom code of the configuration allowed."""
        return load(self.path, agent=agent, generation=generation, allow_code=True, seed=seed)

    def read(self) -> RunRecord:
        """Read the run's directory, with metrics and lineage as tables, as `evorl.read_run` does."""
        return read_run(self.path)


def train(
    config: str | Path | Mapping[str, Any] | AnyConfig | None = None,
    *,
    algorithm: AlgorithmSettings | Mapping[str, Any] | str | None = None,
    environment: Environment | str | Mapping[str, Any] | Callable[..., Any] | None = None,
    seed: int | None = None,
    run: RunSettings | Mapping[str, Any] | None = None,
    network: Network | Mapping[str, Any] | None = None,
    actors: ActorSettings | Mapping[str, Any] | None = None,
    replay: Replay | Mapping[str, Any] | None = None,
    population: PopulationSettings | Mapping[str, Any] | None = None,
    evolution: Evolution | Mapping[str, Any] | Literal[False] | None = None,
    league: LeagueSettings | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    training: Training | Mapping[str, Any] | None = None,
    tracking: Tracking | Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> TrainedRun:
    """Train and evolve a population; block until the run ends, and return it on every rank of the launch.

    `config` is the name of a shipped configuration, a YAML file, or the settings themselves; None is `dqn`. An
    algorithm's name, such as `ppo`, selects the file tuned for the environment, if there is one; `ppo.yaml` always
    selects the general file.

    The other parameters change settings. A section is given as an object, `training=evorl.Training(max_steps=10_000)`,
    or as a mapping, `training={"max_steps": 10_000}`; both change the settings that they name, and leave the others as
    `config` has them. An algorithm's section, such as `algorithm=evorl.PPOSettings(learning_rate=3e-4)`, also selects
    the algorithm, and its shipped configuration in place of another algorithm's. `overrides` are single settings by
    their paths, as in `**{"network.hidden_sizes": [64]}`; they are applied last.

    `environment` may be an environment class or factory function defined at the top level of a module or of the
    script. The run stores it by module and name, so a process that resumes or evaluates the run must be able to import
    it. An environment defined in a script or notebook can be resumed only from there, with
    `run={"name": NAME, "resume": "auto"}`.

    `callbacks` are called with each `evorl.Generation`, on the main process, and may return an `evorl.Stop`.

    Raises UserError for invalid input, RunFailed if a process is lost, and KeyboardInterrupt after Ctrl-C. After the
    last two the run can be resumed.
    """
    sections = {
        "seed": seed, "run": run, "algorithm": algorithm, "network": network, "actors": actors, "replay": replay,
        "population": population, "evolution": evolution, "league": league, "evaluation": evaluation,
        "training": training, "tracking": tracking, "checkpoint": checkpoint,
    }  # fmt: skip
    changed = {key: section for key, section in sections.items() if not _is_empty(section)}
    environment_settings = None if _is_empty(environment) else _settings_in(environment)
    words = assignments(_with_environment(changed, environment_settings) | overrides)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError("callbacks: give a list of functions, such as [watch]")
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        path = _file_of(DEFAULT_ALGORITHM if config is None else config, Path(folder), words)
        configured = read_config(path, words)
        _refuse_script_for_actors(configured)
        main = main_of(program_for(configured))
        with _signals(), warnings_on_one_line(), own_world(), global_generators_restored():
            trained = main(["--config", str(path), *words], callbacks)
    return TrainedRun(trained.path, trained.summary)


def _is_empty(section: Any) -> bool:
    """True if a parameter changes nothing."""
    return section is None or (isinstance(section, BaseModel | Mapping) and not _settings_in(section))


def _settings_in(section: Any) -> Any:
    """Convert a section object to the mapping of the settings that it was given; return anything else unchanged."""
    if isinstance(section, AlgorithmSettings):
        return {"name": section.name} | given_in(section)
    return given_in(section) if isinstance(section, BaseModel) else section


def assignments(overrides: Mapping[str, Any], section: str = "") -> list[str]:
    """Convert settings of a `section` to `key.path=value` arguments; a mapping under a dotted key is one value.

    A section that names no setting changes nothing, but one that may be null is then not. Raises UserError for what a
    configuration cannot hold.
    """
    words: list[str] = []
    for key, setting in overrides.items():
        _check_key(key, section)
        path, value = f"{section}{key}", _settings_in(setting)
        has_keys = isinstance(value, Mapping) and "." not in key and not _is_one_value(path, value)
        inner = assignments(value, f"{path}.") if has_keys else []
        if not inner and not (has_keys and path in _sections()):
            inner = [f"{path}={_text(path, value)}"]
        words += inner
    return words


def _sections() -> set[str]:
    """The paths of the sections of all algorithms' configurations, without those that may be null."""
    keys = (key for settings in SETTINGS.values() for key in keys_of(model_of(settings)))
    return {path for path, owner, name in keys if isinstance(owner.model_fields[name].annotation, type(BaseModel))}


def _check_key(key: Any, section: str) -> None:
    if not isinstance(key, str):
        raise UserError(f"{section.removesuffix('.')}: key {shown(key)} is not a string")


def _is_one_value(path: str, value: Mapping[Any, Any]) -> bool:
    """True for a fitness, whose terms belong together, and for keyword arguments with keys that are not path parts."""
    names = map(str, value)
    is_odd = any(not name or "." in name or "=" in name for name in names)
    return path == "evolution.fitness" or ("environment.kwargs." in f"{path}." and is_odd)


def _text(key: str, value: Any) -> str:
    """Format a value as YAML on one line. Raises UserError if it cannot be represented."""
    try:
        return _written(value, f"{key}.")
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {shown(value)} cannot be written in a configuration") from error


def _written(value: Any, section: str) -> str:
    """Format a value in a `section`, also sections within it, paths, functions, and NumPy scalars and arrays.

    Raises TypeError for other objects, and UserError for a key that is not a string.
    """
    value = _settings_in(value)
    if isinstance(value, FunctionType | type):
        value = name_of(value, section.removesuffix("."))
    if isinstance(value, Mapping):
        for key in value:
            _check_key(key, section)
        inner = {json.dumps(key, ensure_ascii=False): _written(each, f"{section}{key}.") for key, each in value.items()}
        return f"{{{', '.join(f'{key}: {text}' for key, text in inner.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(each, section) for each in value)}]"
    if hasattr(value, "tolist"):
        return _written(value.tolist(), section)
    if isinstance(value, float) and not math.isfinite(value):
        # YAML reads JSON's words for these as strings.
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _with_environment(overrides: Mapping[str, Any], environment: Any) -> dict[str, Any]:
    """Add the environment to the settings; a class or a function, alone or as `id`, is replaced by its name."""
    if environment is None:
        return dict(overrides)
    if isinstance(environment, str):
        return {**overrides, "environment": environment}
    section = environment if isinstance(environment, Mapping) else {"id": environment}
    if "id" in section and not isinstance(section["id"], str):
        if not callable(section["id"]):
            raise UserError(
                f"environment: {shown(section['id'])} is not a class, a function or an id, of which copies can be made"
            )
        section = {**section, "id": name_of(section["id"])}
        if "kwargs" in section:
            # Under a dotted key they replace those of the configuration, which are another environment's.
            overrides = {"environment.kwargs": section.pop("kwargs"), **overrides}
    return {"environment": section, **overrides}


def _file_of(config: str | Path | Mapping[str, Any] | AnyConfig, folder: Path, given: Sequence[str]) -> Path:
    """The path of a configuration file; settings are written to one in `folder`. Raises UserError."""
    if isinstance(config, str | Path):
        return configuration_file(str(config), given).absolute()
    if not isinstance(config, Mapping | Config):
        raise UserError(
            f"config: {shown(config)} is not a configuration; give a name such as 'ppo', a file or a mapping"
        )
    # The first line of the run's output shows this file name.
    path = folder / "your settings"
    data = config if isinstance(config, Mapping) else config.model_dump(mode="json")
    path.write_text(_text("config", data), encoding="utf-8")
    return path


def _refuse_script_for_actors(config: AnyConfig) -> None:
    """Raise UserError if actor processes would need what is defined in a script, which they do not run."""
    for section, name in (("environment", config.environment.id), ("network", config.network.factory or "")):
        if name.startswith(SCRIPT) and config.actors is not None:
            raise UserError(
                f"{section}: {name.removeprefix(SCRIPT)} is defined in the script or notebook itself, which the "
                "processes of actors do not run; put it into a module of its own, and import it from there"
            )


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Shut down cleanly on a signal; Ctrl-C is re-raised as KeyboardInterrupt.

    Handlers can be installed only in the main thread. They are not installed at an interactive prompt, since they
    would kill a process that is stuck.
    """
    if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
        yield
        return
    try:
        with signal_handlers():
            yield
    except Interrupted as told:
        if told.name == "SIGINT":
            raise KeyboardInterrupt from told
        raise
