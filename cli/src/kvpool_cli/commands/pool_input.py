"""Pools that a command reads: from the cluster, or from a file that kubectl wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvpool_cli.errors import UsageError
from kvpool_cli.kubectl import Kubectl, pool_name

if TYPE_CHECKING:
    import argparse

RESOURCE = "kvcachepools.kvpool.dev"
_MAX_FILE = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add POOL and `--from`; without a POOL that is not required, all pools of the namespace."""
    text = "NAME or NAMESPACE/NAME" + ("" if required else "; default: all pools of the namespace")
    parser.add_argument("pool", metavar="POOL", nargs="?", help=text)
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="read `kubectl get kvcachepool -o json` or yaml from a file, or -"
    )
    parser.set_defaults(pool_required=required)


def read(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the pools, one if a POOL is required. Raises UsageError, NotFoundError and UnreachableError."""
    if args.source is None and args.pool is None and args.pool_required:
        raise UsageError("give a POOL, or a file by --from")
    if args.source is not None:
        found = _of(_file(args.source))
        if args.pool is not None:
            namespace, name = pool_name(args.pool)
            found = [pool for pool in found if _is(pool, namespace, name)]
    elif args.pool is not None:
        namespace, name = pool_name(args.pool)
        found = [Kubectl.of(args).get(RESOURCE, name, namespace)]
    else:
        found = _of(Kubectl.of(args).get(RESOURCE, everywhere=getattr(args, "all_namespaces", False)))
    if args.pool_required and len(found) != 1:
        raise UsageError(f"{args.source} has {len(found)} pools of that name: give the POOL")
    return found


def _file(source: str) -> object:
    try:
        with sys.stdin.buffer if source == "-" else Path(source).open("rb") as file:
            text = file.read(_MAX_FILE + 1)
        if len(text) > _MAX_FILE:
            raise UsageError(f"{source} has more than {_MAX_FILE // 2**20} MiB")
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
        raise UsageError(f"{source} cannot be read as JSON or YAML ({type(e).__name__})") from e


def _of(found: object) -> list[dict[str, Any]]:
    rows = found.get("items", [found]) if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError("this is neither an object nor a list of objects")
    return rows


def _is(pool: dict[str, Any], namespace: str, name: str) -> bool:
    meta = pool.get("metadata")
    return isinstance(meta, dict) and meta.get("name") == name and namespace in ("", meta.get("namespace"))
