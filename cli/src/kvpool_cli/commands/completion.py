"""`kvpool completion SHELL`: a script that completes commands, options and their choices."""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from kvpool_cli.errors import OK

NAME = "completion"
HELP = "print a completion script for bash, zsh or fish"
DESCRIPTION = "Print a completion script. For bash: `source <(kvpool completion bash)`."


class Words(NamedTuple):
    """What may follow a command path, such as ("plan", "check")."""

    path: tuple[str, ...]
    words: list[str]
    choices: dict[str, list[str]]
    """By option: the values it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell to complete in")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(_SCRIPTS[args.shell](words(args.root)))
    return OK


def words(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> list[Words]:
    """Return the words of a parser and of the parsers below it."""
    own = Words(path, [], {})
    found = [own]
    for action in parser._actions:  # argparse has no public list of its arguments
        if isinstance(action, argparse._SubParsersAction):
            own.words.extend(action.choices)
            for name, below in action.choices.items():
                found += words(below, (*path, name))
            continue
        own.words.extend(action.option_strings)
        choices = [str(choice) for choice in action.choices or ()]
        if action.option_strings:
            own.choices.update(dict.fromkeys(action.option_strings, choices) if choices else {})
        else:
            own.words.extend(choices)
    return found


def bash(found: list[Words]) -> str:
    """Return the script for bash; zsh runs it through bashcompinit."""
    commands = sorted({"/".join(entry.path) for entry in found})
    lines = ["# bash completion of kvpool", "_kvpool() {", "  local cur=${COMP_WORDS[COMP_CWORD]} path= word words="]
    lines += ['  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do', '    case "${path:+$path/}$word" in']
    lines += [f"      {'|'.join(c for c in commands if c)}) path=${{path:+$path/}}$word ;;", "    esac", "  done"]
    lines += ['  case "$path ${COMP_WORDS[COMP_CWORD-1]}" in']
    for entry in found:
        for option, choices in entry.choices.items():
            lines.append(f'    "{"/".join(entry.path)} {option}") words="{" ".join(choices)}" ;;')
    lines += ["  esac", '  [ -n "$words" ] || case "$path" in']
    lines += [f'    "{"/".join(entry.path)}") words="{" ".join(entry.words)}" ;;' for entry in found]
    lines += ["  esac", '  COMPREPLY=($(compgen -W "$words" -- "$cur"))', "}"]
    return "\n".join([*lines, "complete -o default -F _kvpool kvpool kubectl-kvpool", ""])


def zsh(found: list[Words]) -> str:
    """Return the script for zsh."""
    return "#compdef kvpool\nautoload -U +X bashcompinit && bashcompinit\n" + bash(found)


def fish(found: list[Words]) -> str:
    """Return the script for fish."""
    lines = ["# fish completion of kvpool", "complete -c kvpool -f"]
    for entry in found:
        below = [other.path[-1] for other in found if other.path[:-1] == entry.path and other.path]
        seen = " ".join(f"__fish_seen_subcommand_from {name};" for name in entry.path).replace("; _", "; and _")
        none = f" not __fish_seen_subcommand_from {' '.join(below)};" if below else ""
        condition = f"{seen} and{none}" if seen and none else seen or none
        test = f" -n '{condition.strip().rstrip(';')}'" if condition else ""
        for word in entry.words:
            if not word.startswith("-"):
                lines.append(f"complete -c kvpool{test} -a {word}")
                continue
            values = f" -x -a '{' '.join(entry.choices[word])}'" if word in entry.choices else ""
            kind = "-l " + word[2:] if word.startswith("--") else "-s " + word[1:]
            where = f" -n '{seen.rstrip(';')}'" if seen else test
            lines.append(f"complete -c kvpool{where} {kind}{values}")
    return "\n".join([*lines, ""])


_SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
