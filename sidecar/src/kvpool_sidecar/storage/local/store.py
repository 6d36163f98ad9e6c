"""A node's own drives as one store: each block has its place by its key, each drive its own table and capacity."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.storage.base import Block, Store, TenantUsage, Usage, WriteTransaction
from kvpool_sidecar.storage.local import placement
from kvpool_sidecar.storage.local.drive import MAX_BLOCKS, Drive, DriveEvents
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool.config import CacheConfig, LocalTier
    from kvpool.protocol.block import BlockHeader

__all__ = ["LocalStore", "open_local"]

TenantsOf = Callable[[float], Mapping[bytes, quota.TenantLimits]]


class LocalStore(Store):
    """See Store. A block that an earlier set of drives put elsewhere is still found; new ones go to their place."""

    name = "local"

    def __init__(self, roots: Sequence[Drive]) -> None:
        self.roots = tuple(roots)
        self.on_used: Callable[[Sequence[bytes]], None] | None = None  # told of what engines and peers read
        self._names = [root.name for root in roots]
        self._weights = [root.usage().capacity_bytes for root in roots]

    def reconfigure(self, tiers: Sequence[LocalTier], cache: CacheConfig, tenants: TenantsOf) -> None:
        """Other capacities, orders, quotas and ages of the same drives. Returns at once; housekeeping follows."""
        for root, limits in zip(self.roots, _limits(tiers, cache, tenants), strict=True):
            root.reconfigure(limits, _order(cache))
        self._weights = [tier.capacity_bytes for tier in tiers]

    def start(self) -> None:
        """Scan each drive in a thread of its own; reads are served meanwhile."""
        for root in self.roots:
            threading.Thread(target=root.scan, name=f"scan-{root.name}", daemon=True).start()

    @property
    def scanned(self) -> bool:
        return all(root.scanned for root in self.roots)

    @property
    def generation(self) -> int:
        """Changes when the first drive's directory is made anew: what the index says of older ones is void."""
        return self.roots[0].generation

    def has(self, key: bytes) -> bool:
        return any(root.has(key) for root in self.roots)

    def open(self, key: bytes) -> Block | None:
        home = self._home(key)
        if (found := home.open(key)) is not None:
            return found
        for root in self.roots:
            if root is not home and root.has(key) and (found := root.open(key)) is not None:
                return found
        return None

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        found = self.roots[0].open_many(keys) if len(self.roots) == 1 else super().open_many(keys)
        if self.on_used is not None:
            self.on_used([key for key, block in zip(keys, found, strict=True) if block is not None])
        return found

    def learn(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """A prompt's blocks in order, from its first on: what a drive should know when it must let some go."""
        if len(self.roots) == 1:
            self.roots[0].learn(keys, tenant)
            return
        by_place: dict[Drive, list[bytes]] = {}
        for key in keys:
            by_place.setdefault(self._home(key), []).append(key)
        for root, part in by_place.items():
            root.learn(part, tenant)

    def root_of(self, key: bytes) -> Drive | None:
        """The drive that has the block, as far as the tables know."""
        home = self._home(key)
        return next((root for root in (home, *self.roots) if root.has(key)), None)

    def payload_len(self, key: bytes) -> int:
        """Of a block whose drive has been scanned; 0 if it is not here."""
        return next((n for root in self.roots if (n := root.payload_len(key))), 0)

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`, in no order."""
        return [found for root in self.roots for found in root.used_since(idle_s)]

    def idle_of_coldest(self) -> float:
        """Idle seconds of the coldest tenth of the blocks, on the drive where that is the least."""
        return min((root.idle_of_coldest() for root in self.roots), default=0.0)

    @property
    def spare_bytes(self) -> int:
        """Bytes that the drives can take before anything must go."""
        return sum(max(0, root.spare_bytes()) for root in self.roots)

    def spare_for(self, key: bytes) -> int:
        """Bytes that the block's drive can take before anything must go."""
        return self._home(key).spare_bytes()

    def note_shared(self, key: bytes) -> None:
        if (root := self.root_of(key)) is not None:
            root.note_shared(key)

    def quarantine(self, key: bytes) -> bool:
        return sum(root.quarantine(key) for root in self.roots) > 0  # all of them, not any

    def remove(self, key: bytes) -> bool:
        return sum(root.remove(key) for root in self.roots) > 0

    def look(self, key: bytes) -> Block | None:
        home = self._home(key)
        return next((found for root in (home, *self.roots) if (found := root.look(key)) is not None), None)

    def purge(self, keys: Sequence[bytes]) -> int:
        return sum(root.purge(keys) for root in self.roots)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return sum(root.purge_quarantine(doomed) for root in self.roots)

    def usage(self) -> Usage:
        each = [root.usage() for root in self.roots]
        return Usage(*(sum(column) for column in zip(*each, strict=True)))

    def tenants(self) -> dict[bytes, TenantUsage]:
        """By tag, where it matters whose a block is; else nothing."""
        found: dict[bytes, list[TenantUsage]] = {}
        for root in self.roots:
            for tag, usage in root.tenants().items():
                found.setdefault(tag, []).append(usage)
        return {tag: TenantUsage(*(sum(n) for n in zip(*each, strict=True))) for tag, each in found.items()}

    @property
    def settled(self) -> bool:
        """False while a drive does not follow the last `reconfigure` yet."""
        return all(root.settled for root in self.roots)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that go last, because they are used so often."""
        return sum(root.pinned_bytes for root in self.roots)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        for root in self.roots:
            yield from root.keys()

    def housekeep(self) -> None:
        for root in self.roots:
            root.housekeep()

    def close(self) -> None:
        for root in self.roots:
            root.close()

    def _home(self, key: bytes) -> Drive:
        return self.roots[placement.choose(key, self._names, self._weights)]

    def _create(self, key: bytes, payload_len: int) -> WriteTransaction:
        drive = placement.choose(key, self._names, self._weights)
        pending = self.roots[drive]._create(key, payload_len)
        pending.drive = drive  # the key's place may be another by the time it is written
        return pending

    def _seal(self, pending: WriteTransaction) -> None:
        self.roots[pending.drive]._seal(pending)

    def _fill(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        return self.roots[pending.drive]._fill(pending, header)

    def _publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        return self.roots[pending.drive]._publish(pending, header)

    def _release(self, pending: WriteTransaction) -> None:
        self.roots[pending.drive]._release(pending)


def open_local(
    tiers: Sequence[LocalTier],
    cache: CacheConfig,
    pool_uid: str,
    *,
    tenants: TenantsOf = lambda _share: {},
    read_paths: dict[str, str] | None = None,
    events: DriveEvents | None = None,
    read_headers: bool = False,
) -> LocalStore:
    """The store of a pool's local tiers. `read_paths`: tier path to the same directory mounted read-only.

    `tenants(share)` gives the tenants for which something else holds, on a drive with that part of the node's room.
    `read_headers`: a scan reads what each block says of itself, for Events.stored.
    """
    roots: list[Drive] = []
    try:
        for tier, limits in zip(tiers, _limits(tiers, cache, tenants), strict=True):
            read_path = (read_paths or {}).get(tier.path)
            roots.append(
                Drive(
                    tier.name,
                    tier.path,
                    limits,
                    pool_uid=pool_uid,
                    read_path=read_path,
                    events=events,
                    order=_order(cache),
                    dedicated=tier.dedicated_filesystem,
                    read_headers=read_headers,
                )
            )
    except BaseException:
        for root in roots:
            root.close()
        raise
    return LocalStore(roots)


def _order(cache: CacheConfig) -> EvictionConfig:
    return EvictionConfig(cache.eviction_policy, cache.pinned_percent, cache.pinned_min_uses)


def _limits(tiers: Sequence[LocalTier], cache: CacheConfig, tenants: TenantsOf) -> list[quota.CapacityLimits]:
    """Of each drive: of a tenant's quota it has the part that it has of the node's room."""
    total = sum(tier.capacity_bytes for tier in tiers)
    return [
        quota.CapacityLimits(
            tier.capacity_bytes,
            cache.high_watermark,
            cache.low_watermark,
            MAX_BLOCKS,
            tier.reserve_free_bytes,
            tier.reserve_free_percent,
            tenant_bytes=quota.part(cache.tenant_quota_bytes, tier.capacity_bytes / total),
            idle_s=cache.idle_ttl_s,
            max_age_s=cache.max_age_s,
            tenants=tenants(tier.capacity_bytes / total),
        )
        for tier in tiers
    ]
