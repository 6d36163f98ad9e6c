"""Capacity arithmetic: how many bytes must be evicted before others fit. Pure; bytes."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NO_HINTS",
    "CapacityLimits",
    "TenantLimits",
    "bytes_over_capacity",
    "bytes_over_watermark",
    "fs_shortfall",
    "headroom",
    "pending_limit",
    "reserve",
]


NO_HINTS: Final = -1


class TenantLimits(NamedTuple):
    """Of one tenant's blocks in one place. 0: no such limit."""

    bytes: int = 0
    idle_s: float = 0.0  # without a use a block goes
    max_age_s: float = 0.0  # after its making a block goes
    priority: int = 0  # where room is short the tenants with the lowest number lose blocks first
    hints_percent: int = NO_HINTS  # of its bytes that its sessions may expect to use again


_NO_OVERRIDES: Final[Mapping[bytes, TenantLimits]] = MappingProxyType({})


class CapacityLimits(NamedTuple):
    """Limits of one drive, or of all drives of a node."""

    capacity: int
    high_percent: int
    low_percent: int
    max_blocks: int
    reserve_bytes: int = 0
    reserve_percent: int = 0
    tenant_bytes: int = 0  # that one tenant may take; 0: no such limit
    idle_s: float = 0.0  # without a use a block goes; 0: never
    max_age_s: float = 0.0  # after its making a block goes; 0: never
    tenants: Mapping[bytes, TenantLimits] = _NO_OVERRIDES  # by tag: those for which something else holds
    hints_percent: int = NO_HINTS  # of a tenant's bytes that its sessions may expect to use again

    def of(self, tenant: bytes) -> TenantLimits:
        """The tenant's limits."""
        return self.tenants.get(tenant) or TenantLimits(
            self.tenant_bytes, self.idle_s, self.max_age_s, hints_percent=self.hints_percent
        )

    @property
    def by_tenant(self) -> bool:
        """True if limits differ by tenant, or a tenant's hints must not change the order of another."""
        return bool(self.tenant_bytes or self.tenants or self.hints_percent != NO_HINTS)

    @property
    def by_age(self) -> bool:
        """True if a limit depends on creation times."""
        return bool(self.max_age_s or any(one.max_age_s for one in self.tenants.values()))


def bytes_over_capacity(used: int, pending: int, need: int, limits: CapacityLimits) -> int:
    """Bytes to evict so that `need` more fit the capacity; 0 if they fit, more than `used` if they never will."""
    return max(0, used + pending + need - limits.capacity)


def bytes_over_watermark(used: int, pending: int, limits: CapacityLimits) -> int:
    """Bytes to evict to come down to the low watermark; 0 while the high watermark is not passed."""
    if used + pending <= limits.capacity * limits.high_percent // 100:
        return 0
    return used + pending - limits.capacity * limits.low_percent // 100


def reserve(fs_total: int, limits: CapacityLimits) -> int:
    """Bytes of the file system that stay free."""
    return max(limits.reserve_bytes, fs_total * limits.reserve_percent // 100)


def fs_shortfall(fs_free: int, fs_total: int, need: int, limits: CapacityLimits) -> int:
    """Bytes to evict so that the reserve is still free after `need` more."""
    return max(0, need + reserve(fs_total, limits) - fs_free)


def headroom(used: int, fs_free: int, fs_total: int, limits: CapacityLimits) -> int:
    """Bytes that fit without eviction; below 0: too much is stored. `used`: including reservations."""
    return min(limits.capacity * limits.low_percent // 100 - used, fs_free - reserve(fs_total, limits))


def pending_limit(capacity: int) -> int:
    """Bytes that may be promised to writers and not yet be committed: half of the capacity."""
    return capacity // 2
