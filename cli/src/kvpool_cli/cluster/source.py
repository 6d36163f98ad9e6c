"""Where commands take documents from: the cluster, or a file of a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_cli.cluster.documents import load, read
from kvpool_cli.errors import UnreachableError, UsageError
from kvpool_cli.kubectl import Kubectl

if TYPE_CHECKING:
    import argparse

    from kvpool_cli.cluster.documents import Documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that replaces the cluster by a file."""
    parser.add_argument("--from", dest="source", metavar="FILE", help="documents.json of a report, not a cluster")


def documents_of(args: argparse.Namespace) -> Documents:
    """Return the documents of `--from` or of the cluster."""
    return load(Path(args.source)) if args.source else read(Kubectl.of(args))


def warn_of_missing_rights(documents: Documents) -> None:
    """Say on stderr what the user may not read, for commands without findings."""
    for right in dict.fromkeys(documents.denied.values()):
        print(f"warning: you have no right to {right}", file=sys.stderr)


def namespace_of(args: argparse.Namespace) -> str:
    """Return the namespace of `-n` or of the context; `default` if neither is known."""
    if args.namespace or args.source:
        return str(args.namespace or "default")
    try:
        return Kubectl.of(args).namespace()
    except (UnreachableError, UsageError):
        return "default"
