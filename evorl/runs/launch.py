"""The start of a training program: the command line becomes a configuration, checked against environment and launch.

Options of Accelerate that would have no effect or fail in a traceback are rejected.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from evorl.algorithms import Algorithm, make_algorithm
from evorl.config import AnyConfig, check_name
from evorl.config.fields import BENCHMARK, RATING, RETURN, leaves
from evorl.config.run import LeagueSettings
from evorl.config.yaml import (
    TRAINING,
    configuration_file,
    override,
    plain_assignments,
    read_yaml,
    source,
)
from evorl.envs import make_environments
from evorl.envs.games import is_game
from evorl.envs.spaces import EnvSpec, ObservationSpecs, wide_bounds
from evorl.envs.tensor.sources import device_of, is_tensor, reserve
from evorl.envs.vector import for_evaluation, reward_threshold
from evorl.evolution.mutation import MUTATIONS
from evorl.evolution.selection import SELECTIONS, selects
from evorl.kernels.library import usable_kernel
from evorl.league.rating import MATCHMAKING
from evorl.networks import ACTIVATIONS, CELLS, NETWORKS
from evorl.population import check_memory
from evorl.population.evaluation import MAX_COPIES
from evorl.runs.agents.comparison import FEWEST_PAIRS
from evorl.runs.configuration import read_config
from evorl.runs.program import Parser
from evorl.runs.reading.hub import is_on_hub
from evorl.runs.reading.opponents import benchmark_of, opponent_of
from evorl.runs.storage.directory import CONFIG, from_here
from evorl.runs.storage.trust import is_run
from evorl.system.console import say
from evorl.system.extras import EXTRAS, require
from evorl.system.files import CHECKPOINTS, LOCK
from evorl.system.processes import is_first_rank, usable_cores
from evorl.system.signals import LAUNCHED
from evorl.tracking.tracker import TRACKER_PATIENCE, check_exclusions
from evorl.tracking.trackers import TRACKERS
from evorl.types.outcomes import EvorlWarning, UserError

PRECISION = "ACCELERATE_MIXED_PRECISION"
PRECISIONS = ("no", "bf16")
PLAIN = {
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "no"),
    "use_fsdp": ("ACCELERATE_USE_FSDP", "false"),
    "use_deepspeed": ("ACCELERATE_USE_DEEPSPEED", "false"),
    "use_megatron_lm": ("ACCELERATE_USE_MEGATRON_LM", "false"),
    "use_parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "false"),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
}
"""For each option, its environment variable and the only value that evorl supports."""


def refuse_options(variables: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if Accelerate was given an option that evorl does not support."""
    precision = variables.get(PRECISION, "no").lower()
    if precision not in PRECISIONS:
        raise UserError(f"accelerate's mixed_precision: {precision} is not supported; use 'bf16' or 'no'")
    for option, (name, plain) in PLAIN.items():
        value = variables.get(name, plain)
        if value.lower() != plain:
            raise UserError(
                f"accelerate's {option}: {value.lower()} would have no effect, since evorl trains its stacks itself "
                f"and only their gradients are averaged; leave it out, or use {plain!r}"
            )


SMALL_IMAGE = 64 * 64
"""Pixels of the largest image that one thread encodes.

A second thread makes an update 1.0 to 1.2 times as fast at 64 x 64 on idle cores, 1.3 to 1.7 times at 84 x 84, and 2 to
18 times as slow at 10 x 10 to 64 x 64 on busy ones (docs/results/people.md).
"""


