"""`evorl branch`: a new run that goes on from a checkpoint of another, with other settings.

A branch is a copy of what that checkpoint needs, with a changed configuration, which is then resumed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evorl.commands.train import check_launch, processes_for, program_of, start
from evorl.config import AnyConfig, override, read_yaml, validate
from evorl.config.fields import leaves
from evorl.config.run import THEN
from evorl.config.yaml import assignment
from evorl.envs.generation import MIN_SHARE, steps_of_generation
from evorl.runs.configuration import read_config
from evorl.runs.launch import ineffective
from evorl.runs.storage.checkpoint_files import AGENTS, ARCHIVE, ELITE, STATE, Checkpoints
from evorl.runs.storage.directory import (
    CONFIG,
    LINEAGE,
    METRICS,
    RunDirectory,
    check_run,
    differences,
    from_here,
    is_other_run,
    may_change_in_branch,
    way_to_change,
)
from evorl.runs.storage.progress import Progress, progress_of
from evorl.runs.storage.trust import refuse_code
from evorl.system.console import say
from evorl.system.files import (
    CHECKPOINTS,
    LOCK,
    file_errors,
    json_bytes,
    make_directory,
    make_subdirectory,
    read_lines,
    sync_directory,
    write_atomically,
)
from evorl.system.formats import decode_agents, encode_agents
from evorl.types.agents import Agent, Mutation
from evorl.types.outcomes import EvorlWarning, UserError

OF_AGENTS = (AGENTS, ELITE, ARCHIVE)
"""The files of a checkpoint that hold agents."""
LOCATION = ("run", "run.name", "run.directory", "run.resume", "run.branch_of")
"""Settings that say where a run is and where it began."""


def branch(parsed: argparse.Namespace) -> None:
    """`evorl branch`: copies a checkpoint to a new run and trains that further.

    Raises UserError if the settings do not suit the agents; nothing is then written.
    """
    run, new = parsed.run, new_directory(parsed.run, parsed.new)
    begun = validate(read_yaml(run / CONFIG))
    refuse_code(begun, parsed.allow_code)
    config, names = branched(run, new, begun, parsed.overrides)
    program = program_of(config, parsed.program)
    generation, files = checkpoint_of(run, parsed.generation, begun, config)
    # Later generations may have been trained on another number of ranks.
    ranks = processes_for(progress_of(files[STATE], STATE).ranks, parsed.processes)
    check_launch(config, ranks)
    for warning in ineffective(config, run / CONFIG, parsed.overrides):
        warnings.warn(warning, EvorlWarning, stacklevel=2)
    before, here = begun.run.branch_of, f"{run.resolve().name}, generation {generation}"
    origin = here if before is None else f"{before}{THEN}{here}"
    config = config.model_copy(update={"run": config.run.model_copy(update={"branch_of": origin})})
    agents = decode_agents(files[AGENTS], AGENTS)
    copy(run, new, config, generation, files | with_hyperparameters(files, names, config))
    say(f"{from_here(new)}: branch of {from_here(run)}, generation {generation}")
    for key, was, now in differences(begun, config):
        if key not in LOCATION and key.removeprefix("algorithm.") not in names:
            say(f"{key}: is now {now}, and was {was}")
    for name in names:
        say(_change(name, agents, begun, config))
    start(program, ["--config", str(new / CONFIG)], ranks)


def new_directory(run: Path, name: str) -> Path:
    """The directory of the new run: beside `run` by name, or a path. Raises UserError if it cannot be one."""
    check_run(run)
    if "=" in name:
        raise UserError(f"NEW: {name} is a setting; first name the new run, as in `evorl branch {run} NEW {name}`")
    new = Path(name).absolute() if "/" in name else run.resolve().parent / name
    with file_errors(new):
        if os.path.lexists(new):
            going_on = f", or go on with it by `evorl resume {from_here(new)}`" if (new / CONFIG).is_file() else ""
            raise UserError(f"NEW: {from_here(new)} exists already; choose another name{going_on}")
        for outer in new.parents:
            if (outer / CONFIG).is_file() and (outer / LOCK).is_file():
                raise UserError(f"NEW: {from_here(new)} would lie in the directory of the run {from_here(outer)}")
    return new


def branched(run: Path, new: Path, begun: AnyConfig, overrides: Sequence[str]) -> tuple[AnyConfig, list[str]]:
    """The configuration of the branch of a run with the configuration `begun`, and the hyperparameters to set.

    These are also those that the overrides set to the configured value, which evolution may have changed. Raises
    UserError for a setting that agents of a checkpoint cannot go on with.
    """

    def refuse_unless_free(key: str, was: object, now: object, config: AnyConfig) -> None:
        if not may_change_in_branch(key, config) and not is_other_run(key, was, now):
            raise UserError(
                f"{key}: was {was} and is now {now}, with which the agents of a checkpoint cannot go on; "
                f"{way_to_change(run, key, now, config)}"
            )

    values = leaves(override({}, overrides))
    for key in LOCATION:
        if key in values:
            raise UserError(f"{key}: NEW says where the new run is; leave it out")
    if values.get("algorithm.name", begun.algorithm.name) != begun.algorithm.name:
        # Another algorithm has other settings, so that the run's would be refused instead.
        refuse_unless_free("algorithm.name", begun.algorithm.name, values["algorithm.name"], begun)
    location = [assignment("run.directory", str(new.parent)), assignment("run.name", new.name), "run.resume=auto"]
    ranges, has_own = "evolution.hyperparameters", begun.evolution.hyperparameters != begun.algorithm.default_ranges()
    if not has_own and not any(key.startswith(ranges) for key in values):
        location.append(f"{ranges}=null")  # Default ranges contain the configured value, which may change.
    config = read_config(run / CONFIG, [*overrides, *location])
    changes = list(differences(begun, config))
    for change in changes:
        refuse_unless_free(*change, config)
    keys = {*values, *(key for key, _, _ in changes)}
    return config, [name for name in config.algorithm.hyperparameters if f"algorithm.{name}" in keys]


def checkpoint_of(run: Path, wanted: int | None, begun: AnyConfig, config: AnyConfig) -> tuple[int, dict[str, bytes]]:
    """Read the checkpoint of generation `wanted`, or the newest that is intact, of a run that may be training.

    Returns the generation, and its files of agents and progress by name. With another `evolution.burn_in`, that decides
    anew when selection begins. Raises UserError if there is no checkpoint, or if a branch would end at once.
    """
    checkpoints, where, damaged = Checkpoints(run / CHECKPOINTS), from_here(run), set[int]()
    if wanted is not None and wanted not in checkpoints.generations():
        there = ", ".join(map(str, checkpoints.generations())) or "none"
        raise UserError(
            f"--generation: {where} has no checkpoint of generation {wanted}; its checkpoints are of generations "
            f"{there}"
        )
    while numbers := [number for number in checkpoints.generations() if number not in damaged]:
        number = wanted or numbers[-1]
        try:
            listed = checkpoints.verify(number).keys()
            if missing := {AGENTS, STATE} - listed:
                raise UserError(f"{checkpoints.path(number)}: lacks {min(missing)}")
            files = {name: checkpoints.read(number, name) for name in listed & {*OF_AGENTS, STATE}}
            progress = progress_of(files[STATE], str(checkpoints.path(number) / STATE))
        except UserError as error:
            if wanted is not None:
                raise
            warnings.warn(f"{error}; looking at the other checkpoints", EvorlWarning, stacklevel=2)
            damaged.add(number)
            continue
        # What was solved in other episodes is not solved in the branch's, where the elite is measured again.
        progress.solved &= not progress.measured_otherwise(config)
        _refuse_an_end(where, progress, config)
        progress.shortened_by = None  # A branch is no continuation that a short generation would make inexact.
        if begun.evolution.burn_in != config.evolution.burn_in:
            for island in progress.islands:
                island.selection_began = None
        files[STATE] = json_bytes(asdict(progress))
        return number, files
    raise UserError(f"{where}: has no intact checkpoint to go on from; `evorl train` begins a new run")


def _refuse_an_end(where: str, progress: Progress, config: AnyConfig) -> None:
    """Raise UserError if a branch would end at once."""
    most, steps, way = config.training.max_steps, progress.agent_steps, "raise it, or take an earlier --generation"
    if progress.is_solved(config):
        raise UserError(f"training.target_fitness: {where} has reached {config.training.target_fitness:g} there; {way}")
    period, copies = getattr(config.algorithm, "rollout_steps", 1), config.environment.num_envs
    # Of one rank; those of several may be longer.
    if most - steps <= MIN_SHARE * copies * steps_of_generation(config, 1, period):
        raise UserError(
            f"training.max_steps: {where} has trained {steps:,} of {most:,} steps of each agent, so that too few are "
            f"left; {way}"
        )


def with_hyperparameters(files: Mapping[str, bytes], names: Sequence[str], config: AnyConfig) -> dict[str, bytes]:
    """The files of agents, in which the hyperparameters of these names have the configured values.

    Those of the elite and of a league's archive have them, too: a checkpoint's agents have values for the same ones.
    """
    values = config.algorithm.first_hyperparameters()

    def changed(agent: Agent) -> Agent:
        hyperparameters = agent.hyperparameters | {name: values.get(name) for name in names}
        # A mutation that the new value takes back before the child has trained with it would be told as one.
        is_untrained, mutation = agent.fitness is None, agent.mutation
        if is_untrained and mutation.kind == "hyperparameters" and mutation.target in names:
            mutation = Mutation("none")
        own = {name: each for name, each in hyperparameters.items() if each is not None}
        return replace(agent, hyperparameters=own, mutation=mutation)

    agents = {file: decode_agents(files[file], file) for file in OF_AGENTS if file in files and names}
    return {file: encode_agents([changed(agent) for agent in members]) for file, members in agents.items()}


def _change(name: str, agents: Sequence[Agent], begun: AnyConfig, config: AnyConfig) -> str:
    """A line on a hyperparameter that all `agents` get, also where evolution had changed it."""
    first, now = (each.algorithm.first_hyperparameters().get(name) for each in (begun, config))
    values = dict.fromkeys(agent.hyperparameters.get(name) for agent in agents)
    shown = ["null" if value is None else f"{value:.6g}" for value in (now, *values)]
    evolved = ", as evolution had changed it" if {*values} != {first} else ""
    return f"algorithm.{name}: is now {shown[0]} in every agent, and was {', '.join(shown[1:])}{evolved}"


def copy(run: Path, new: Path, config: AnyConfig, generation: int, files: Mapping[str, bytes]) -> None:
    """Write the new run beside its place and rename it, so that it is there as a whole or not at all.

    It has these `files` in place of the checkpoint's; of those, one is in memory at a time. Raises UserError if the
    disk fails.
    """
    source = Checkpoints(run / CHECKPOINTS)
    with file_errors(new, "NEW: cannot write to "):
        make_directory(new.parent)
        with tempfile.TemporaryDirectory(prefix=f".{new.name}.", dir=new.parent) as folder:
            partial = Path(folder) / new.name
            make_subdirectory(partial)
            directory = RunDirectory(partial)
            for name in (METRICS, LINEAGE):
                if (run / name).exists():
                    write_atomically(partial / name, read_lines(run / name))
            directory.cut_back(generation, files.get(ELITE, b""))
            entries = {
                name: directory.checkpoints.write(generation, name, files.get(name) or source.read(generation, name))
                for name in source.files(generation)
            }
            directory.checkpoints.complete(generation, entries)
            write_atomically(partial / CONFIG, config.to_yaml().encode())
            partial.rename(new)
            sync_directory(new.parent)
