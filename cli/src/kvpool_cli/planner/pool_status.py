"""What a plan needs of a KVCachePool as the API server returns it. Pure.

Absent and odd fields count as not reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import units


@dataclass(frozen=True)
class ModelTokens:
    """Tokens of one model in the last hour."""

    model: str
    asked: int
    found: int
    tenant: str = ""
    """Name or tag; empty for the tokens of all tenants."""


@dataclass(frozen=True)
class PoolStatus:
    """Spec and status of a running pool. 0, an empty text and None: not reported."""

    name: str
    block_tokens: int
    max_block: int
    nodes: int
    capacity: int
    used: int
    blocks: int
    index_memory: int
    hit_rate: float | None
    load_success: float | None
    seconds_saved: int
    """Net seconds since the sidecars started."""
    read_rates: dict[str, float]
    """By local tier: bytes a second of one stream on the slowest node."""
    models: tuple[ModelTokens, ...]


def read_status(pool: dict[str, Any]) -> PoolStatus:
    """Return the fields. Raises UsageError for an object of another kind."""
    if pool.get("kind") != "KVCachePool":
        raise UsageError(f"the object is a {pool.get('kind')!r}, not a KVCachePool")
    meta, spec, status = (_dict(pool.get(name)) for name in ("metadata", "spec", "status"))
    cache, capacity, made = (_dict(status.get(name)) for name in ("cache", "capacity", "preflight"))
    local = {str(t.get("name")) for t in _list(spec.get("tiers")) if _dict(t).get("local")}
    return PoolStatus(
        name=f"{meta.get('namespace', '')}/{meta.get('name', '')}",
        block_tokens=_count(_dict(spec.get("cache")).get("blockTokens")) or 256,
        max_block=_bytes(_dict(spec.get("cache")).get("maxBlockSize")),
        nodes=_count(_dict(status.get("nodes")).get("ready")),
        capacity=_bytes(capacity.get("total")),
        used=_bytes(capacity.get("used")),
        blocks=_count(capacity.get("blocks")),
        index_memory=_bytes(_dict(status.get("index")).get("memory")),
        hit_rate=_share(cache.get("hitRate")),
        load_success=_share(cache.get("loadSuccessRate")),
        seconds_saved=_signed(cache.get("secondsSaved")),
        read_rates={
            str(row.get("tier")): 1e6 * _count(row.get("readMBps"))
            for row in map(_dict, _list(made.get("measured")))
            if row.get("tier") in local and _count(row.get("readMBps"))
        },
        models=tuple(
            ModelTokens(str(row.get("model", "")), _count(row.get("tokensAsked")), _count(row.get("tokensFound")))
            for row in map(_dict, _list(cache.get("models")))
        ),
    )


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _signed(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _count(value: object) -> int:
    return max(0, _signed(value))


def _bytes(value: object) -> int:
    try:
        return units.size(str(value))
    except UsageError:
        return 0


def _share(value: object) -> float | None:
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if 0 <= found <= 1 else None
