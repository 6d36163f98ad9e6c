"""`kvpool version`: versions of this program and of Python."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from kvpool_cli.errors import OK
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

NAME = "version"
HELP = "print the version of this program"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(args: argparse.Namespace) -> int:
    """Print the versions."""
    found = {"version": metadata.version("kvpool-cli"), "python": platform.python_version()}

    def text(_: Style) -> str:
        return table([["kvpool", found["version"]], ["Python", found["python"]]])

    emit(args, found, text)
    return OK
