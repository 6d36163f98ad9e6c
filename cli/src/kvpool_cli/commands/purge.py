"""`kvpool purge`: remove blocks from the nodes and the shared tier of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import operations
from kvpool_cli.errors import UsageError

if TYPE_CHECKING:
    import argparse

NAME = "purge"
HELP = "remove blocks from the nodes and the shared tier of a pool"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the action."""
    operations.add_arguments(parser)
    which = parser.add_argument_group("blocks", "a block must match all that is given")
    which.add_argument("--tenant", help="namespace, kvt/NAME, or kvt:NAME:UID")
    which.add_argument("--fingerprint", help="at least 8 digits of a fingerprint")
    which.add_argument("--older-than", metavar="DURATION", help="minimum age, such as 72h")
    which.add_argument("--all", action="store_true", help="every block of the pool")


def run(args: argparse.Namespace) -> int:
    """Run the operation."""
    wanted = {"tenant": args.tenant, "fingerprint": args.fingerprint, "olderThan": args.older_than}
    action: dict[str, Any] = {name: value for name, value in wanted.items() if value}
    if args.all == bool(action):
        raise UsageError("give either --all, or at least one of --tenant, --fingerprint and --older-than")
    return operations.execute(args, NAME, {"all": True} if args.all else action)
