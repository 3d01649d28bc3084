"""`evorl`: look at what a run has left behind, go on with it, and train its winner anew."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from evorl.algorithms import SETTINGS, make_algorithm
from evorl.config import AnyConfig, override, read_yaml, validate
from evorl.config.errors import on_one_line, shown
from evorl.envs import Environments
from evorl.envs.vector import for_evaluation
from evorl.population import Policy, check_agents
from evorl.population.evaluation import MAX_COPIES, evaluate
from evorl.randomness import numpy_generator, torch_generator
from evorl.runs.ancestry import ancestry, replayed, table
from evorl.runs.checkpoint import Checkpoints
from evorl.runs.directory import check_same_run, load_elite
from evorl.runs.launch import Parser, check, run_program
from evorl.runs.progress import progress_of
from evorl.runs.threads import use_threads
from evorl.system.files import reason, refuse_links, write_atomically
from evorl.types import UserError

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "demos" / "online.py"
WITH_ACTORS = ROOT / "demos" / "asynchronous.py"
"""What trains a run of an algorithm that learns from actor processes."""
ACCELERATE = ROOT / "configs" / "accelerate" / "accelerate.yaml"


def evaluate_elite(run: Path, episodes: int, seed: int, allow_code: bool = False) -> dict[str, float | int | str]:
    """Return the returns of a run's best agent on fresh episodes, without exploration. Raises UserError."""
    data, agent = load_elite(run)
    config = validate(data, SETTINGS)
    refuse_code(config, allow_code)
    check(config)
    environments = Environments(for_evaluation(config.environment), 1, min(episodes, MAX_COPIES), whole_games=True)
    algorithm = make_algorithm(config, environments.interface)
    check_agents([agent], algorithm, str(run / "elite"))
    use_threads(config.run.threads, environments.interface.parts, ranks=1)
    generator = torch_generator(seed, generation=0, rank=0, purpose="evaluation of the elite")
    policy = Policy([agent], algorithm, generator)
    # A purpose of its own keeps these episodes apart from all that the run has seen, also with the run's seed.
    rng = numpy_generator(seed, generation=0, rank=0, purpose="evaluation of the elite")
    seeds = [int(number) for number in rng.integers(2**31, size=episodes)]
    returns = evaluate(policy, environments, seeds, config.evaluation.max_steps)[0]
    environments.close()
    return {
        "run": str(run),
        "agent": agent.id,
        "episodes": episodes,
        "seed": seed,
        "mean": float(np.mean(returns)),
        "std": float(np.std(returns)),
        "min": float(np.min(returns)),
        "max": float(np.max(returns)),
    }


def resume_command(
    run: Path, overrides: Sequence[str], program: Path, processes: int | None, allow_code: bool = False
) -> list[str]:
    """Return the command that resumes a run, on as many processes as it had. Raises UserError where none may."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: there is no run here (no config.yaml)")
    directory, name = (json.dumps(str(part), ensure_ascii=False) for part in (run.resolve().parent, run.resolve().name))
    place = [f"run.directory={directory}", f"run.name={name}", "run.resume=auto"]
    given = [*overrides, *place]
    config = validate(override(read_yaml(run / "config.yaml"), given), SETTINGS)
    refuse_code(config, allow_code)
    check_same_run(run, check(config))
    program = _program(program, config)
    return launch_command(run, [str(program), "--config", str(run / "config.yaml"), *given], processes)


def replay_command(
    run: Path, overrides: Sequence[str], program: Path, processes: int | None, constant: bool, allow_code: bool = False
) -> list[str]:
    """Return the command that trains one agent on the schedule of a run's best one, or with its last settings.

    Its configuration is written into the run's directory. Raises UserError where there is no such schedule.
    """
    data, _ = load_elite(run)
    config = validate(data, SETTINGS)
    refuse_code(config, allow_code)
    path = run / ("replay-constant.yaml" if constant else "replay.yaml")
    refuse_links(run, path)
    write_atomically(path, replayed(config, run, ancestry(run), constant).to_yaml().encode())
    refuse_code(check(validate(override(read_yaml(path), overrides), SETTINGS)), allow_code)
    program = _program(program, config)
    return launch_command(run, [str(program), "--config", str(path.absolute()), *overrides], processes)


def launch_command(run: Path, arguments: Sequence[str], processes: int | None) -> list[str]:
    """Return the command that starts a program with these arguments on as many processes as a run had.

    Raises UserError where that are more than there are cores.
    """
    count, cores = processes or _ranks_of(run), os.cpu_count() or 1
    if count > cores and processes is None:
        raise UserError(f"--processes: the run had {count}, this machine has {cores} cores; say how many to start")
    if count == 1:
        return [sys.executable, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without -P a `yaml.py` in the working directory, which may be a stranger's run, would be imported for yaml.
    launcher = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE)]
    return [*launcher, "--num_processes", str(count), "--main_process_port", str(port), *arguments]


def _program(named: Path, config: AnyConfig) -> Path:
    """Return the program that a command line names, or the demo for the algorithm. Raises UserError where it is not."""
    program = WITH_ACTORS if named == PROGRAM and config.actors is not None else named
    if not program.is_file():
        raise UserError(f"--program: there is no file {program}; name the program that trained the run")
    return program


def _ranks_of(run: Path) -> int:
    """Return the ranks that made the newest checkpoint; it is verified later, by those who resume from it."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for generation in reversed(checkpoints.generations()):
        with contextlib.suppress(UserError):
            return progress_of(checkpoints.read(generation, "state.json"), str(checkpoints.path(generation))).ranks
    return 1


