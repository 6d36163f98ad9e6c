"""Findings about what happens to blocks: evicted, expired, never found, slower than computing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.diagnosis.finding import make

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvpool_operator.diagnosis.finding import PoolFinding
    from kvpool_operator.diagnosis.observed import Observed

__all__ = ["full_index", "missed_tokens", "over_quota", "slow_loads", "tenants_not_in_effect", "unfound_prompts"]

_NOTED: Final = 0.01
"""Share of the requested tokens from which a cause is a finding."""
_HARMFUL: Final = 0.1
"""Share from which it is a warning."""
_MISSES: Final = {
    "evicted-capacity": (Code.EVICTED_BEFORE_REUSE, "blocks were evicted because a local tier was full"),
    "evicted-space": (Code.EVICTED_BEFORE_REUSE, "blocks were evicted because a file system was full"),
    "expired": (Code.EXPIRED_BEFORE_REUSE, "blocks had reached their maximum age"),
    "evicted-quota": (Code.TENANT_OVER_QUOTA, "blocks were evicted because of a tenant's quota"),
    "slower-than-compute": (Code.LOADS_SLOWER, "blocks were left out because loading takes longer than computing"),
    "fingerprint-differs": (Code.STORED_UNDER_OTHER_FINGERPRINT, "blocks of the model exist under other fingerprints"),
    "peer-unreachable": (Code.PEERS_UNREACHABLE, "only peers that cannot be reached have the blocks"),
    "index-unavailable": (Code.INDEX_NOT_CONNECTED, "the index did not answer lookups"),
}
_OVERLOAD: Final = ("deadline", "busy", "late")
_MANY_LOADS: Final = 100
_MANY_TOKENS: Final = 4096


def missed_tokens(i: Observed) -> Iterator[PoolFinding]:
    """Causes of misses in the last 5 minutes or the last hour, by their share of the requested tokens."""
    shares = _shares(i)
    for reason, (code, words) in _MISSES.items():
        share = shares.get(reason, 0.0)
        if share >= _NOTED:
            severity = code.severity if share >= _HARMFUL else Severity.INFO
            yield make(code, i.subject, f"{words} ({reason})", severity=severity)


def _shares(i: Observed) -> dict[str, float]:
    """Largest share of each reason over the windows."""
    shares: dict[str, float] = {}
    for tokens in i.cache.windows.values():
        for reason, missed in tokens.misses.items():
            if tokens.asked:
                shares[reason] = max(shares.get(reason, 0.0), missed / tokens.asked)
    return shares


def unfound_prompts(i: Observed) -> Iterator[PoolFinding]:
    """Models whose engines request and store much, and find nothing: prompts are hashed differently."""
    stored = {group.model for group in i.groups if group.bytes and group.in_use_by}
    for model, windows in i.cache.models.items():
        tokens = windows.get("1h")
        never = tokens is not None and tokens.misses.get("never-stored", 0) >= 0.9 * tokens.asked
        if tokens is not None and never and model in stored and tokens.asked >= _MANY_TOKENS and not tokens.found:
            yield make(
                Code.PROMPTS_NEVER_FOUND, f"Model {model}", "blocks are stored, and no requested prompt was found"
            )


def slow_loads(i: Observed) -> Iterator[PoolFinding]:
    """Loads that are slower than computing, or that miss their deadline."""
    if i.cache.lost_us > i.cache.saved_us:
        yield make(Code.LOADS_SLOWER, i.subject, "loads took longer than computing the same tokens")
    for node, report in i.reports:
        late = sum(report.misses.get(reason, 0) for reason in _OVERLOAD)
        tried = sum(report.hits.values()) + sum(report.misses.values())
        if tried >= _MANY_LOADS and late >= _HARMFUL * tried:
            yield make(Code.LOADS_FAIL, f"Node {node}", "a tenth of the loads or more missed their deadline")


def full_index(i: Observed) -> Iterator[PoolFinding]:
    """The index refuses entries."""
    if any(report.index_full for _, report in i.reports):
        fix = "raise the memory of the external index" if i.pool.spec.index.external is not None else ""
        yield make(Code.INDEX_FULL, i.subject, "the index refuses new entries: its memory is full", fix=fix)


def over_quota(i: Observed) -> Iterator[PoolFinding]:
    """KVCacheTenants whose blocks are evicted because of their quota."""
    for one in i.snapshot.tenants:
        spec, used = _section(one.raw, "spec", "quota"), _section(one.raw, "status", "used")
        tag = str((one.raw.get("status") or {}).get("tag") or "")
        evicted = sum(r.tenants[tag].over_quota for _, r in i.reports if tag in r.tenants)
        capacity = _bytes(spec.get("capacity"))
        fullest = max((r.tenants[tag].used_bytes for _, r in i.reports if tag in r.tenants), default=0)
        is_full = bool(capacity) and fullest >= 0.9 * capacity
        if (evicted or used.get("evictedOverQuota")) and (is_full or not capacity):
            namespace = one.raw["metadata"].get("namespace", "")
            quota = f"its quota of {spec['capacity']} per node" if capacity else "its quota"
            fix = f"raise spec.quota.capacity of KVCacheTenant {one.name}, or move its members to another pool"
            subject = f"KVCacheTenant {namespace}/{one.name}"
            yield make(
                Code.TENANT_OVER_QUOTA, subject, f"the tenant fills {quota}; its own blocks are evicted", fix=fix
            )


def tenants_not_in_effect(i: Observed) -> Iterator[PoolFinding]:
    """KVCacheTenants with a part that the pool cannot apply."""
    for one in i.snapshot.tenants:
        if one.message:
            namespace = one.raw["metadata"].get("namespace", "")
            yield make(Code.TENANT_NOT_IN_EFFECT, f"KVCacheTenant {namespace}/{one.name}", one.message)


def _section(raw: Mapping[str, Any], *path: str) -> dict[str, Any]:
    value: Any = raw
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _bytes(quantity: object) -> int:
    try:
        return to_bytes(str(quantity)) if quantity else 0
    except ValueError:
        return 0
