"""`kvpool up`: a pool without Kubernetes, which the distribution kvpool-sidecar runs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

NAME = "up"
HELP = "run a pool on this machine, without Kubernetes (needs kvpool-sidecar)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `run_sidecar` gets the arguments as they are."""


def run(args: argparse.Namespace) -> int:
    """Run it without arguments, which names those that are missing."""
    return run_sidecar(())


def run_sidecar(arguments: Sequence[str]) -> int:
    """Run the sidecar's command. UsageError if the sidecar is not installed."""
    if importlib.util.find_spec("kvpool_sidecar") is None:
        raise UsageError("`kvpool up` needs kvpool-sidecar[embedded-index]: install it with pip")
    code: int = importlib.import_module("kvpool_sidecar.cli").main(["up", *arguments])
    return code
