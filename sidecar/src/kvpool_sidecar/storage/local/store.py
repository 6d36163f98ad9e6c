"""A node's own drives as one store, with one table and one order of eviction; the drives only hold the blocks."""

from __future__ import annotations

import heapq
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvpool_sidecar.blocks.events import BlockEvents, BlocksOpened
from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.storage.base import Block, Store, TenantUsage, Usage, WriteTransaction
from kvpool_sidecar.storage.local import placement
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.node_eviction import NodeEviction
from kvpool_sidecar.storage.local.node_table import NodeTable
from kvpool_sidecar.storage.local.state import DriveSettings
from kvpool_sidecar.tenancy import limits as quota

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool.config import CacheConfig, LocalTier
    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction.session_marks import MarksStatus, SessionHint
    from kvpool_sidecar.storage.local.node_table import PendingCopies
    from kvpool_sidecar.storage.tombstones import PurgeTombstones

__all__ = ["LocalStore", "open_local"]

_MAX_BLOCKS = 1 << 20
TenantsOf = Callable[[], Mapping[bytes, quota.TenantLimits]]


class LocalStore(Store):
    """See Store. The key selects a block's drive; another one takes it while that has no room.

    Blocks are found wherever they are. The drives share one NodeEviction.
    """

    name = "local"

    def __init__(
        self, roots: Sequence[Drive], events: BlockEvents | None = None, *, max_blocks: int = _MAX_BLOCKS
    ) -> None:
        if any(root.node is not roots[0].node for root in roots):
            raise ValueError("drives of a node share one table")
        self.drives = tuple(roots)
        self.node = roots[0].node
        self.table = self.node.table
        self.events = events or BlockEvents()
        self.max_blocks = max_blocks
        self._names = [root.name for root in roots]
        self._weights = [root.usage().capacity_bytes for root in roots]

    def reconfigure(
        self,
        tiers: Sequence[LocalTier],
        cache: CacheConfig,
        tenants: TenantsOf,
        hints_percent: int = quota.NO_HINTS,
    ) -> None:
        """Apply other capacities, orders, quotas and ages. Returns immediately; `maintain` enforces them."""
        self.node.reconfigure(_node_limits(tiers, cache, tenants, hints_percent, self.max_blocks), _order(cache))
        for root, tier in zip(self.drives, tiers, strict=True):
            root.set_limits(_drive_limits(tier, cache))
        self._weights = [tier.capacity_bytes for tier in tiers]

    def set_pending_copies(self, pending_copies: PendingCopies) -> None:
        """Set the blocks whose copy is pending: eviction copies them first, if possible."""
        self.table.pending_copies = pending_copies

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
        return self.drive_of(block_key) is not None

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        # the table is locked once: a lookup has up to 4,096 keys
        fenced, complete = [drive.health.fenced for drive in self.drives], self.scanned
        places = zip(keys, self.table.drives_of(keys), strict=True)
        return [not fenced[n] if n >= 0 else not complete and self.contains(key) for key, n in places]

    def open(self, block_key: bytes) -> Block | None:
        return self._open_many((block_key,))[0]

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        found = self._open_many(keys)
        if self.events.has_subscribers(BlocksOpened):
            opened = [key for key, block in zip(keys, found, strict=True) if block is not None]
            self.events.emit(BlocksOpened(opened))
        return found

    def _open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        if len(self.drives) == 1:
            return self.drives[0].open_many(keys)
        found: list[Block | None] = [None] * len(keys)
        by_drive: dict[int, list[int]] = {}
        for position, number in enumerate(self.table.drives_of(keys)):
            by_drive.setdefault(number, []).append(position)
        unknown = by_drive.pop(-1, [])
        try:
            for number, positions in by_drive.items():
                opened = self.drives[number].open_many([keys[n] for n in positions])
                for position, block in zip(positions, opened, strict=True):
                    found[position] = block
            for position in unknown:
                found[position] = self._open_unknown(keys[position])
        except BaseException:
            for block in found:
                if block is not None:
                    os.close(block.fd)
            raise
        return found

    def _open_unknown(self, block_key: bytes) -> Block | None:
        """Open a block that the table does not have: it may be on a drive whose scan is not complete."""
        unscanned = (drive for drive in self._in_order_of(block_key) if not drive.scanned)
        return next((found for drive in unscanned if (found := drive.open(block_key)) is not None), None)

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """Record a prompt's blocks in order, from its first on, for the eviction order."""
        self.table.observe_sequence(keys, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes) -> int:
        """Apply a session's hint to the blocks of its prompt, in order; return how many took it."""
        return self.table.hint(hint, keys, tenant)

    def session_marks(self) -> list[MarksStatus]:
        """Return what the table learned from sessions."""
        return self.table.session_marks()

    def drive_of(self, block_key: bytes) -> Drive | None:
        """Return the drive that has the block, by the table; by looking where a scan is not complete."""
        (number,) = self.table.drives_of((block_key,))
        if number >= 0:
            drive = self.drives[number]
            return drive if drive.contains(block_key) else None
        unscanned = (drive for drive in self._in_order_of(block_key) if not drive.scanned)
        return next((drive for drive in unscanned if drive.contains(block_key)), None)

    def payload_len(self, block_key: bytes) -> int:
        """Return the payload length of a block on a scanned drive; 0 if it is absent."""
        return self.table.payload_len(block_key)

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`, in no order."""
        return self.table.used_since(idle_s)

    def coldest_idle_s(self) -> float:
        """Return the idle seconds of the coldest tenth of the blocks; 0: nothing is here."""
        uses = self.table.last_uses()
        if not uses:
            return 0.0
        return max(0.0, self.table.now() - heapq.nsmallest(len(uses) // 10 + 1, uses)[-1])

    @property
    def headroom_bytes(self) -> int:
        """Bytes that the drives can take before eviction starts."""
        return sum(max(0, root.headroom_bytes()) for root in self.drives)

    def largest_fit(self) -> int:
        """Return the size of the largest block that a drive can take before eviction starts."""
        return max(root.headroom_bytes() for root in self.drives)

    def mark_shared(self, block_key: bytes) -> None:
        if (root := self.drive_of(block_key)) is not None:
            root.mark_shared(block_key)

    def quarantine(self, block_key: bytes) -> bool:
        return sum(root.quarantine(block_key) for root in self.drives) > 0  # all of them, not any

    def delete(self, block_key: bytes) -> bool:
        return sum(root.delete(block_key) for root in self.drives) > 0

    def peek(self, block_key: bytes) -> Block | None:
        return next((found for one in self._in_order_of(block_key) if (found := one.peek(block_key)) is not None), None)

    def purge(self, keys: Sequence[bytes]) -> int:
        return sum(root.purge(keys) for root in self.drives)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return sum(root.purge_quarantine(doomed) for root in self.drives)

    def usage(self) -> Usage:
        each = [root.usage() for root in self.drives]
        return Usage(*(sum(column) for column in zip(*each, strict=True)))

    def tenants(self) -> dict[bytes, TenantUsage]:
        """Usage by tenant tag, where blocks are attributed to tenants; else empty."""
        return self.table.tenants()

    @property
    def settled(self) -> bool:
        """False while the table does not follow the last `reconfigure` yet."""
        return self.node.settled

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks, which are evicted last."""
        return self.table.pinned_bytes

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

    def _in_order_of(self, block_key: bytes) -> Sequence[Drive]:
        """Return the drives, the most likely one for this block first."""
        (number,) = self.table.drives_of((block_key,))
        first = self.drives[number] if number >= 0 else self._home(block_key)
        return (first, *(drive for drive in self.drives if drive is not first))

    def _target(self, block_key: bytes, payload_len: int) -> Drive:
        """Return the drive for a new block: its own; the emptiest one while that has no room or does not work."""
        home = self._home(block_key)
        if len(self.drives) == 1 or home.has_room(payload_len):
            return home
        others = [drive for drive in self.drives if drive.has_room(payload_len)]
        if not others and home.health.fenced:
            others = [drive for drive in self.drives if not drive.health.fenced]
        return min(others, key=Drive.fill_ratio, default=home)

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        return self._target(block_key, payload_len).begin_write(block_key, payload_len)

    def record_opened(self, keys: Sequence[bytes], tenant: bytes, *, again: bool = False) -> None:
        for drive in self.drives:
            drive.record_opened(keys, tenant, again=again)

    def held_bytes(self) -> dict[bytes, int]:
        """Return bytes of removed blocks that pods keep open, by the tag of the tenants that opened them."""
        found: Counter[bytes] = Counter()
        for drive in self.drives:
            found.update(drive.held.by_tenant())
        return dict(found)

    def holds_too_much(self, tenant: bytes) -> bool:
        return any(drive.holds_too_much(tenant) for drive in self.drives)

    def require_room(self, block_key: bytes, payload_len: int) -> None:
        """Raise TierFullError if the drives cannot store this length now. Evicts nothing."""
        self._target(block_key, payload_len).require_room(block_key, payload_len)

    def import_block(
        self, block_key: bytes, payload_len: int, header: BlockHeader, write: Callable[[int], None]
    ) -> bool:
        """Store a block that `write` writes into the given file. See BlockWriter.import_block."""
        if self.contains(block_key):
            return False
        return self._target(block_key, payload_len).import_block(block_key, payload_len, header, write)


def open_local(
    tiers: Sequence[LocalTier],
    cache: CacheConfig,
    pool_uid: str,
    *,
    tenants: TenantsOf = dict,
    hints_percent: int = quota.NO_HINTS,
    read_paths: dict[str, str] | None = None,
    events: BlockEvents | None = None,
    read_headers: bool = False,
    max_blocks: int = _MAX_BLOCKS,
) -> LocalStore:
    """The store of a pool's local tiers. `read_paths`: tier path to the same directory mounted read-only.

    `tenants()` gives the tenants for which something else holds. `hints_percent`: see CapacityLimits. `read_headers`:
    the scan reads block headers, for BlockStored. `max_blocks`: of the node, whatever their size.
    """
    roots: list[Drive] = []
    limits = _node_limits(tiers, cache, tenants, hints_percent, max_blocks)
    node = NodeEviction(NodeTable(limits, _order(cache)))
    try:
        for tier in tiers:
            read_path = (read_paths or {}).get(tier.path)
            roots.append(
                Drive(
                    tier.name,
                    tier.path,
                    _drive_limits(tier, cache),
                    pool_uid=pool_uid,
                    events=events,
                    node=node,
                    settings=DriveSettings(
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
    return LocalStore(roots, events, max_blocks=max_blocks)


def _order(cache: CacheConfig) -> EvictionConfig:
    return EvictionConfig(cache.eviction_policy, cache.pinned_percent, cache.pinned_min_uses)


def _drive_limits(tier: LocalTier, cache: CacheConfig) -> quota.CapacityLimits:
    return quota.CapacityLimits(
        tier.capacity_bytes,
        cache.high_watermark,
        cache.low_watermark,
        _MAX_BLOCKS,
        tier.reserve_free_bytes,
        tier.reserve_free_percent,
    )


def _node_limits(
    tiers: Sequence[LocalTier], cache: CacheConfig, tenants: TenantsOf, hints_percent: int, max_blocks: int
) -> quota.CapacityLimits:
    return quota.CapacityLimits(
        sum(tier.capacity_bytes for tier in tiers),
        cache.high_watermark,
        cache.low_watermark,
        max_blocks,
        tenant_bytes=cache.tenant_quota_bytes,
        idle_s=cache.idle_ttl_s,
        max_age_s=cache.max_age_s,
        tenants=tenants(),
        hints_percent=hints_percent if cache.eviction_policy == "PrefixAware" else quota.NO_HINTS,
    )
