"""`kvpool verify`: verify the checksum of every block of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.cluster import operations

if TYPE_CHECKING:
    import argparse

NAME = "verify"
HELP = "verify the checksum of every block of a pool"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the action."""
    operations.add_arguments(parser)
    parser.add_argument("--bandwidth", default="100Mi", help="bytes per second on each node")


def run(args: argparse.Namespace) -> int:
    """Run the operation."""
    return operations.execute(args, NAME, {"bandwidth": args.bandwidth})
