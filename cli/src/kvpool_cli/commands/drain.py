"""`kvpool drain`: copy the hot blocks of a node to other places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.cluster import operations

if TYPE_CHECKING:
    import argparse

NAME = "drain"
HELP = "copy the hot blocks of a node to other places"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the action."""
    operations.add_arguments(parser)
    parser.add_argument("node", metavar="NODE", help="name of the node")
    parser.add_argument("--bandwidth", default="256Mi", help="bytes per second that the node sends")


def run(args: argparse.Namespace) -> int:
    """Run the operation."""
    return operations.execute(args, NAME, {"node": args.node, "bandwidth": args.bandwidth})
