"""Opponents by name, for matches and for `league.benchmark`, and the copy that a run keeps of its benchmark.

A name is `random`, an exported agent, a run, of which the best agent plays, or a function `package.module:player`.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evorl.config import AnyConfig, Environment
from evorl.config.errors import shown
from evorl.config.fields import BENCHMARK
from evorl.distributed import Ranks
from evorl.envs.games import FunctionPlayers, Opponents, RandomPlayers, Seat
from evorl.envs.spaces import EnvSpec
from evorl.league.exported import ExportedAgent, ExportedPlayers
from evorl.league.players import Players
from evorl.population import Policy
from evorl.population.evaluation import RANDOM
from evorl.runs.directory import BENCHMARK_COPY, CONFIG, EXPORTED, RunDirectory, saved_config, saved_settings
from evorl.runs.hub import FILES, is_on_hub, local_run
from evorl.runs.loaded import LoadedAgent, load
from evorl.runs.trust import is_function, is_own, sign_code
from evorl.seeding import torch_generator
from evorl.system.extras import require
from evorl.system.files import make_directory, read_bounded, reason, remove, sync_directory, write_atomically
from evorl.system.processes import is_first_rank
from evorl.types import UserError

FORMS = "random, package.module:player, the directory of a run, or an exported agent, FILE.onnx"
ONNX = ".onnx"
"""The exported agent in a directory that is no run."""


class Task(NamedTuple):
    """The game to play: the environment settings and the interface of the agent that the opponent plays against."""

    settings: Environment
    interface: EnvSpec


class Opponent(NamedTuple):
    """An opponent: `seat(n)` makes its players for n seats; `agent` is the id of its agent, or None without one."""

    name: str
    seat: Seat
    agent: int | None = None


class SeededPlayers(Players):
    """An agent that samples its moves with a generator that each reset of the games seeds anew."""

    def begin(self, seed: int) -> None:
        """Seed the generator."""
        self.policy.generator.manual_seed(seed)


def opponent_of(name: str, key: str, task: Task, allow_code: bool = False) -> Opponent:
    """The opponent that `key`, an argument or a setting, names. Raises UserError.

    Code of somebody else's run is refused unless `allow_code`; a function `module:name` is imported, since the user
    named it.
    """
    return kind_of(name, key).make(name, key, task, allow_code)


class Kind(NamedTuple):
    """A kind of opponent: the test for its names, its factory, and the reader of the files that a copy needs."""

    owns: Callable[[str], bool]
    make: Callable[[str, str, Task, bool], Opponent]
    files: Callable[[str], dict[str, bytes]] | None = None


def kind_of(name: str, key: str) -> Kind:
    """The kind of opponent of this name. Raises UserError if there is none."""
    kind = next((kind for kind in KINDS if kind.owns(name)), None)
    if kind is None:
        raise UserError(f"{key}: there is no {shown(name)} to play against; name {FORMS}")
    return kind


def agent_opponent(loaded: LoadedAgent, name: str, *, deterministic: bool = False) -> Opponent:
    """A loaded agent as an opponent, which samples as in training unless it is `deterministic`."""

    def seat(seats: int) -> Opponents:
        policy = Policy(
            [loaded.agent], loaded.algorithm, torch_generator(0, generation=0, rank=0, purpose="an opponent")
        )
        settings, interface = loaded.config.environment, loaded.algorithm.interface
        places = np.zeros(seats, dtype=np.intp)
        return SeededPlayers(policy, settings, interface, places, deterministic=deterministic)

    return Opponent(name, seat, loaded.agent.id)


def check_same_game(loaded: LoadedAgent, task: Task, name: str) -> None:
    """Raise UserError unless a run's agent plays the same game as the task."""
    here, there = task.settings, loaded.config.environment
    if there.id != here.id:
        raise UserError(f"{name}: plays {there.id}, but the game is {here.id}")
    spaces = loaded.observation_space, loaded.action_space
    if there.kwargs != here.kwargs or spaces != (task.interface.observation, task.interface.action):
        raise UserError(f"{name}: plays {there.id} with other environment.kwargs or spaces")


def _random(name: str, key: str, task: Task, allow_code: bool) -> Opponent:
    return Opponent(name, lambda seats: RandomPlayers(task.interface.action, np.random.default_rng(0)))


def _function(name: str, key: str, task: Task, allow_code: bool) -> Opponent:
    interface = task.interface
    players = FunctionPlayers(name, interface.observation, interface.action, key)
    return Opponent(name, lambda seats: players)


def _exported(name: str, key: str, task: Task, allow_code: bool) -> Opponent:
    require("onnx", f"{key}: {name}")
    (payload,) = _exported_files(name).values()
    agent = ExportedAgent(payload, name, task.interface)
    number = agent.facts.get("agent", "")
    return Opponent(name, lambda seats: ExportedPlayers(agent, seats), int(number) if number.isdecimal() else None)