def refuse_code(config: AnyConfig, allowed: bool) -> None:
    """Raise UserError where a run's configuration names code of others to run, unless that is `allowed`."""
    for key, value in (("environment.id", config.environment.id), ("network.factory", config.network.factory or "")):
        if not allowed and ":" in value:
            raise UserError(f"{key}: {value!r} runs code of its own; add --allow-code if you trust this run")


def _parser() -> Parser:
    parser = Parser(prog="evorl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("evaluate", help="the best agent's return on fresh episodes")
    command.add_argument("run", type=Path, help="the run's directory")
    command.add_argument("--episodes", type=_count, default=100)
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = commands.add_parser("schedule", help="what the best agent was in each generation, and what changed")
    command.add_argument("run", type=Path, help="the run's directory")
    resume = commands.add_parser("resume", help="go on with a run, further than it went if so asked")
    replay = commands.add_parser("replay", help="train one agent on the schedule of a run's best one, as seed=N says")
    replay.add_argument("--constant", action="store_true", help="with the best agent's last settings from the start")
    for command in (resume, replay):
        command.add_argument("run", type=Path, help="the run's directory")
        command.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
        command.add_argument("--processes", type=_count, help="default: as many as before")
        command.add_argument("--program", type=Path, default=PROGRAM, help="what trained it (default: its demo)")
    for command in commands.choices.values():
        command.add_argument("--allow-code", action="store_true", help="let the run's configuration name code to run")
    return parser


def _seed(text: str) -> int:
    return _within(text, 0, 2**63)


def _count(text: str) -> int:
    return _within(text, 1, 1_000_000)


def _within(text: str, least: int, most: int) -> int:
    value = int(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{shown(value)} is out of range; it must be {least} to {most}")
    return value


def run_command(arguments: Sequence[str]) -> None:
    """Run the command that the command line asks for. Raises UserError."""
    parser = _parser()
    # A subparser takes its list of overrides only where it stands in one piece.
    parsed, others = parser.parse_known_args(arguments)
    if "overrides" not in parsed or any(other.startswith("-") for other in others):
        parser.parse_args(arguments)
    else:
        parsed.overrides += others
    try:
        COMMANDS[parsed.command](parsed)
    except OSError as error:
        raise UserError(reason(error, parsed.run)) from error


def _resume(parsed: argparse.Namespace) -> None:
    command = resume_command(parsed.run, parsed.overrides, parsed.program, parsed.processes, parsed.allow_code)
    os.execv(command[0], command)


def _replay(parsed: argparse.Namespace) -> None:
    given = parsed.overrides, parsed.program, parsed.processes, parsed.constant, parsed.allow_code
    command = replay_command(parsed.run, *given)
    os.execv(command[0], command)


def _schedule(parsed: argparse.Namespace) -> None:
    print("\n".join(table(ancestry(parsed.run))))


def _evaluate(parsed: argparse.Namespace) -> None:
    result = evaluate_elite(parsed.run, parsed.episodes, parsed.seed, parsed.allow_code)
    if parsed.json:
        print(json.dumps(result))
        return
    print(
        f"agent {result['agent']} of {on_one_line(str(result['run']))}: "
        f"mean return {result['mean']:.1f} ± {result['std']:.1f} "
        f"(min {result['min']:.1f}, max {result['max']:.1f}) over {result['episodes']} fresh episodes"
    )


COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "evaluate": _evaluate,
    "schedule": _schedule,
    "resume": _resume,
    "replay": _replay,
}


def main() -> int:
    """Run the console script."""
    return run_program(run_command, sys.argv[1:])
