"""`kvpool top`: nodes, models or tenants by what they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.errors import OK
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

    from kvpool_cli.cluster.documents import Documents
    from kvpool_cli.cluster.view import PoolState

NAME = "top"
HELP = "show nodes, models or tenants by what they use"
CLUSTER = True

_HEADS = {
    "nodes": ("POOL", "NODE", "USED", "CAPACITY", "USED%", "BLOCKS", "CLIENTS", "HIT%"),
    "models": ("POOL", "MODEL", "TOKENS/H", "FOUND/H", "HIT%", "SIZE", "PODS"),
    "tenants": ("POOL", "TENANT", "USED", "BLOCKS", "EVICTED OVER QUOTA"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to list."""
    parser.add_argument("what", choices=tuple(_HEADS), help="what to list")
    parser.add_argument("pool", nargs="?", default="", metavar="POOL", help="NAME or NAMESPACE/NAME (default: all)")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the rows, the largest first."""
    from kvpool_cli.cluster.view import choose, pool_state

    documents = source.documents_of(args)
    source.warn_of_missing_rights(documents)
    states = [pool_state(documents, key) for key in choose(documents, args.pool, args.namespace or "")]
    if args.what == "tenants":
        rows = [row for state in states for row in tenant_rows(state, documents)]
    else:
        rows = [row for state in states for row in (node_rows(state) if args.what == "nodes" else model_rows(state))]
    rows.sort(key=lambda row: (-row["rank"], *[str(v) for v in row.values()]))

    def text(style: Style) -> str:
        cells = [list(row["cells"]) for row in rows]
        return table(cells, _HEADS[args.what], tuple(range(2, len(_HEADS[args.what]))), style)

    emit(args, {args.what: [{k: v for k, v in row.items() if k not in ("cells", "rank")} for row in rows]}, text)
    return OK


def node_rows(state: PoolState) -> list[dict[str, Any]]:
    """One row for each node, by used bytes."""
    from kvpool_cli.cluster.render import percent
    from kvpool_operator.api.quantity import format_bytes

    rows = []
    for sidecar in state.snapshot.sidecars:
        report = sidecar.report
        if report is None:
            rows.append({"pool": state.key, "node": sidecar.node, "answers": False, "rank": -1})
            rows[-1]["cells"] = (state.key, sidecar.node, "-", "-", "-", "-", "-", "-")
            continue
        hour = report.cache.windows.get("1h")
        asked, found = (hour.asked, hour.found) if hour is not None else (0, 0)
        cells = (
            *(state.key, sidecar.node, format_bytes(report.used_bytes), format_bytes(report.capacity_bytes)),
            *(percent(report.used_bytes, report.capacity_bytes), str(report.blocks), str(report.clients)),
            percent(found, asked),
        )
        figures = {"usedBytes": report.used_bytes, "capacityBytes": report.capacity_bytes, "blocks": report.blocks}
        figures |= {"clients": report.clients, "tokensAsked": asked, "tokensFound": found}
        rank = report.used_bytes
        rows.append({"pool": state.key, "node": sidecar.node, "answers": True, **figures, "cells": cells, "rank": rank})
    return rows


def model_rows(state: PoolState) -> list[dict[str, Any]]:
    """One row for each model, by requested tokens."""
    from kvpool_cli.cluster.render import percent, quantity
    from kvpool_operator.api.quantity import format_bytes

    sizes: dict[str, int] = {}
    pods: dict[str, int] = {}
    for group in state.groups:
        sizes[group.model] = sizes.get(group.model, 0) + group.bytes
        pods[group.model] = pods.get(group.model, 0) + group.in_use_by
    rates = {m["model"]: m for m in (state.status.get("cache") or {}).get("models") or []}
    rows = []
    for model in sorted({*sizes, *rates}):
        asked, found = (int(rates.get(model, {}).get(name) or 0) for name in ("tokensAsked", "tokensFound"))
        size = sizes.get(model, 0)
        cells = (state.key, model or "-", quantity(asked), quantity(found), percent(found, asked), format_bytes(size))
        row = {"pool": state.key, "model": model, "tokensAsked": asked, "tokensFound": found, "bytes": size}
        row |= {"pods": pods.get(model, 0), "cells": (*cells, str(pods.get(model, 0))), "rank": asked}
        rows.append(row)
    return rows


def tenant_rows(state: PoolState, documents: Documents) -> list[dict[str, Any]]:
    """One row for each tenant with accounted blocks. Tags without a KVCacheTenant are shown as they are."""
    from kvpool_operator.api.quantity import format_bytes

    names = {
        str((t.get("status") or {}).get("tag") or ""): str(t["metadata"]["name"])
        for t in documents.of("tenants")
        if t["metadata"].get("namespace") == state.key.partition("/")[0]
    }
    used: dict[str, list[int]] = {}
    for sidecar in state.snapshot.sidecars:
        for tag, use in (sidecar.report.tenants if sidecar.report is not None else {}).items():
            one = used.setdefault(tag, [0, 0, 0])
            one[0] += use.used_bytes
            one[1] += use.blocks
            one[2] += use.over_quota
    rows = []
    for tag, (size, blocks, evicted) in used.items():
        name = names.get(tag, tag)
        cells = (state.key, name, format_bytes(size), str(blocks), str(evicted))
        row = {"pool": state.key, "tenant": name, "tag": tag, "usedBytes": size, "blocks": blocks}
        rows.append({**row, "evictedOverQuota": evicted, "cells": cells, "rank": size})
    return rows
