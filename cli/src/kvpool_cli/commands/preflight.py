"""`kvpool preflight`: run the preflight checks on the nodes of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.cluster import operations

if TYPE_CHECKING:
    import argparse

NAME = "preflight"
HELP = "run the preflight checks on the nodes of a pool"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the action."""
    operations.add_arguments(parser)
    parser.add_argument("--measure", action="store_true", help="also measure the drives, for up to 2 s")


def run(args: argparse.Namespace) -> int:
    """Run the operation."""
    return operations.execute(args, NAME, {"measure": args.measure})
