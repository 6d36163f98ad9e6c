"""`kvpool plan --from-pool POOL`: options of a plan that are not given, taken from a running pool."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvpool_cli import kubectl
from kvpool_cli.commands import pool_input
from kvpool_cli.errors import UsageError
from kvpool_cli.planner import catalog, units
from kvpool_cli.planner.pool_status import read_status

if TYPE_CHECKING:
    from kvpool_cli.planner.pool_status import ModelTokens, PoolStatus

_HOUR_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool, a file instead of the cluster, and the options of the cluster."""
    group = parser.add_argument_group("running pool")
    group.add_argument(
        "--from-pool", metavar="POOL", help="take model, blocks, nodes, drives and load from a running pool"
    )
    group.add_argument(
        "--from", dest="source", metavar="FILE", help="read that pool from a file of `kubectl get kvcachepool -o json`"
    )
    kubectl.add_arguments(parser)


def filled(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments with what the pool reports, and where each figure is from. Raises UsageError."""
    of_pool = argparse.Namespace(**{**vars(args), "pool": args.from_pool, "pool_required": True})
    (raw,) = pool_input.read(of_pool)
    pool = read_status(raw)
    full, notes = argparse.Namespace(**vars(args)), []
    asked = 0
    if args.model is None and args.config is None:
        most = _model(pool)
        full.model, asked = most.model, most.asked
        notes.append(f"{pool.name}: most tokens of the last hour are of {most.model}")
    elif args.model is not None:
        asked = sum(row.asked for row in pool.models if _is_same(row.model, args.model))
    if args.block_tokens is None:
        full.block_tokens = pool.block_tokens
    if args.nodes is None and pool.nodes:
        full.nodes = pool.nodes
        notes.append(f"{pool.name}: {pool.nodes} nodes serve")
    nodes = full.nodes or 1
    if args.drives is None and pool.capacity:
        full.drives = f"1x{pool.capacity // nodes // 2**20}Mi"
        notes.append(f"{pool.name}: {units.binary(pool.capacity // nodes)} on each node, planned as one drive")
        if args.drive_read is None and pool.read_rates:
            rate = sum(pool.read_rates.values())
            full.drive_read = f"{rate / 1e6:.0f}M"
            notes.append(f"{pool.name}: preflight read {units.decimal(rate, 'B/s')} on the slowest node")
    if args.sessions is None and asked:
        rate = asked / _HOUR_S / units.tokens(args.tokens)
        full.sessions = rate * units.seconds(args.every)
        text = f"{rate:.3g} requests/s: {asked:,} tokens of the last hour in prompts of {args.tokens} (--tokens)"
        notes.append(f"{pool.name}: {text}")
    return full, notes


def _model(pool: PoolStatus) -> ModelTokens:
    if not pool.models:
        raise UsageError(f"no engine of {pool.name} requested tokens in the last hour: give --model or --config")
    most = max(pool.models, key=lambda row: row.asked)
    try:
        catalog.find(most.model)
    except UsageError as e:
        raise UsageError(f"{pool.name}: {e}") from e
    return most


def _is_same(reported: str, given: str) -> bool:
    """Whether names are of one model: engines report it without its organization."""
    return reported.rpartition("/")[2].lower() == given.rpartition("/")[2].lower()
