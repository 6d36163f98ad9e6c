"""From an operation's spec to orders for sidecars. Pure.

A purge goes over the nodes' own drives, then over the shared tier, then over the drives once more: a node may have
brought a block back from the shared tier, or from a peer that was not done yet, between the first two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.quantity import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_operator.api.operation import KVCacheOperation
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["Step", "caveat", "resolve_tenant", "steps_of"]


@dataclass(frozen=True)
class Step:
    """One order: `kind` with `params` (kvpool_sidecar.admin), for every node or for any one, counted for `tier`."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = True
    tier: str = "local"
    what: str = ""
    """For people: what goes on during this step."""
    node: str = ""
    """Where it is for one node alone: which."""


def steps_of(operation: KVCacheOperation, pool: KVCachePool, tenant: str = "") -> tuple[Step, ...]:
    """In order: each begins when the one before it has ended on all nodes that it was for.

    `tenant`: what names of blocks are made with, where that is not what the spec says (`resolve_tenant`).
    """
    steps = _STEPS[operation.spec.kind](operation, pool)
    if not tenant:
        return steps
    return tuple(replace(step, params={**step.params, "tenant": tenant}) for step in steps)


def resolve_tenant(operation: KVCacheOperation, tenants: Sequence[Manifest]) -> tuple[str, str]:
    """The tenant of a purge as sidecars know it (empty: as it is written), and what a reader should know besides.

    LookupError if there is no such KVCacheTenant. `tenants` are those of the operation's namespace.
    """
    wish = operation.spec.purge
    if wish is None or wish.tenant is None or wish.tenant.startswith("kvt:"):
        return "", ""
    mine = [t for t in tenants if t.get("spec", {}).get("poolRef", {}).get("name") == operation.spec.pool_ref.name]
    kind, _, name = wish.tenant.rpartition("/")
    if kind:
        found = next((t["metadata"] for t in mine if t["metadata"]["name"] == name), None)
        if found is None:
            raise LookupError(f"this pool has no KVCacheTenant {name}; of one that was deleted give kvt:{name}:UID")
        return f"kvt:{name}:{found['uid']}", ""
    groups = [
        t["metadata"]["name"]
        for t in mine
        if name in ((t.get("status") or {}).get("members") or t["spec"].get("members", {}).get("namespaces") or [])
    ]
    return "", f"; {name} is a member of kvt/{groups[0]}, whose blocks stay" if groups else ""


def caveat(operation: KVCacheOperation, pool: KVCachePool) -> str:
    """What a reader of the end's message should know of the pool."""
    wish = operation.spec.purge
    if wish is None or wish.salts is None or pool.spec.tenancy.salt_tags:
        return ""
    return "; tenancy.saltTags of this pool is off: blocks that were stored without a tag of their salt are not found"


def _purge(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.purge
    assert wish is not None  # noqa: S101  the kind says so
    params: dict[str, Any] = {"all": True} if wish.all else {}
    if wish.tenant is not None:
        params["tenant"] = wish.tenant
    if wish.fingerprint is not None:
        params["fingerprint"] = wish.fingerprint
    if wish.salts is not None:
        params["salts"] = [salt.removeprefix("sha256:") for salt in wish.salts]
    if wish.older_than is not None:
        made = datetime.fromisoformat(str(operation.metadata.creation_timestamp))
        params["made_before_ms"] = int(made.timestamp() * 1000) - to_ms(wish.older_than)
    drives = Step("purge", {**params, "tier": "Local"}, what="purging the nodes' drives")
    if not _has_shared(pool):
        return (drives, drives)  # a peer that was not done yet may have been read from in the meantime
    return (drives, Step("purge", {**params, "tier": "Shared"}, False, "shared", "purging the shared tier"), drives)


def _verify(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.verify
    assert wish is not None  # noqa: S101
    rate = {"bytes_per_s": to_bytes(wish.bandwidth)}
    drives = Step("verify", {**rate, "tier": "Local"}, what="verifying the nodes' drives")
    shared = Step("verify", {**rate, "tier": "Shared"}, False, "shared", "verifying the shared tier")
    return (drives, shared) if _has_shared(pool) else (drives,)


def _warm(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.warm
    assert wish is not None  # noqa: S101
    return (Step("warm", {"bytes_per_s": to_bytes(wish.bandwidth)}, what="copying hot blocks"),)


def _preflight(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.preflight
    assert wish is not None  # noqa: S101
    return (Step("preflight", {"measure": wish.measure}, what="looking at the nodes"),)


def _drain(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.drain
    assert wish is not None  # noqa: S101
    wait_s = min(24 * 3600, -(-to_ms(operation.spec.timeout) // 1000))
    params = {"bandwidth": to_bytes(wish.bandwidth), "wait_s": wait_s}
    return (Step("evacuate", params, False, what=f"moving the hot blocks of {wish.node}", node=wish.node),)


def _has_shared(pool: KVCachePool) -> bool:
    return any(tier.local is None for tier in pool.spec.tiers)


_STEPS: Mapping[str, Callable[[KVCacheOperation, KVCachePool], tuple[Step, ...]]] = {
    "purge": _purge,
    "verify": _verify,
    "warm": _warm,
    "preflight": _preflight,
    "drain": _drain,
}