def _run(name: str, key: str, task: Task, allow_code: bool) -> Opponent:
    loaded = load(name, allow_code=allow_code)
    check_same_game(loaded, task, name)
    return agent_opponent(loaded, name)


def _exported_files(name: str) -> dict[str, bytes]:
    return {EXPORTED: _read(_exported_path(name))}


def _run_files(name: str) -> dict[str, bytes]:
    with local_run(name) as path:
        return {file: _read(path / file) for file in FILES if (path / file).exists()}


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path)
    except OSError as error:
        raise UserError(reason(error, path)) from error


def _exported_path(name: str) -> Path:
    path = Path(name)
    return path if path.suffix == ONNX else path / EXPORTED


def _is_run(name: str) -> bool:
    return is_on_hub(name) or _exists(Path(name, CONFIG)) or (_exists(Path(name)) and not _is_exported(name))


def _is_exported(name: str) -> bool:
    return Path(name).suffix == ONNX or _exists(_exported_path(name))


def _exists(path: Path) -> bool:
    """True if a path exists; False if it cannot be accessed or is no valid file name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


KINDS: Sequence[Kind] = (
    Kind(lambda name: name == RANDOM, _random),
    Kind(_is_run, _run, _run_files),
    Kind(_is_exported, _exported, _exported_files),
    Kind(is_function, _function),
)
"""The kinds of opponents; the first that owns a name makes it."""


def check_benchmark(config: AnyConfig, interface: EnvSpec) -> None:
    """Raise UserError for a benchmark that cannot play, before a run begins.

    The main process alone looks at files, which other hosts may not have; a resumed run has a copy of them.
    """
    name = _benchmark(config)
    if is_function(name) or (is_first_rank() and config.run.resume != "auto"):
        opponent_of(name, BENCHMARK, Task(config.environment, interface))


def keep_benchmark(config: AnyConfig, directory: RunDirectory, ranks: Ranks, task: Task) -> Opponent:
    """Load the benchmark on all ranks (collective), from the copy that is made when training begins.

    The main process copies it to the directory, and a resumed run reads the copy: the benchmark may have been trained
    on since, or be gone. Raises UserError on all ranks.
    """
    name = _benchmark(config)
    copy = directory.path / BENCHMARK_COPY

    def files() -> bytes:
        if not copy.is_dir() and (read := kind_of(name, BENCHMARK).files) is not None:
            # One that cannot play is refused before there is a copy.
            opponent_of(name, BENCHMARK, task)
            _write_copy(copy, read(name), _own_config(Path(name)))
        if not copy.is_dir():
            return b""
        found = {file: _read(copy / file) for file in (*FILES, EXPORTED) if (copy / file).is_file()}
        encoded = {file: base64.b64encode(payload).decode() for file, payload in found.items()}
        return json.dumps([_own_config(copy) is not None, encoded]).encode()

    reply = ranks.from_main(files, "the league's benchmark")
    if not reply:
        return opponent_of(name, BENCHMARK, task)
    allowed, found = json.loads(reply)
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), {file: base64.b64decode(value) for file, value in found.items()})
        try:
            return opponent_of(folder, BENCHMARK, task, allowed)._replace(name=name)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(copy))) from error


def kept_benchmark(config: AnyConfig, run: Path, task: Task, allow_code: bool = False) -> Opponent:
    """The benchmark of the run in directory `run`, by its copy if it has one. Raises UserError."""
    name, copy = _benchmark(config), run / BENCHMARK_COPY
    if copy.is_dir() and name != RANDOM:
        return opponent_of(str(copy), BENCHMARK, task, allow_code)._replace(name=name)
    return opponent_of(name, BENCHMARK, task, allow_code)


def with_copy(config: AnyConfig, run: Path) -> AnyConfig:
    """A run's configuration, with the path of the copy of its benchmark that its directory `run` keeps, if any."""
    copy = run / BENCHMARK_COPY
    if config.league is None or not copy.is_dir():
        return config
    league = config.league.model_copy(update={"benchmark": str(copy.resolve())})
    return config.model_copy(update={"league": league})


def _benchmark(config: AnyConfig) -> str:
    return RANDOM if config.league is None else config.league.benchmark


def _own_config(run: Path) -> AnyConfig | None:
    """The configuration of a run that this user launched here with code of its own, or None."""
    if not (run / CONFIG).is_file():
        return None
    config = saved_config(saved_settings(run))
    return config if is_own(run, config) else None


def _write_copy(copy: Path, files: Mapping[str, bytes], own: AnyConfig | None) -> None:
    """Write a benchmark's files, all or none, and the proof that the code of an `own` run is the user's."""
    new = copy.with_name(f".{BENCHMARK_COPY}")
    try:
        remove(new)
        _write(new, files)
        new.rename(copy)
        sync_directory(copy.parent)
        if own is not None:
            sign_code(copy, own)
    except OSError as error:
        raise UserError(f"run.directory: cannot write to {reason(error, copy)}") from error


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder. Raises OSError."""
    for file, payload in files.items():
        make_directory((folder / file).parent)
        write_atomically(folder / file, payload)
