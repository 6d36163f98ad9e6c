"""Decides which blocks of a shared tier are removed, and in which order. Pure; sizes are bytes.

Blocks of superseded fingerprints come first, then the least recently used: where limits differ by tenant, of the
largest tenants with the lowest priority, else of all. A tenant over its quota loses its own blocks in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool_sidecar.shared_gc.age_histogram import AgeCutoff, AgeHistogram
from kvpool_sidecar.tenancy.limits import TenantLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CollectionLimits", "CollectionPlan", "Group", "Inventory", "Model", "level", "make_plan", "superseded"]

MAX_GROUPS = 1024


_NO_OVERRIDES: Final[Mapping[bytes, TenantLimits]] = MappingProxyType({})


class CollectionLimits(NamedTuple):
    """Of one pool's shared tier. 0: no such limit. `tenants` by tag: those for which something else holds."""

    capacity: int = 0
    high_percent: int = 85
    low_percent: int = 75
    tenant_bytes: int = 0
    idle_s: float = 0.0
    max_age_s: float = 0.0
    tenants: Mapping[bytes, TenantLimits] = _NO_OVERRIDES

    def of(self, tenant: bytes) -> TenantLimits:
        """The tenant's limits."""
        return self.tenants.get(tenant) or TenantLimits(self.tenant_bytes, self.idle_s, self.max_age_s)

    @property
    def by_tenant(self) -> bool:
        """True if limits differ by tenant."""
        return bool(self.tenant_bytes or self.tenants)

    @property
    def high(self) -> int:
        return self.capacity * self.high_percent // 100

    @property
    def low(self) -> int:
        return self.capacity * self.low_percent // 100


class Model(NamedTuple):
    """Of a fingerprint: a digest of the model's name, and how long ago an engine named it."""

    digest: str
    idle_s: float


class Group(NamedTuple):
    """Blocks of one tenant under one fingerprint; empty where no header was read."""

    tenant: bytes = b""
    fingerprint: bytes = b""


@dataclass
class GroupStats:
    """Of one group: `idle_s` since its last use or store, `first_s` since its oldest block was made."""

    ages: AgeHistogram = field(default_factory=AgeHistogram)
    blocks: int = 0
    idle_s: float = float("inf")
    first_s: float = 0.0


class Inventory:
    """What a walk found. Memory is bounded: beyond 1,024 groups the rest are counted as one that is unknown."""

    def __init__(self) -> None:
        self.bytes = 0
        self.blocks = 0
        self.groups: dict[Group, GroupStats] = {}
        self.all = AgeHistogram()

    def add(self, size: int, age_s: float) -> None:
        """A block of `size` bytes that was last used `age_s` ago."""
        self.bytes += size
        self.blocks += 1
        self.all.add(age_s, size)

    def attribute(self, group: Group, size: int, age_s: float, made_s: float, weight: int = 1) -> None:
        """Attribute a block. `weight`: the number of blocks that this one represents when headers are sampled."""
        if group not in self.groups and len(self.groups) >= MAX_GROUPS:
            group = Group()
        count = self.groups.setdefault(group, GroupStats())
        count.ages.add(age_s, size * weight)
        count.blocks += weight
        count.idle_s = min(count.idle_s, age_s)
        count.first_s = max(count.first_s, made_s)

    def tenants(self) -> dict[bytes, int]:
        """Bytes of each tenant."""
        found: dict[bytes, int] = {}
        for group, count in self.groups.items():
            found[group.tenant] = found.get(group.tenant, 0) + count.ages.total
        return found


@dataclass
class CollectionPlan:
    """Which blocks go: the first cut that concerns a block decides."""

    groups: dict[Group, AgeCutoff] = field(default_factory=dict)
    quota: dict[bytes, AgeCutoff] = field(default_factory=dict)
    tenants: dict[bytes, AgeCutoff] = field(default_factory=dict)
    everyone: AgeCutoff | None = None

    def __bool__(self) -> bool:
        return bool(self.groups or self.quota or self.tenants or self.everyone)

    @property
    def reads_headers(self) -> bool:
        return bool(self.groups or self.quota or self.tenants)

    def reason(self, group: Group, size: int, age_s: float) -> str:
        """Why this block goes; empty if it stays."""
        for reason, cut in (
            ("superseded", self.groups.get(group)),
            ("quota", self.quota.get(group.tenant)),
            ("capacity", self.tenants.get(group.tenant)),
            ("capacity", self.everyone),
        ):
            if cut is not None and cut.selects(age_s, size):
                return reason
        return ""


