"""`evorl completion`: shell scripts that complete commands, their options and the names of algorithms."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evorl.commands import COMMANDS
from evorl.commands.command import Command, parser_of
from evorl.commands.words import WORDS
from evorl.config.shipped import shipped_names


@dataclass(frozen=True)
class Completed:
    """The completions of a command: its purpose, its options with their help, and names it takes besides files."""

    name: str
    purpose: str
    options: Mapping[str, str]
    names: tuple[str, ...]

    @property
    def words(self) -> str:
        """All options and names, quoted for a shell and joined by spaces."""
        return " ".join(map(shlex.quote, (*self.options, *self.names)))


def completed(name: str) -> Completed:
    """Collect the completions of a command from its argument parser."""
    options: dict[str, str] = {}
    names: list[str] = []
    for action in parser_of(name)._actions:
        options |= dict.fromkeys(action.option_strings, action.help or "")
        if not action.option_strings:
            names += shipped_names() if action.dest == WORDS else map(str, action.choices or ())
    return Completed(name, COMMANDS[name], options, tuple(names))


def bash() -> str:
    """Return the completion script for bash."""
    cases = "\n".join(f"        {each.name}) words={shlex.quote(each.words)} ;;" for each in map(completed, COMMANDS))
    return f"""_evorl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join(COMMANDS))} -- "$current"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
}}
complete -o filenames -F _evorl evorl
"""


def zsh() -> str:
    """Return the completion script for zsh."""
    named = "\n".join(f"        {shlex.quote(f'{name}:{purpose}')}" for name, purpose in COMMANDS.items())
    cases = "\n".join(f"        {each.name}) compadd -- {each.words} ;;" for each in map(completed, COMMANDS))
    return f"""#compdef evorl
_evorl() {{
    local -a commands=(
{named}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case $words[2] in
{cases}
    esac
    _files
}}
if [ "$funcstack[1]" = _evorl ]; then
    _evorl "$@"
else
    compdef _evorl evorl
fi
"""


def fish() -> str:
    """Return the completion script for fish."""
    lines = [
        f"complete -c evorl -n __fish_use_subcommand -f -a {name} -d {shlex.quote(purpose)}"
        for name, purpose in COMMANDS.items()
    ]
    for each in map(completed, COMMANDS):
        seen = f"complete -c evorl -n '__fish_seen_subcommand_from {each.name}'"
        for option, help in each.options.items():
            kind = "-l" if option.startswith("--") else "-s"
            lines.append(f"{seen} {kind} {option.lstrip('-')} -d {shlex.quote(help)}")
        lines += [f"{seen} -a {shlex.quote(' '.join(each.names))}"] if each.names else []
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to complete")


def _run(parsed: argparse.Namespace) -> None:
    print(SHELLS[parsed.shell](), end="")


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=(
        "evorl completion bash > ~/.local/share/bash-completion/completions/evorl",
        "evorl completion zsh > ~/.zfunc/_evorl",
        "evorl completion fish > ~/.config/fish/completions/evorl.fish",
    ),
)