def use_threads(config: AnyConfig, parts: ObservationSpecs, ranks: int, device: torch.device | None = None) -> int:
    """Set and return the number of threads: `run.threads`, else OMP_NUM_THREADS, else a share of the cores.

    Either torch has them or the kernel of dense layers, since torch's idle threads keep cores busy. Torch's default is
    one except for large images: a small product finishes before a second thread has started, and waits for that thread
    if another program occupies its core.
    """
    images = [math.prod(part.image_size) for part in parts.values() if part.kind == "image"]
    network = config.network
    kernel = usable_kernel(config.run.kernel) if device is None or device.type == "cpu" else None
    by_kernel = kernel is not None and not (images or network.recurrent or network.bf16 or network.name == "module")
    share = 1
    if by_kernel:
        actors = config.actors.count if config.actors else 0
        share = min(usable_cores() // (ranks * (1 + actors)), config.population.agents)
    elif max(images, default=0) > SMALL_IMAGE:
        share = usable_cores() // ranks
    count = config.run.threads or _set_by_user() or max(1, share)
    torch.set_num_threads(1 if by_kernel else count)
    if kernel is not None:
        kernel.threads = count
    return count


def _set_by_user() -> int | None:
    """Return the threads that the user set by OMP_NUM_THREADS; launchers set it to a number of their own."""
    first = "" if any(name in os.environ for name in LAUNCHED) else os.environ.get("OMP_NUM_THREADS", "")
    # OpenMP accepts a list with one number per nesting level.
    first = first.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


USAGE = "[--config FILE] [key.path=value ...]"
EXAMPLES = """examples:
  python %(prog)s --config my.yaml population.size=8 run.name=my-run
  accelerate launch --config_file accelerate.yaml %(prog)s --config my.yaml
"""


def load_config(arguments: Sequence[str], default: Path, asynchronous: bool | None = None) -> AnyConfig:
    """Parse the command line into a configuration, checked as far as a single process can. Raises UserError.

    If `asynchronous` is True, only algorithms that learn from actor processes are accepted; if False, only the others;
    if None, both.
    """
    refuse_options()
    parser = Parser(
        usage=f"%(prog)s {USAGE}",
        description="Train and evolve a population of agents.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        default=str(default),
        metavar="FILE",
        help=f"YAML file, or a shipped one's name (default: {default})",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that replace the file's")
    parsed = parser.parse_intermixed_args(plain_assignments(arguments, "seed"))
    file = configuration_file(parsed.config, parsed.overrides)
    config = check(launched(_with_named(read_config(file, parsed.overrides), parsed.overrides)))
    if asynchronous not in (None, config.actors is not None):
        other = "demos/asynchronous.py" if config.actors else "demos/online.py"
        raise UserError(f"algorithm.name: {config.algorithm.name} is trained by {other}")
    if is_first_rank():
        say(f"settings: {source(file, parsed.overrides)}")
        for warning in (*ineffective(config, file, parsed.overrides), *_doubts(config)):
            warnings.warn(warning, EvorlWarning, stacklevel=2)
    return config


def _with_named(config: AnyConfig, overrides: Sequence[str]) -> AnyConfig:
    """Return the configuration in which agents of another run take the hyperparameters that the overrides name."""
    population, names = config.population, leaves(override({}, overrides).get("algorithm", {}))
    if population.from_ is None:
        return config
    named = [name for name in config.algorithm.hyperparameters if name in (*names, *population.hyperparameters)]
    return config.model_copy(update={"population": population.model_copy(update={"hyperparameters": (*named,)})})


def ineffective(config: AnyConfig, file: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Warnings about the user's settings of the algorithm and the networks that change nothing.

    Those of a shipped file change nothing where an override has replaced what they belong to, and a run's own
    `config.yaml` holds all settings: of these, only the overrides are the user's.
    """
    of_run = file.name == CONFIG and any((file.parent / name).exists() for name in (LOCK, CHECKPOINTS))
    overridden = leaves(override({} if of_run or file.parent == TRAINING else read_yaml(file), overrides))
    sections = (config.algorithm.ineffective_changes("algorithm"), config.network.ineffective_changes("network"))
    for key, reason in chain(*sections):
        if any(name == key or name.startswith(f"{key}.") for name in overridden):
            yield f"{key}: changes nothing, {reason}"


def _doubts(config: AnyConfig) -> Iterator[str]:
    """Warnings about settings that change nothing in this configuration, and about a target that is out of reach."""
    name, target = config.algorithm.name, config.training.target_fitness
    environment = config.evaluation_environment
    threshold = reward_threshold(environment) if config.evolution.fitness == {RETURN: 1.0} else None
    if target is not None and threshold is not None and target - threshold > abs(threshold) / 2:
        yield (
            f"training.target_fitness: {target:g}, but {environment.id} counts as solved at {threshold:g}; if "
            f"it is the target of another environment, use training.target_fitness={threshold:g}, or null for none"
        )
    if config.evolution.initial == "sampled" and config.population.from_ is not None:
        yield "evolution.initial: sampled has no effect together with population.from, whose agents keep their settings"
    if config.population.from_ is None and config.population.hyperparameters:
        yield "population.hyperparameters: changes nothing without population.from, whose agents would get them"
    if config.population.control and config.population.islands < FEWEST_PAIRS:
        yield (
            f"population.control: an exact test of fewer than {FEWEST_PAIRS} islands can never show that evolution "
            f"helped; use population.islands={FEWEST_PAIRS} or more"
        )
    weights = config.evolution.mutation.weights()
    share = weights["hyperparameters"] / sum(weights.values())
    if share > 0 and selects(config.evolution, config.population.size) and not config.evolution.hyperparameters:
        yield (
            f"evolution.hyperparameters: there are no ranges, so that {share:.0%} of all mutations change nothing; "
            f"leave it out to get the ranges of {name}, or set evolution.mutation.hyperparameters=0"
        )


def launched(config: AnyConfig) -> AnyConfig:
    """The configuration as this launch runs it: with absolute directories and its precision.

    An environment may change the working directory. Accelerate's mixed precision holds unless `network.bf16` is set.
    Raises UserError if they contradict each other.
    """
    bf16 = os.environ.get(PRECISION, "no").lower() == "bf16"
    if bf16 and config.network.bf16 is False:
        raise UserError("network.bf16: false, and accelerate's mixed_precision is 'bf16'; leave one of them out")
    run, network, population, league = config.run, config.network, config.population, config.league
    run = run.model_copy(update={"directory": run.directory.absolute()})
    network = network.model_copy(update={"bf16": bf16 if network.bf16 is None else network.bf16})
    if population.from_ is not None and not is_on_hub(population.from_):
        population = population.model_copy(update={"from_": population.from_.absolute()})
    if league is not None and is_run(league.benchmark):
        league = league.model_copy(update={"benchmark": str(Path(league.benchmark).absolute())})
    update = {"run": run, "network": network, "population": population, "league": league}
    return config.model_copy(update=update)


def check(config: AnyConfig, trains: bool = True, ranks: int | None = None) -> AnyConfig:
    """Raise UserError unless all names are known and the algorithm fits the environment and the launch.

    Requirements of training are checked only if the run `trains`. By default, `ranks` are those of this launch.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    _check_names(config)
    if trains:
        _check_training(config, ranks)
    population = config.population
    several = len(population.places) > 1
    parts = len(population.places) if several else population.size
    if population.placement == "sharded" and parts % ranks:
        name, kind = ("islands", "islands and twins") if several else ("size", "agents")
        raise UserError(
            f"population.{name}: {parts} {kind} cannot be divided over {ranks} processes with population.placement: "
            f"sharded; use a multiple of {ranks}"
        )
    if is_tensor(config.environment.id) and config.actors is not None:
        raise UserError(
            f"algorithm.name: {config.algorithm.name} learns from actor processes, and a simulator such as "
            f"{config.environment.id} steps all copies in the learner's process; use ppo, a2c, dqn, ddpg, td3 or sac"
        )
    _check_game(config, trains)
    _try_environment(config, trains, ranks)
    return config


def _check_names(config: AnyConfig) -> None:
    check_name("network.name", config.network.name, NETWORKS)
    check_name("network.activation", config.network.activation, ACTIVATIONS)
    if config.network.recurrent:
        check_name("network.recurrent", config.network.recurrent, CELLS)
    check_name("evolution.selection.name", config.evolution.selection.name, ["none", *SELECTIONS])
    for kind in config.evolution.mutation.weights():
        check_name("evolution.mutation", kind, MUTATIONS)
    for backend in config.tracking.backends:
        check_name("tracking.backends", backend, TRACKERS)


def _check_training(config: AnyConfig, ranks: int) -> None:
    """Raise UserError unless the packages of a run are there, and deadlines fit."""
    for backend in config.tracking.backends:
        if backend in EXTRAS:
            require(backend, f"tracking.backends: {backend}")
    check_exclusions(config)
    if config.tracking.video:
        require("video", "tracking.video")
    if ranks > 1 and config.tracking.backends and config.run.timeout <= TRACKER_PATIENCE:
        raise UserError(
            f"run.timeout: the main process may wait {TRACKER_PATIENCE:g} s for a tracker, and the others wait "
            f"{config.run.timeout:g} s for it; raise run.timeout, or use no tracker (tracking.backends=[])"
        )


def _try_environment(config: AnyConfig, trains: bool, ranks: int) -> None:
    """Raise UserError unless the algorithm fits the environment, whose first step is tried."""
    copies = 1 if config.population.placement == "sharded" else ranks
    device = device_of(config.environment)
    if trains:
        agents = config.population.agents // (1 if copies == ranks else ranks)
        # The elite and its challenger play in as many copies at once as there are, and in two at least.
        reserve(config.environment, max(2, agents * config.environment.num_envs), device)
        if config.evaluation.environment is not None:
            copies_of_each = min(config.evaluation.episodes, MAX_COPIES)
            reserve(config.evaluation_environment, max(2, agents * copies_of_each), device)
    with make_environments(config.environment, 1, 1, device) as one:
        algorithm = make_algorithm(config, one.interface)
        algorithm.check_copies(copies)
        if trains:
            _check_ranges(config, algorithm)
            check_memory(config, algorithm)
            if config.league is not None:
                opponent_of(benchmark_of(config), BENCHMARK, config.environment, one.interface)
                if config.league.learn_from == "both":
                    one.play_both_seats()
        one.try_step()
        if config.evaluation.environment is not None:
            _try_evaluation(config, one.interface, device)
        if (wide := wide_bounds(one.interface.action, config.environment.id)) and is_first_rank():
            warnings.warn(f"environment.id: {wide}", EvorlWarning, stacklevel=3)


def _try_evaluation(config: AnyConfig, interface: EnvSpec, device: torch.device) -> None:
    """Raise UserError unless agents can act in the environment of evaluation, whose first step is tried."""
    settings = config.evaluation_environment
    try:
        with make_environments(for_evaluation(settings), 1, 1, device, whole_games=True) as one:
            one.try_step()
            other = one.interface
    except UserError as error:
        raise UserError(f"evaluation.{error}") from error
    same = ((other.parts, interface.parts), (other.action, interface.action), (other.masked, interface.masked))
    for what, (there, here) in zip(("observations", "actions", "action masks"), same, strict=True):
        if there != here:
            raise UserError(
                f"evaluation.environment: {settings.id} has other {what} than {config.environment.id} of training"
            )


def _check_ranges(config: AnyConfig, algorithm: Algorithm) -> None:
    """Warn of a first value outside its range."""
    evolution, settings = config.evolution, algorithm.settings
    first = settings.first_hyperparameters()
    ranges, defaults = evolution.hyperparameters or {}, settings.default_ranges()
    chosen = evolution.initial == "sampled" or config.population.from_
    if chosen or not is_first_rank():
        return
    for name, range in ranges.items():
        value = first[name]
        # A default range leaves out a configured value that has no place on its scale, such as a gae_lambda of 1.
        if range != defaults.get(name) and not range.min <= value <= range.max:
            warnings.warn(
                f"evolution.hyperparameters.{name}: agents begin with {value:g}, outside {range.min:g} to "
                f"{range.max:g}, until a mutation moves it inside",
                EvorlWarning,
                stacklevel=4,
            )


def _check_game(config: AnyConfig, trains: bool) -> None:
    """Raise UserError for a league or ratings without a game, and for settings that a game does not take.

    If the run `trains`, these include fitness from training, and ratings that could not be compared.
    """
    id = config.environment.id
    if not is_game(id):
        if config.league is not None or RATING in config.evolution.fitness:
            for_evaluation(config.environment)  # An id that cannot be imported gets its own error.
        if config.league is not None:
            raise UserError(f"league: {id} is not a two-player game; leave it out")
        if RATING in config.evolution.fitness:
            raise UserError(f"evolution.fitness: {id} is not a two-player game, so nobody has a rating; use return")
        return
    league, target = config.league or LeagueSettings(), config.training.target_fitness
    check_name("league.matchmaking", league.matchmaking, MATCHMAKING)
    learns_both = league.learn_from == "both"
    is_rated = trains and RATING in config.evolution.fitness
    mistakes = (
        (
            len(config.population.places) > 1,
            f"population.islands: {id} is a game, whose agents meet each other and are rated together; leave islands "
            "and control out",
        ),
        (
            learns_both and league.matchmaking != "latest",
            "league.learn_from: both: an agent that plays both seats has no opponents; use league.matchmaking=latest, "
            f"not {league.matchmaking}",
        ),
        (
            learns_both and config.network.recurrent,
            "league.learn_from: both: a recurrent network would remember the turns of both seats as one; leave "
            "network.recurrent out",
        ),
        (
            trains and config.evaluation.fitness == "training",
            "evaluation.fitness: in a game agents train against different opponents, so their training returns cannot "
            "be compared; use evaluation",
        ),
        (
            is_rated and league.archive < 2,
            f"league.archive: {league.archive} is too small to keep the agent that defines rating 0, so ratings of "
            "different generations cannot be compared; use 2 or more, or evolution.fitness=return",
        ),
        (
            is_rated and target is not None and not 0 < target < 1,
            "training.target_fitness: with evolution.fitness=rating the target is a mean result against "
            f"{from_here(league.benchmark)}, above 0 and below 1, and this is {target}",
        ),
        (
            config.evaluation.environment is not None,
            f"evaluation.environment: {id} is a game, measured against league.benchmark; leave it out",
        ),
        (config.tracking.video, f"tracking.video: {id} is a game, and games are not recorded; leave it out"),
        (
            config.actors is not None,
            f"algorithm.name: {config.algorithm.name} learns from actor processes, and these play no games, such as "
            f"{id}; use ppo, a2c or dqn",
        ),
    )
    for is_made, message in mistakes:
        if is_made:
            raise UserError(message)
