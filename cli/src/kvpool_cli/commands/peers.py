"""`kvpool peers`: which node reads from which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.cluster import source
from kvpool_cli.errors import FINDINGS, OK
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

NAME = "peers"
HELP = "show which nodes read from which, as their probes found"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool."""
    parser.add_argument("pool", nargs="?", default="", metavar="POOL", help="NAME or NAMESPACE/NAME (default: all)")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print pairs of nodes, those that fail first; exit code 1 if one fails."""
    from kvpool_cli.cluster.summary import pairs
    from kvpool_cli.cluster.view import choose, pool_state

    documents = source.documents_of(args)
    source.warn_of_missing_rights(documents)
    rows = []
    for key in choose(documents, args.pool, args.namespace or ""):
        for sidecar in pool_state(documents, key).raw_statuses.items():
            rows += [{"pool": key, **pair} for pair in pairs(*sidecar)]
    rows.sort(key=lambda row: (row["state"] != "unreachable", row["pool"], row["node"], row["peer"]))

    def text(style: Style) -> str:
        if not rows:
            return "no peer could be read" if documents.denied else "no node has a peer"
        cells = [[r["pool"], r["node"], r["peer"], r["state"], r["reason"]] for r in rows]
        return table(cells, ("POOL", "NODE", "READS FROM", "STATE", "REASON"), style=style)

    emit(args, {"pairs": rows}, text)
    return FINDINGS if any(row["state"] == "unreachable" for row in rows) else OK
