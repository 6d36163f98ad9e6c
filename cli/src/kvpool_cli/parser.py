"""The parser of the whole command line, made from the registry."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvpool_cli import kubectl, output
from kvpool_cli.registry import COMMANDS

if TYPE_CHECKING:
    from kvpool_cli.registry import Command

_EPILOG = """exit codes: 0 success, 1 findings or a negative verdict, 2 usage, 3 the cluster cannot be reached,
130 interrupted"""


def build_parser(prog: str = "kvpool", commands: tuple[Command, ...] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser; `args.command` is the module of the chosen command, `args.root` this parser."""
    parser = argparse.ArgumentParser(prog, description="Plan, inspect and diagnose pools of KV cache.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=_version())
    entries = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        entry = entries.add_parser(
            command.NAME, help=command.HELP, description=getattr(command, "DESCRIPTION", command.HELP)
        )
        output.add_arguments(entry, getattr(command, "FORMATS", output.FORMATS))
        if getattr(command, "CLUSTER", False):
            kubectl.add_arguments(entry)
        command.add_arguments(entry)
        entry.set_defaults(command=command, root=parser)
    return parser


def _version() -> str:
    from importlib import metadata

    return f"kvpool {metadata.version('kvpool-cli')}"