def superseded(inventory: Inventory, models: Mapping[bytes, Model], after_s: float) -> list[Group]:
    """Return groups unused for `after_s` of a model for which the same tenant has a younger fingerprint.

    `models` by fingerprint; unknown fingerprints are never superseded. Longest unused first. Only a tenant's own blocks
    count, so no tenant can have another tenant's blocks removed.
    """
    found = []
    for group, count in inventory.groups.items():
        model = models.get(group.fingerprint)
        if model is None or min(model.idle_s, count.idle_s) < after_s:
            continue
        for other, newer in inventory.groups.items():
            known = models.get(other.fingerprint)
            if (
                other.tenant == group.tenant
                and known is not None
                and known.digest == model.digest
                and newer.first_s < count.first_s
                and newer.idle_s < after_s
            ):
                found.append(group)
                break
    return sorted(found, key=lambda group: inventory.groups[group].idle_s, reverse=True)


def level(have: Mapping[bytes, int], need: int) -> dict[bytes, int]:
    """Return how many bytes each gives so that `need` bytes are freed: the largest are leveled first."""
    ordered = sorted(have.items(), key=lambda item: item[1], reverse=True)
    total = 0
    for count, (_, size) in enumerate(ordered, 1):
        total += size
        below = ordered[count][1] if count < len(ordered) else 0
        if total - below * count >= need:
            top = max(0, (total - need) // count)
            return {name: size - top for name, size in ordered[:count] if size > top}
    return dict(ordered)


def make_plan(
    inventory: Inventory, limits: CollectionLimits, old: list[Group], *, concurrent_writes: int = 0
) -> CollectionPlan:
    """Plan removals. `old`: result of `superseded`; `concurrent_writes`: bytes stored but not counted."""
    total = inventory.bytes + concurrent_writes
    need = total - limits.low if limits.capacity and total > limits.high else 0
    gives = _Gives(inventory, old)
    if limits.by_tenant:
        for tenant, size in inventory.tenants().items():
            quota = limits.of(tenant).bytes
            if tenant and quota and size > quota:
                give = size - quota * limits.low_percent // limits.high_percent
                need -= give
                gives.by_tenant[tenant] = gives.take_old(give, tenant)
    plan = CollectionPlan()
    over = {tenant for tenant, size in gives.by_tenant.items() if size}
    need = gives.take_old(max(0, need), None)
    if need and not limits.by_tenant:
        # where nothing is superseded the exact ages of all are known, headers read or not
        plan.everyone = (gives.rest(None) if gives.from_old else inventory.all).cutoff(need)
    elif need:
        have = {tenant: gives.rest(tenant).total - gives.by_tenant.get(tenant, 0) for tenant in inventory.tenants()}
        for priority in sorted({limits.of(tenant).priority for tenant in have}):
            some = {tenant: size for tenant, size in have.items() if limits.of(tenant).priority == priority}
            for tenant, size in (level(some, need) if need > 0 else {}).items():
                gives.by_tenant[tenant] = gives.by_tenant.get(tenant, 0) + size
                need -= size
    plan.groups = {group: inventory.groups[group].ages.cutoff(size) for group, size in gives.from_old.items()}
    for tenant, size in gives.by_tenant.items():
        if size:
            (plan.quota if tenant in over else plan.tenants)[tenant] = gives.rest(tenant).cutoff(size)
    return plan


class _Gives:
    """How many bytes each old group, and each tenant beside that, gives."""

    def __init__(self, inventory: Inventory, old: list[Group]) -> None:
        self.from_old: dict[Group, int] = {}
        self.by_tenant: dict[bytes, int] = {}
        self._census = inventory
        self._old = old

    def take_old(self, need: int, tenant: bytes | None) -> int:
        """From old groups, of one tenant or of all; what is still needed then."""
        for group in self._old:
            has = self._census.groups[group].ages.total - self.from_old.get(group, 0)
            if need > 0 and has and tenant in (None, group.tenant):
                taken = min(need, has)
                self.from_old[group] = self.from_old.get(group, 0) + taken
                need -= taken
        return need

    def rest(self, tenant: bytes | None) -> AgeHistogram:
        """Of the groups that give nothing because they are old, of one tenant or of all."""
        ages = AgeHistogram()
        for group, count in self._census.groups.items():
            if group not in self.from_old and tenant in (None, group.tenant):
                ages.merge(count.ages)
        return ages
