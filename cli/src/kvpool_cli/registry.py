"""The commands, in the order of `--help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpool_cli.commands import (
    analyze,
    completion,
    dashboard,
    doctor,
    drain,
    fingerprints,
    peers,
    plan,
    preflight,
    purge,
    report,
    savings,
    simulate,
    status,
    top,
    up,
    verify,
    version,
    warm,
    why,
)

if TYPE_CHECKING:
    import argparse


class Command(Protocol):
    """What a module under `commands/` defines (kvpool_cli/__init__.py describes it)."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, args: argparse.Namespace, /) -> int: ...


COMMANDS: tuple[Command, ...] = (
    *(status, dashboard, doctor, analyze, why, fingerprints, top, peers),
    *(preflight, drain, purge, warm, verify),
    *(plan, simulate, savings, up, report, completion, version),
)
