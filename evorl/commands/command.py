"""The commands of `evorl`: their arguments and examples, and the module that runs each.

Importing this module, and printing help, must not import torch, which takes seconds. So each command names the function
that runs it, and the functions here import what they need.
"""

from __future__ import annotations

import argparse
import difflib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import evorl
from evorl.system.streams import reader_has_gone
from evorl.types.messages import shown

HELP = ("-h", "--help")
VERSION = ("-V", "--version")
WORDS = "words"
"""Name of the positional arguments that select a configuration: an algorithm or a file, and `key.path=value`."""
OVERRIDES = "overrides"
"""Name of the positional arguments that are all `key.path=value`."""

MAY_CHANGE = (
    "those of run, training, tracking, checkpoint, population.placement, population.hyperparameters, "
    "environment.vectorization, evaluation.max_steps, network.bf16; `evorl branch` begins a new run with others"
)
"""The settings that `evorl resume` may change, `FREE_TO_CHANGE`, whose import would make help wait."""


@dataclass(frozen=True)
class Command:
    """One command. Its function, `module:function` in `place`, raises UserError, RunFailed or OSError."""

    purpose: str
    place: str
    arguments: Callable[[argparse.ArgumentParser], None]
    examples: Sequence[str]

    @property
    def function(self) -> Callable[[argparse.Namespace], None]:
        function: Callable[[argparse.Namespace], None] = pkgutil.resolve_name(f"evorl.commands.{self.place}")
        return function


def answer(arguments: Sequence[str]) -> str | None:
    """Return the text of `--help` or `--version`, or None if a command is to be run."""
    name, *rest = arguments or HELP
    if name in HELP:
        return overview()
    if name in VERSION:
        return f"evorl {evorl.__version__}\n"
    if name in COMMANDS and not {*HELP}.isdisjoint(rest):
        return parser_of(name).format_help()
    return None


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: evorl COMMAND ...",
        "",
        *(f"  {name.ljust(width)}  {command.purpose}" for name, command in COMMANDS.items()),
        "",
        "examples:",
        *(f"  {example}" for example in EXAMPLES),
        "",
        "`evorl COMMAND --help` lists the arguments of a command, with examples. `evorl --version` prints the version.",
    ]
    return "\n".join(lines) + "\n"


def mistake_in(name: str) -> str | None:
    """Say what is wrong with the name of a command, or None if the command exists."""
    if name in COMMANDS:
        return None
    quoted = name if len(name) <= 80 else f"{name[:80]}…"
    nearest = difflib.get_close_matches(quoted, COMMANDS, n=1, cutoff=0.5)
    advice = f"; did you mean {nearest[0]!r}?" if nearest else f"; the commands are {', '.join(COMMANDS)}"
    return f"evorl: there is no command {quoted!r}{advice}"


