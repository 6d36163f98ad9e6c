"""The commands, in the order of `--help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpool_cli.commands import completion, plan, version

if TYPE_CHECKING:
    import argparse


class Command(Protocol):
    """What a module under `commands/` defines (kvpool_cli/__init__.py describes it)."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, args: argparse.Namespace, /) -> int: ...


COMMANDS: tuple[Command, ...] = (plan, completion, version)
