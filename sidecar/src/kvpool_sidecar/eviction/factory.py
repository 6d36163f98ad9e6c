"""Creates policies from limits and applies changed limits. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.eviction.lru_lfu_fifo import Fifo, Lfu, Lru
from kvpool_sidecar.eviction.per_tenant import PerTenant
from kvpool_sidecar.eviction.policy import PERSIST_EVERY_S, EvictionPolicy
from kvpool_sidecar.eviction.prefix_aware import PrefixAware
from kvpool_sidecar.eviction.s3fifo import S3Fifo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.eviction.pinning import PinSet
    from kvpool_sidecar.tenancy.limits import CapacityLimits, TenantLimits

__all__ = ["EvictionConfig", "create", "create_policy", "expiries", "reconfigure", "requires_rebuild"]


_NEVER = float("-inf")


class EvictionConfig(NamedTuple):
    """Eviction order. Blocks used `pinned_min_uses` times are evicted last, up to `pinned_percent` of the capacity."""

    policy: str = "PrefixAware"
    pinned_percent: int = 0
    pinned_min_uses: int = 16


def create_policy(policy: str, capacity_bytes: int, pins: PinSet | None = None) -> EvictionPolicy:
    """Create an empty policy by its name in the pool's spec; blocks in `pins` are evicted last. KeyError if unknown."""
    table = _plain_table(policy, capacity_bytes)
    if pins is not None:
        table.set_pins(pins)
    return table


def create(order: EvictionConfig, limits: CapacityLimits) -> EvictionPolicy:
    """Create an empty policy for a node: one per tenant where the limits differ by tenant."""
    if limits.by_tenant:
        return PerTenant(*_rules(order, limits))
    return _one(order, limits, limits.of(b""))


def requires_rebuild(
    order: EvictionConfig, limits: CapacityLimits, before: EvictionConfig, limits_before: CapacityLimits
) -> bool:
    """Return whether the change needs another policy, or entry fields that the present one lacks."""
    more = limits.by_age and not (limits_before.by_age or limits_before.by_tenant)
    return order.policy != before.policy or limits.by_tenant != limits_before.by_tenant or more


def reconfigure(table: EvictionPolicy, order: EvictionConfig, limits: CapacityLimits) -> None:
    """Apply limits that need no rebuild."""
    if not isinstance(table, PerTenant):
        _fit(table, order, limits, limits.of(b""))
        return
    table.configure(*_rules(order, limits))
    for tenant, one in table.policies().items():
        _fit(one, order, limits, limits.of(tenant))


class Expiry(NamedTuple):
    """Blocks of `table` that are idle since, or were created before, these times (Unix seconds) are to be removed."""

    table: EvictionPolicy
    idle_since: float
    created_before: float


def expiries(table: EvictionPolicy, limits: CapacityLimits, wall: float, settled_s: float) -> list[Expiry]:
    """Return what is to be removed at `wall`, Unix seconds.

    The limits have held for `settled_s`. The precision of earlier access times is unknown, so no block counts as idle
    until its use could have been persisted again.
    """
    tables = table.policies() if isinstance(table, PerTenant) else {b"": table}
    found = [_expiry(one, limits.of(tenant), wall, settled_s) for tenant, one in tables.items()]
    return [one for one in found if max(one.idle_since, one.created_before) > _NEVER]


def _expiry(table: EvictionPolicy, limits: TenantLimits, wall: float, settled_s: float) -> Expiry:
    counts = limits.idle_s and settled_s >= min(PERSIST_EVERY_S, limits.idle_s)
    idle_since = wall - limits.idle_s if counts else _NEVER
    return Expiry(table, idle_since, wall - limits.max_age_s if limits.max_age_s else _NEVER)


def _rules(
    order: EvictionConfig, limits: CapacityLimits
) -> tuple[Callable[[bytes], EvictionPolicy], Callable[[bytes], int]]:
    return lambda tenant: _one(order, limits, limits.of(tenant)), lambda tenant: limits.of(tenant).priority


def _one(order: EvictionConfig, limits: CapacityLimits, tenant: TenantLimits) -> EvictionPolicy:
    table = _plain_table(order.policy, tenant.bytes or limits.capacity)
    _fit(table, order, limits, tenant)
    return table


def _fit(table: EvictionPolicy, order: EvictionConfig, limits: CapacityLimits, tenant: TenantLimits) -> None:
    table.configure_pins((tenant.bytes or limits.capacity) * order.pinned_percent // 100, order.pinned_min_uses)
    if table.marks is not None:
        table.marks.share_percent = max(0, tenant.hints_percent)
    table.persist_every_s = min(PERSIST_EVERY_S, tenant.idle_s / 4) if tenant.idle_s else PERSIST_EVERY_S


def _plain_table(policy: str, capacity_bytes: int) -> EvictionPolicy:
    if policy == "PrefixAware":
        return PrefixAware(capacity_bytes)
    plain: dict[str, type[Lru | Lfu | Fifo | S3Fifo]] = {"LRU": Lru, "LFU": Lfu, "FIFO": Fifo, "S3FIFO": S3Fifo}
    return plain[policy]()