def parser_of(name: str, kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = kind(
        prog=f"evorl {name}",
        description=command.purpose,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.arguments(parser)
    return parser


def run_command(arguments: Sequence[str]) -> None:
    from evorl.config.yaml import plain_assignments
    from evorl.runs.program import Parser
    from evorl.system.files import reason
    from evorl.types.outcomes import UserError

    if (text := answer(arguments)) is not None:
        print(text, end="")
        return
    name, *rest = arguments
    if mistake := mistake_in(name):
        raise UserError(mistake)
    parsed = parser_of(name, Parser).parse_intermixed_args(plain_assignments(rest))
    try:
        COMMANDS[name].function(parsed)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            raise
        raise UserError(reason(error, getattr(parsed, "run", Path()))) from error


def file_and_assignments(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split words into the configuration file and the `key.path=value` assignments. Raises UserError."""
    from evorl.config.fields import DEFAULT_ALGORITHM
    from evorl.config.yaml import configuration_file
    from evorl.types.outcomes import UserError

    assignments = [word for word in words if re.match(r"[^/=]+=", word)]  # A folder may have "=" in its name.
    named = [word for word in words if word not in assignments]
    ids = r"\w[\w/:.-]*-v\d+|[\w.]+:[\w/.-]+"
    if environment := next((word for word in named if re.fullmatch(ids, word) and not Path(word).exists()), None):
        problem = f"{environment!r} is neither an algorithm nor a file"
        raise UserError(f"{problem}; the environment is environment={environment}")
    if len(named) > 1:
        raise UserError(f"name one algorithm or file, not several: {', '.join(map(repr, named[:3]))}")
    name = named[0] if named else DEFAULT_ALGORITHM
    return configuration_file(name, assignments).absolute(), assignments


def seed(text: str) -> int:
    """Parse a random seed, of at most 63 bits."""
    return _within(text, 0, 2**63)


def count(text: str) -> int:
    """Parse a number of things, at least one."""
    return _within(text, 1, 1_000_000)


def _within(text: str, least: int, most: int) -> int:
    value = int(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{shown(value)} is out of range; it must be {least} to {most}")
    return value


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the code that somebody else's run refers to",
    )


def _runs(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help)


def _output(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help=help)


def _agent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agent", type=int, metavar="ID", help="an agent of a checkpoint (default: the best agent)")
    parser.add_argument("--generation", type=count, metavar="N", help="the checkpoint's generation (default: newest)")


def _words(parser: argparse.ArgumentParser) -> None:
    from evorl.config.yaml import shipped_names

    parser.add_argument(
        WORDS,
        nargs="*",
        metavar="ALGORITHM | FILE | key.path=value",
        help=f"a shipped configuration ({', '.join(shipped_names())}; default: dqn) or a YAML file, and settings that "
        "override it",
    )


def _train(parser: argparse.ArgumentParser) -> None:
    _words(parser)
    parser.add_argument("--processes", type=count, default=1, help="number of processes of a run (default: 1)")
    parser.add_argument("--name", help="directory of the run below runs/")
    parser.add_argument(
        "--no-track", action="store_true", help="record the run only in its own files; short for tracking.backends=[]"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="random seed; short for seed=N")


def _branch(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("new", metavar="NEW", help="the new run: its name beside RUN, or a path")
    parser.add_argument("--generation", type=count, metavar="N", help="the checkpoint's generation (default: newest)")
    _continuation(parser)


def _resume(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    _continuation(parser, f"settings to change: {MAY_CHANGE}")


def _continuation(parser: argparse.ArgumentParser, settings: str = "settings to change") -> None:
    parser.add_argument(OVERRIDES, nargs="*", metavar="key.path=value", help=settings)
    parser.add_argument("--processes", type=count, help="number of processes (default: as many as trained the agent)")
    parser.add_argument("--program", type=Path, metavar="FILE", help="the program that trained the run, if your own")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--episodes", type=count, default=100, metavar="N", help="number of episodes (default: 100)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="random seed of the episodes (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the return of each episode")


def _match(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("opponent", help="the directory of another run, package.module:player, or `random`")
    parser.add_argument("--games", type=count, default=200, metavar="N", help="number of games (default: 200)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="random seed of the games (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _play(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--seat", type=int, choices=(1, 2), help="your seat; 1 moves first (default: alternate)")
    parser.add_argument("--games", type=count, metavar="N", help="number of games (default: until you enter q)")
    parser.add_argument(
        "--sample", action="store_true", help="let the agent sample its moves, as at the end of training"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="random seed of the games (default: 0)")


def _watch(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--video", type=Path, metavar="FILE.mp4", help="write a video instead of opening a window")
    parser.add_argument("--episodes", type=count, default=3, metavar="N", help="number of episodes (default: 3)")
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="random seed of the episodes, as in `evorl evaluate`"
    )
    _agent(parser)


def _report(parser: argparse.ArgumentParser) -> None:
    _runs(parser, "a run's directory; several runs are compared")
    _output(parser, "default: report.html in the run's directory or, for several runs, in this one")


def _plot(parser: argparse.ArgumentParser) -> None:
    _runs(parser, "a run's directory; several runs are compared")
    _output(
        parser, "a .png, .svg or .pdf file (default: plot.png in the run's directory or, for several runs, in this one)"
    )
    parser.add_argument("--hyperparameter", metavar="NAME", help="with one run: a hyperparameter to plot as well")


def _lineage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--settings", action="store_true", help="print the hyperparameters in each generation")


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="directory of the runs (default: runs)"
    )


def _config(parser: argparse.ArgumentParser) -> None:
    _words(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--explain", metavar="KEY", help="explain only this key, or each key of this section")
    instead.add_argument("--tasks", action="store_true", help="list the tasks that shipped configurations are for")


def _export(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    _output(parser, "default: agent.onnx, agent-ID.onnx or agent-ID-generation-N.onnx, in the run's directory")
    _agent(parser)


def _push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("name", help="name of the model page, such as ME/ppo-CartPole-v1")
    parser.add_argument("--private", action="store_true", help="make a new page private")
    parser.add_argument(
        "--video", type=Path, metavar="FILE.mp4", help="a video for the page, from `evorl watch RUN --video`"
    )


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("environment", metavar="ID | module:NAME", help="the environment, as in environment.id")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="its keyword arguments, as in environment.kwargs; with environment. in front, other settings",
    )
    parser.add_argument("--steps", type=count, default=1000, metavar="N", help="number of random steps (default: 1000)")


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "train and evolve a population of agents",
        "train:train",
        _train,
        (
            "evorl train",
            "evorl train ppo environment=CartPole-v1 training.target_fitness=475 --name first",
            "evorl train sac --seed 7 population.size=8",
            "evorl train my.yaml --processes 2",
            "evorl train my.yaml --name wide 'network.hidden_sizes=[256,256]'",
        ),
    ),
    "resume": Command(
        "resume a run from its newest checkpoint, optionally with a larger budget",
        "train:resume",
        _resume,
        ("evorl resume runs/my-run", "evorl resume runs/my-run training.max_steps=2000000 --processes 4"),
    ),
    "branch": Command(
        "begin a new run that goes on from a checkpoint of another, with other settings",
        "branch:branch",
        _branch,
        (
            "evorl branch runs/my-run slower algorithm.learning_rate=1e-4",
            "evorl branch runs/my-run annealed --generation 40 algorithm.annealing=true training.max_steps=2000000",
        ),
    ),
    "evaluate": Command(
        "evaluate the best agent on fresh episodes",
        "evaluate:evaluate_run",
        _evaluate,
        ("evorl evaluate runs/my-run", "evorl evaluate runs/my-run --episodes 20 --seed 7 --json"),
    ),
    "match": Command(
        "play games between the best agent of a run and an opponent, from both seats",
        "match:match",
        _match,
        ("evorl match runs/a runs/b --games 200", "evorl match runs/a random", "evorl match runs/a my_module:player"),
    ),
    "play": Command(
        "play against the best agent of a run, in the terminal",
        "play:play",
        _play,
        ("evorl play runs/my-run", "evorl play runs/my-run --seat 2 --games 3"),
    ),
    "watch": Command(
        "watch an agent play, in a window or as a video",
        "render:watch",
        _watch,
        ("evorl watch runs/my-run --video best.mp4", "evorl watch runs/my-run --episodes 1 --seed 7"),
    ),
    "report": Command(
        "write an HTML report on a run, or a comparison of several runs",
        "render:report",
        _report,
        ("evorl report runs/my-run", "evorl report runs/ppo-1 runs/ppo-2 runs/ppo-3 --output ppo.html"),
    ),
    "plot": Command(
        "plot the learning curve of a run, or the mean of several with its confidence interval",
        "render:plot",
        _plot,
        (
            "evorl plot runs/my-run --hyperparameter learning_rate --output run.png",
            "evorl plot runs/ppo-1 runs/ppo-2 runs/ppo-3 runs/ppo-4 --output ppo.svg",
        ),
    ),
    "lineage": Command(
        "print the best agent's ancestors and mutations, or its hyperparameters in each generation",
        "inspect:lineage",
        _lineage,
        ("evorl lineage runs/my-run", "evorl lineage runs/my-run --settings"),
    ),
    "list": Command(
        "list the runs in a directory, with their progress and how they ended",
        "inspect:list_runs",
        _list,
        ("evorl list", "evorl list results/ppo"),
    ),
    "config": Command(
        "print a complete configuration with the meaning of each key, or explain one key",
        "inspect:config",
        _config,
        (
            "evorl config ppo population.size=8",
            "evorl config sac --explain algorithm.target_entropy",
            "evorl config --explain evolution.selection",
            "evorl config --tasks",
        ),
    ),
    "export": Command(
        "export an agent to ONNX, checked against its own predictions",
        "render:export",
        _export,
        ("evorl export runs/my-run", "evorl export runs/my-run --generation 12 --agent 7 -o agent-7.onnx"),
    ),
    "push": Command(
        "publish the best agent as a model page on the Hugging Face Hub",
        "render:push",
        _push,
        (
            "evorl push runs/my-run ME/dqn-LunarLander-v3 --video best.mp4",
            "evorl push runs/my-run ME/dqn-LunarLander-v3 --private",
        ),
    ),
    "check": Command(
        "check an environment before training in it, with a verdict on each line",
        "check:check",
        _check,
        ("evorl check CartPole-v1", "evorl check my_module:MyEnv size=8 --steps 10000"),
    ),
    "completion": Command(
        "print the completion script of a shell: commands, options, configurations and keys",
        "completion:completion",
        _completion,
        (
            "evorl completion bash > ~/.local/share/bash-completion/completions/evorl",
            "evorl completion zsh > ~/.zfunc/_evorl",
            "evorl completion fish > ~/.config/fish/completions/evorl.fish",
        ),
    ),
}
"""All commands, in the order of `evorl --help`."""
EXAMPLES = (
    "evorl train ppo environment=CartPole-v1 training.target_fitness=475 --name first",
    "evorl watch runs/first --video best.mp4",
    "evorl report runs/first",
)
"""The examples of `evorl --help`."""
