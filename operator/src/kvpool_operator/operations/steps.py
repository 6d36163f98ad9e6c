"""From an operation's spec to orders for sidecars. Pure.

A purge goes over the nodes' own drives, then over the shared tier, then over the drives once more: a node may have
brought a block back from the shared tier, or from a peer that was not done yet, between the first two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.quantity import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.api.operation import KVCacheOperation
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["Step", "steps_of"]


@dataclass(frozen=True)
class Step:
    """One order: `kind` with `params` (kvpool_sidecar.admin), for every node or for any one, counted for `tier`."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = True
    tier: str = "local"
    what: str = ""
    """For people: what goes on during this step."""


def steps_of(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    """In order: each begins when the one before it has ended on all nodes that it was for."""
    return _STEPS[operation.spec.kind](operation, pool)


def _purge(operation: KVCacheOperation, pool: KVCachePool) -> tuple[Step, ...]:
    wish = operation.spec.purge
    assert wish is not None  # noqa: S101  the kind says so
    params: dict[str, Any] = {"all": True} if wish.all else {}
    if wish.tenant is not None:
        params["tenant"] = wish.tenant
    if wish.fingerprint is not None:
        params["fingerprint"] = wish.fingerprint
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


def _has_shared(pool: KVCachePool) -> bool:
    return any(tier.local is None for tier in pool.spec.tiers)


_STEPS: Mapping[str, Callable[[KVCacheOperation, KVCachePool], tuple[Step, ...]]] = {
    "purge": _purge,
    "verify": _verify,
    "warm": _warm,
    "preflight": _preflight,
}
