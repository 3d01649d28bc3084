"""The help of all commands, without importing them."""

from __future__ import annotations

from evorl.commands import COMMANDS

HELP = ("-h", "--help")
EXAMPLES = (
    "evorl train ppo environment=CartPole-v1 training.target_fitness=475 --name first",
    "evorl watch runs/first --video best.mp4",
    "evorl report runs/first",
)


def overview() -> str:
    """Return the text of `evorl --help`."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: evorl COMMAND ...",
            "",
            *(f"  {name.ljust(width)}  {purpose}" for name, purpose in COMMANDS.items()),
            "",
            "examples:",
            *(f"  {example}" for example in EXAMPLES),
            "",
            "`evorl COMMAND --help` has the arguments and examples of each.",
        ]
    )
