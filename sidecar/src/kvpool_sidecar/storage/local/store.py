"""A node's own drives as one store: the key selects a block's drive; each drive has its own table and capacity."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvpool_sidecar.blocks.events import BlockEvents, BlocksOpened
from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.storage.base import Block, Store, TenantUsage, Usage, WriteTransaction
from kvpool_sidecar.storage.local import placement
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.space import MAX_BLOCKS
from kvpool_sidecar.storage.local.state import DriveSettings
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool.config import CacheConfig, LocalTier
    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction.session_marks import SessionHint
    from kvpool_sidecar.storage.local.state import PendingCopies
    from kvpool_sidecar.storage.tombstones import PurgeTombstones

__all__ = ["LocalStore", "open_local"]

TenantsOf = Callable[[float], Mapping[bytes, quota.TenantLimits]]


class LocalStore(Store):
    """See Store. Blocks that an earlier set of drives placed elsewhere are still found; new blocks follow the current
    placement.
    """

    name = "local"

    def __init__(self, roots: Sequence[Drive], events: BlockEvents | None = None) -> None:
        self.drives = tuple(roots)
        self.events = events or BlockEvents()
        self._names = [root.name for root in roots]
        self._weights = [root.usage().capacity_bytes for root in roots]

    def reconfigure(
        self,
        tiers: Sequence[LocalTier],
        cache: CacheConfig,
        tenants: TenantsOf,
        hints_percent: int = quota.NO_HINTS,
    ) -> None:
        """Apply other capacities, orders, quotas and ages to the drives. Returns immediately; `maintain` enforces
        them."""
        for root, limits in zip(self.drives, _limits(tiers, cache, tenants, hints_percent), strict=True):
            root.reconfigure(limits, _order(cache))
        self._weights = [tier.capacity_bytes for tier in tiers]

    def set_pending_copies(self, pending_copies: PendingCopies) -> None:
        """Set the blocks whose copy is pending: eviction copies them first, if possible."""
        for drive in self.drives:
            drive.set_pending_copies(pending_copies)

    def set_tombstones(self, tombstones: PurgeTombstones) -> None:
        super().set_tombstones(tombstones)
        for drive in self.drives:
            drive.set_tombstones(tombstones)

    def start(self) -> None:
        """Scan each drive in its own thread; reads are served meanwhile."""
        for root in self.drives:
            threading.Thread(target=root.scan, name=f"scan-{root.name}", daemon=True).start()

    @property
    def scanned(self) -> bool:
        return all(root.scanned for root in self.drives)

    @property
    def generation(self) -> int:
        """Generation of the first drive. It changes when the directory is recreated: older index entries are void."""
        return self.drives[0].generation

    def contains(self, block_key: bytes) -> bool:
        return any(root.contains(block_key) for root in self.drives)

    def open(self, block_key: bytes) -> Block | None:
        home = self._home(block_key)
        if (found := home.open(block_key)) is not None:
            return found
        for root in self.drives:
            if root is not home and root.contains(block_key) and (found := root.open(block_key)) is not None:
                return found
        return None

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        found = self.drives[0].open_many(keys) if len(self.drives) == 1 else super().open_many(keys)
        if self.events.has_subscribers(BlocksOpened):
            opened = [key for key, block in zip(keys, found, strict=True) if block is not None]
            self.events.emit(BlocksOpened(opened))
        return found

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """Record a prompt's blocks in order, from its first on, for the eviction order."""
        if len(self.drives) == 1:
            self.drives[0].observe_sequence(keys, tenant)
            return
        by_place: dict[Drive, list[bytes]] = {}
        for key in keys:
            by_place.setdefault(self._home(key), []).append(key)
        for root, part in by_place.items():
            root.observe_sequence(part, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes) -> int:
        """Apply a session's hint to the blocks of its prompt, in order; return how many took it."""
        by_place: dict[Drive, list[bytes]] = {}
        for key in keys:
            by_place.setdefault(self._home(key), []).append(key)
        return sum(root.hint(hint, part, tenant) for root, part in by_place.items())

    def drive_of(self, block_key: bytes) -> Drive | None:
        """Return the drive that has the block, by the tables."""
        home = self._home(block_key)
        return next((root for root in (home, *self.drives) if root.contains(block_key)), None)

    def payload_len(self, block_key: bytes) -> int:
        """Return the payload length of a block on a scanned drive; 0 if it is absent."""
        return next((n for root in self.drives if (n := root.payload_len(block_key))), 0)

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`, in no order."""
        return [found for root in self.drives for found in root.used_since(idle_s)]

    def coldest_idle_s(self) -> float:
        """Idle seconds of the coldest tenth of the blocks, on the drive where that is lowest."""
        return min((root.coldest_idle_s() for root in self.drives), default=0.0)

    @property
    def headroom_bytes(self) -> int:
        """Bytes that the drives can take before eviction starts."""
        return sum(max(0, root.headroom_bytes()) for root in self.drives)

    def headroom_for(self, block_key: bytes) -> int:
        """Bytes that the block's drive can take before eviction starts."""
        return self._home(block_key).headroom_bytes()

    def mark_shared(self, block_key: bytes) -> None:
        if (root := self.drive_of(block_key)) is not None:
            root.mark_shared(block_key)

    def quarantine(self, block_key: bytes) -> bool:
        return sum(root.quarantine(block_key) for root in self.drives) > 0  # all of them, not any

    def delete(self, block_key: bytes) -> bool:
        return sum(root.delete(block_key) for root in self.drives) > 0

    def peek(self, block_key: bytes) -> Block | None:
        home = self._home(block_key)
        return next((found for root in (home, *self.drives) if (found := root.peek(block_key)) is not None), None)

    def purge(self, keys: Sequence[bytes]) -> int:
        return sum(root.purge(keys) for root in self.drives)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return sum(root.purge_quarantine(doomed) for root in self.drives)

    def usage(self) -> Usage:
        each = [root.usage() for root in self.drives]
        return Usage(*(sum(column) for column in zip(*each, strict=True)))

    def tenants(self) -> dict[bytes, TenantUsage]:
        """Usage by tenant tag, where blocks are attributed to tenants; else empty."""
        found: dict[bytes, list[TenantUsage]] = {}
        for root in self.drives:
            for tag, usage in root.tenants().items():
                found.setdefault(tag, []).append(usage)
        return {tag: TenantUsage(*(sum(n) for n in zip(*each, strict=True))) for tag, each in found.items()}

    @property
    def settled(self) -> bool:
        """False while a drive does not follow the last `reconfigure` yet."""
        return all(root.settled for root in self.drives)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks, which are evicted last."""
        return sum(root.pinned_bytes for root in self.drives)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        for root in self.drives:
            yield from root.keys()

    def maintain(self) -> None:
        for root in self.drives:
            root.maintain()

    def stop(self) -> None:
        """Close the drives."""
        self.close()

    def close(self) -> None:
        for root in self.drives:
            root.close()

    def _home(self, block_key: bytes) -> Drive:
        return self.drives[placement.choose(block_key, self._names, self._weights)]

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        return self._home(block_key).begin_write(block_key, payload_len)

    def record_opened(self, keys: Sequence[bytes], tenant: bytes) -> None:
        for drive in self.drives:
            drive.held.record_opened(keys, tenant)

    def held_bytes(self) -> dict[bytes, int]:
        """Return bytes of removed blocks that pods keep open, by the tag of the tenants that opened them."""
        found: Counter[bytes] = Counter()
        for drive in self.drives:
            found.update(drive.held.by_tenant())
        return dict(found)

    def holds_too_much(self, tenant: bytes) -> bool:
        return any(drive.holds_too_much(tenant) for drive in self.drives)

    def require_room(self, block_key: bytes, payload_len: int) -> None:
        """Raise TierFullError if the block's drive cannot store this length now. Evicts nothing."""
        self._home(block_key).require_room(block_key, payload_len)

    def import_block(
        self, block_key: bytes, payload_len: int, header: BlockHeader, write: Callable[[int], None]
    ) -> bool:
        """Store a block that `write` writes into the given file. See BlockWriter.import_block."""
        if self.contains(block_key):
            return False
        return self._home(block_key).import_block(block_key, payload_len, header, write)


def open_local(
    tiers: Sequence[LocalTier],
    cache: CacheConfig,
    pool_uid: str,
    *,
    tenants: TenantsOf = lambda _share: {},
    hints_percent: int = quota.NO_HINTS,
    read_paths: dict[str, str] | None = None,
    events: BlockEvents | None = None,
    read_headers: bool = False,
) -> LocalStore:
    """The store of a pool's local tiers. `read_paths`: tier path to the same directory mounted read-only.

    `tenants(share)` gives the tenants for which something else holds, on a drive with that part of the node's room.
    `hints_percent`: see CapacityLimits. `read_headers`: the scan reads block headers, for BlockStored.
    """
    roots: list[Drive] = []
    try:
        for tier, limits in zip(tiers, _limits(tiers, cache, tenants, hints_percent), strict=True):
            read_path = (read_paths or {}).get(tier.path)
            roots.append(
                Drive(
                    tier.name,
                    tier.path,
                    limits,
                    pool_uid=pool_uid,
                    events=events,
                    settings=DriveSettings(
                        order=_order(cache),
                        read_path=read_path,
                        dedicated=tier.dedicated_filesystem,
                        read_headers=read_headers,
                    ),
                )
            )
    except BaseException:
        for root in roots:
            root.close()
        raise
    return LocalStore(roots, events)


def _order(cache: CacheConfig) -> EvictionConfig:
    return EvictionConfig(cache.eviction_policy, cache.pinned_percent, cache.pinned_min_uses)


def _limits(
    tiers: Sequence[LocalTier], cache: CacheConfig, tenants: TenantsOf, hints_percent: int
) -> list[quota.CapacityLimits]:
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
            tenant_bytes=quota.share_of(cache.tenant_quota_bytes, tier.capacity_bytes / total),
            idle_s=cache.idle_ttl_s,
            max_age_s=cache.max_age_s,
            tenants=tenants(tier.capacity_bytes / total),
            hints_percent=hints_percent if cache.eviction_policy == "PrefixAware" else quota.NO_HINTS,
        )
        for tier in tiers
    ]
