"""Steps of an operation, from its spec. Pure.

A purge covers the nodes' drives, then the shared tier, then the drives again: between the first two, a node may have
copied a block back from the shared tier, or from a peer that was not purged yet.
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
    """One request: `kind` with `params` (kvpool_sidecar.admin), for every node or any one, counted for `tier`."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = True
    tier: str = "local"
    what: str = ""
    """Description of the step, for people."""
    node: str = ""
    """The only node of the step; empty: see `everywhere`."""


def steps_of(operation: KVCacheOperation, pool: KVCachePool, tenant: str = "") -> tuple[Step, ...]:
    """The steps in order: each starts when the previous one has ended on all of its nodes.

    `tenant`: the tenant id that block keys are derived from, if it differs from the spec (`resolve_tenant`).
    """
    steps = _STEPS[operation.spec.kind](operation, pool)
    if not tenant:
        return steps
    return tuple(replace(step, params={**step.params, "tenant": tenant}) for step in steps)


def resolve_tenant(operation: KVCacheOperation, tenants: Sequence[Manifest]) -> tuple[str, str]:
    """The tenant id of a purge or a release (empty: as in the spec), and a caveat for the message.

    LookupError: the KVCacheTenant does not exist. `tenants` are those of the operation's namespace.
    """
    request = operation.spec.purge or operation.spec.release
    if request is None or request.tenant is None or request.tenant.startswith("kvt:"):
        return "", ""
    mine = [t for t in tenants if t.get("spec", {}).get("poolRef", {}).get("name") == operation.spec.pool_ref.name]
    kind, _, name = request.tenant.rpartition("/")
    if kind:
        found = next((t["metadata"] for t in mine if t["metadata"]["name"] == name), None)
        if found is None:
            raise LookupError(f"this pool has no KVCacheTenant {name}; for a deleted tenant, specify kvt:{name}:UID")
        return f"kvt:{name}:{found['uid']}", ""
    groups = [
        t["metadata"]["name"]
        for t in mine
        if name in ((t.get("status") or {}).get("members") or t["spec"].get("members", {}).get("namespaces") or [])
    ]
    return "", f"; {name} is a member of kvt/{groups[0]}, whose blocks stay" if groups else ""


def caveat(operation: KVCacheOperation, pool: KVCachePool) -> str:
    """Restriction of the purge by the pool's settings; empty if none."""
    request = operation.spec.purge
    if request is None or request.salts is None or pool.spec.tenancy.salt_tags:
        return ""
    return "; spec.tenancy.saltTags is off: blocks that were stored without a salt tag are not found"


def _purge(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.purge
    assert request is not None  # noqa: S101  the kind says so
    params: dict[str, Any] = {"all": True} if request.all else {}
    if request.tenant is not None:
        params["tenant"] = request.tenant
    if request.fingerprint is not None:
        params["fingerprint"] = request.fingerprint
    if request.salts is not None:
        params["salts"] = [salt.removeprefix("sha256:") for salt in request.salts]
    if request.older_than is not None:
        made = datetime.fromisoformat(str(operation.metadata.creation_timestamp))
        params["made_before_ms"] = int(made.timestamp() * 1000) - to_ms(request.older_than)
    drives = Step("purge", {**params, "tier": "Local"}, what="purging the nodes' drives")
    if not _has_shared(pool):
        return (drives, drives)  # a block may have been read from a peer that was not purged yet
    shared = Step("purge", {**params, "tier": "Shared"}, False, "shared", "purging the shared tier")
    return (drives, shared, drives, *_key_steps(request.tenant, pool))


def _key_steps(tenant: str | None, pool: KVCachePool) -> tuple[Step, ...]:
    """Every node confirms that it has no key of a deleted KVCacheTenant."""
    is_encrypted = any(tier.is_encrypted for tier in pool.spec.tiers)
    if not is_encrypted or tenant is None or not tenant.startswith("kvt:"):
        return ()
    return (Step("confirm-key-forgotten", {"tenant": tenant}, what="confirming that nodes have forgotten the key"),)


def _verify(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.verify
    assert request is not None  # noqa: S101
    rate = {"bytes_per_s": to_bytes(request.bandwidth)}
    drives = Step("verify", {**rate, "tier": "Local"}, what="verifying the nodes' drives")
    shared = Step("verify", {**rate, "tier": "Shared"}, False, "shared", "verifying the shared tier")
    return (drives, shared) if _has_shared(pool) else (drives,)


def _warm(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.warm
    assert request is not None  # noqa: S101
    return (Step("warm", {"bytes_per_s": to_bytes(request.bandwidth)}, what="copying hot blocks"),)


def _preflight(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.preflight
    assert request is not None  # noqa: S101
    return (Step("preflight", {"measure": request.measure}, what="checking the nodes"),)


def _drain(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.drain
    assert request is not None  # noqa: S101
    wait_s = min(24 * 3600, -(-to_ms(operation.spec.timeout) // 1000))
    params = {"bandwidth": to_bytes(request.bandwidth), "wait_s": wait_s}
    return (Step("evacuate", params, False, what=f"moving the hot blocks of {request.node}", node=request.node),)


def _release(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    request = operation.spec.release
    assert request is not None  # noqa: S101
    params = {"tenant": request.tenant, "session": request.session.removeprefix("sha256:")}
    return (Step("release", params, what="releasing the session"),)


def _has_shared(pool: KVCachePool) -> bool:
    return any(tier.local is None for tier in pool.spec.tiers)


_STEPS: Mapping[str, Callable[[KVCacheOperation, KVCachePool], tuple[Step, ...]]] = {
    "purge": _purge,
    "verify": _verify,
    "warm": _warm,
    "preflight": _preflight,
    "drain": _drain,
    "release": _release,
}
