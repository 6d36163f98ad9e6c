"""Tokens by tenant and model in the last hour, from the sidecars' `/status`. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.render import section
from kvpool_cli.cluster.view import choose, pool_state
from kvpool_cli.errors import CliError
from kvpool_cli.planner.pool_status import ModelTokens, PoolStatus, read_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvpool_cli.cluster.documents import Documents


def pools_by_tenant(documents: Documents, wanted: str, namespace: str) -> list[PoolStatus]:
    """Return the pools with tokens by tenant and model. Raises CliError if no sidecar reports them."""
    found = []
    for key in choose(documents, wanted, namespace):
        state = pool_state(documents, key)
        rows = [list(_rows(status)) for status in state.raw_statuses.values() if _reports(status)]
        if rows:
            names = tenant_names(documents, key)
            models = tokens_by_tenant([row for of_node in rows for row in of_node], names)
            found.append(replace(read_status(state.raw), models=models))
    if not found:
        raise CliError("no sidecar reports tokens by tenant: set sidecar.metrics.perTenant of the chart to true")
    return found


def tenant_names(documents: Documents, pool: str) -> dict[str, str]:
    """Return the names of a pool's KVCacheTenants by tag."""
    namespace, _, name = pool.partition("/")
    return {
        str(section(t, "status").get("tag")): str(t["metadata"]["name"])
        for t in documents.of("tenants")
        if t["metadata"].get("namespace") == namespace
        and section(t, "spec", "poolRef").get("name") == name
        and section(t, "status").get("tag")
    }


def tokens_by_tenant(rows: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> tuple[ModelTokens, ...]:
    """Sum rows of several nodes, without those that requested nothing. A tag without a name stays as it is."""
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        tag = str(row.get("tenant") or "")
        one = sums[str(row.get("model") or ""), names.get(tag, tag) or "other"]
        one[0] += _count(row.get("tokensAsked"))
        one[1] += _count(row.get("tokensFound"))
    return tuple(
        ModelTokens(model, tokens[0], tokens[1], tenant)
        for (model, tenant), tokens in sorted(sums.items())
        if tokens[0]
    )


def _reports(status: Mapping[str, Any]) -> bool:
    return isinstance(section(status, "cache").get("tenants"), list)


def _rows(status: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (row for row in section(status, "cache")["tenants"] if isinstance(row, dict))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
