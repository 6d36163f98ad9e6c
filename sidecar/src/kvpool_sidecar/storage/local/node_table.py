"""The table of a node's blocks: one order of eviction over all its drives, which only hold the blocks."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks.events import BlocksEvicted, BlocksRemoved, DriveIncident
from kvpool_sidecar.eviction import PerTenant, PrefixAware
from kvpool_sidecar.eviction.session_marks import MarksStatus
from kvpool_sidecar.storage.base import TenantUsage

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.eviction import Entry, EvictionConfig, EvictionPolicy
    from kvpool_sidecar.eviction.session_marks import SessionHint
    from kvpool_sidecar.storage.local.health import DriveHealth
    from kvpool_sidecar.tenancy import limits as quota

__all__ = ["NodeTable", "PendingCopies", "TableDrive"]


_BATCH = 256


class PendingCopies(Protocol):
    """Blocks whose copy to the shared tier is pending (kvpool_sidecar.replication.write_back)."""

    def dirty(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these blocks should be copied, if possible, before they are evicted."""

    def expedite(self, keys: Sequence[bytes]) -> None:
        """Copy these blocks next: they are evicted once they are copied."""


class TableDrive(Protocol):
    """A drive as the node's table sees it. The table's lock is held, except for `header_of`."""

    events: BlockEvents
    health: DriveHealth
    pending_bytes: int
    walked: bool
    doomed: deque[tuple[bytes, int]]

    @property
    def is_usable(self) -> bool:
        """True if blocks can be stored and removed."""

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks and quarantined blocks."""

    @property
    def room_bytes(self) -> int:
        """Bytes that blocks may take."""

    @property
    def reads_headers(self) -> bool:
        """True if the table needs fields of the blocks' headers."""

    def header_of(self, block_key: bytes) -> BlockHeader | None:
        """Read the header of a block; None if it is unreadable."""

    def doom(self, victims: Iterable[tuple[bytes, Entry]]) -> None:
        """Have files unlinked by the next maintenance; they are out of the table."""


class NodeTable:
    """Shared by the drives of a node. `limits` are of all drives together.

    `lock` guards `policy`, `limits`, `config`, `over_quota` and what `DriveState` names. It is held for table
    operations only, never during I/O or while an event is emitted.
    """

    def __init__(
        self, limits: quota.CapacityLimits, config: EvictionConfig, clock: Callable[[], float] | None = None
    ) -> None:
        self.lock = threading.Lock()
        self.limits = limits
        self.config = config
        self.policy = evict.create(config, limits)
        self.over_quota: Counter[bytes] = Counter()
        self.pending_copies: PendingCopies | None = None
        self.drives: list[TableDrive] = []
        self._clock = clock
        self._started_at, self._started = time.time(), time.monotonic()

    def now(self) -> float:
        """Return Unix seconds that advance evenly, also when the node's clock is set."""
        if self._clock is not None:
            return self._clock()
        return self._started_at + time.monotonic() - self._started

    def join(self, drive: TableDrive) -> int:
        """Add a drive; return its number, which `Entry.drive` holds."""
        with self.lock:
            self.drives.append(drive)
            return len(self.drives) - 1

    def drives_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the number of each block's drive; -1 for blocks that the table does not have."""
        with self.lock:
            return [self.policy.drive_of(key) for key in keys]

    def payload_len(self, block_key: bytes) -> int:
        """Return the payload length; 0 if the block is not here or its drive is fenced."""
        with self.lock:
            entry = self.policy.get(block_key)
        return 0 if entry is None or self.drives[entry.drive].health.fenced else entry.payload_len

    def entries(self) -> Iterator[list[tuple[bytes, Entry]]]:
        """Yield all blocks in batches, so that the lock is never held for long; concurrent changes may be missed."""
        policy = self.policy
        for slots in self._batches(policy):
            with self.lock:
                some = policy.entries_in(slots)
                if policy is not self.policy:
                    some = [(key, found) for key, _ in some if (found := self.policy.get(key)) is not None]
            yield some

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`.

        The last use may be `persist_every_s` too early.
        """
        now, policy = self.now(), self.policy
        since = now - idle_s - policy.persist_every_s
        found: list[tuple[bytes, int, float]] = []
        for slots in self._batches(policy):
            with self.lock:
                recent = [slot for used, slot in policy.last_uses_in(slots) if used >= since]
                some = policy.entries_in(recent)
            found += [(key, entry.payload_len, max(0.0, now - entry.persisted_at)) for key, entry in some]
        return found

    def last_uses(self) -> array[float]:
        """Return the last use of each block, Unix seconds, unordered."""
        policy, found = self.policy, array("d")
        for slots in self._batches(policy):
            with self.lock:
                found.extend([used for used, _ in policy.last_uses_in(slots)])
        return found

    @staticmethod
    def _batches(policy: EvictionPolicy) -> Iterator[range]:
        """Yield the places of a table's blocks, a few at a time, so that the lock is never held for long."""
        start = 0
        while start < (end := policy.slots):
            yield range(start, min(start + _BATCH, end))
            start += _BATCH

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that go last, because they are used so often."""
        with self.lock:
            return self.policy.pinned_bytes

    def tenants(self) -> dict[bytes, TenantUsage]:
        """Usage by tenant tag, where blocks are attributed to tenants; else empty."""
        with self.lock:
            tables = self.policy.policies() if isinstance(self.policy, PerTenant) else {}
            return {
                tag: TenantUsage(table.total_bytes, len(table), self.over_quota[tag]) for tag, table in tables.items()
            }

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """Record a prompt's blocks in order, from its first on."""
        with self.lock:
            self.policy.observe_sequence(keys, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes) -> int:
        """Apply a session's hint to the blocks of its prompt, in order; return how many took it."""
        with self.lock:
            return self.policy.hint(hint, keys, tenant)

    def session_marks(self) -> list[MarksStatus]:
        """What was learned from sessions: of each tenant, or of all together."""
        with self.lock:
            tables = self.policy.policies().values() if isinstance(self.policy, PerTenant) else (self.policy,)
            return [MarksStatus.of(table.marks) for table in tables if table.marks is not None]

    @property
    def order_trust(self) -> float:
        """How far the learned order decides: 1 entirely, 0 not at all, as LRU is better; the least of all tenants."""
        with self.lock:
            tables = self.policy.policies().values() if isinstance(self.policy, PerTenant) else (self.policy,)
            return min((table.guard.trust for table in tables if isinstance(table, PrefixAware)), default=1.0)

    def doom(self, victims: Sequence[tuple[bytes, Entry]], cause: str) -> int:
        """Hand victims, which are out of the table, to their drives for removal; return how many.

        `cause`: see BlocksEvicted. They count as removed immediately: a drive that hangs delays no other.
        """
        by_drive: dict[int, list[tuple[bytes, Entry]]] = {}
        for victim in victims:
            by_drive.setdefault(victim[1].drive, []).append(victim)
        for number, some in by_drive.items():
            drive = self.drives[number]
            with self.lock:
                drive.doom(some)
            drive.events.emit(DriveIncident("evicted", len(some)))
            drive.events.emit(BlocksEvicted(cause, len(some)))
            drive.events.emit(BlocksRemoved([key for key, _ in some], cause))
        return len(victims)
