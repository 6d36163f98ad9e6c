"""One directory on one drive of this node, as a store with its own capacity and eviction table."""

from __future__ import annotations

import heapq
import logging
import os
import stat
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockEvents, BlockReplicated
from kvpool_sidecar.eviction import EvictionConfig, PerTenant
from kvpool_sidecar.eviction.session_marks import MarksStatus
from kvpool_sidecar.storage.base import Block, Store, TenantUsage, Usage, WriteTransaction
from kvpool_sidecar.storage.local.directory import TierDirectory
from kvpool_sidecar.storage.local.reader import BlockReader
from kvpool_sidecar.storage.local.removal import BlockRemover
from kvpool_sidecar.storage.local.scanner import Scanner
from kvpool_sidecar.storage.local.space import SpaceManager
from kvpool_sidecar.storage.local.state import DriveSettings, DriveState
from kvpool_sidecar.storage.local.writer import BLOCK_MODE, BlockWriter
from kvpool_sidecar.system import filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from threading import Event

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction.session_marks import SessionHint
    from kvpool_sidecar.storage.local.endurance import DriveEndurance
    from kvpool_sidecar.storage.local.health import DriveHealth
    from kvpool_sidecar.storage.local.held import HeldFiles
    from kvpool_sidecar.storage.local.state import PendingCopies
    from kvpool_sidecar.storage.tombstones import PurgeTombstones
    from kvpool_sidecar.tenancy import limits as quota

__all__ = ["Drive"]

log = logging.getLogger(__name__)

_SHARED_MODE = BLOCK_MODE | stat.S_ISVTX
_DEFAULTS = DriveSettings()


class Drive(Store):
    """See Store. `scan` must run once. The directory is created if it is missing.

    `path` must belong to this user and be writable by no other user. ConfigError if the directory cannot be used
    (kvpool_sidecar.storage.local.directory).
    """

    def __init__(
        self,
        name: str,
        path: str,
        limits: quota.CapacityLimits,
        *,
        pool_uid: str,
        events: BlockEvents | None = None,
        settings: DriveSettings = _DEFAULTS,
    ) -> None:
        self.name = name
        directory = TierDirectory(name, path, pool_uid, read_path=settings.read_path, use_tmpfile=settings.use_tmpfile)
        try:
            self.shares_filesystem = _check_dedicated(name, path, directory, settings)
        except ConfigError:
            directory.close()
            raise
        self.generation = directory.pool_id.generation
        self._state = DriveState(name, directory, limits, events or BlockEvents(), settings)
        self._remover = BlockRemover(self._state)
        self._scanner = Scanner(self._state)
        self._reader = BlockReader(self._state, self._remover, self._scanner)
        self._space = SpaceManager(self._state)
        self._writer = BlockWriter(self._state, self._space)

    @property
    def health(self) -> DriveHealth:
        """Fencing of the drive."""
        return self._state.health

    @property
    def endurance(self) -> DriveEndurance:
        """Bytes written to the drive."""
        return self._writer.endurance

    @property
    def held(self) -> HeldFiles:
        """Files of removed blocks that pods keep open."""
        return self._state.held

    def holds_too_much(self, tenant: bytes) -> bool:
        return self._space.holds_too_much(tenant)

    @property
    def due(self) -> Event:
        """Set when `maintain` has work to do before its next period."""
        return self._space.due

    @property
    def scanned(self) -> bool:
        """True once the startup scan is complete."""
        return self._state.scanned

    @property
    def settled(self) -> bool:
        """False while the drive does not follow the last `reconfigure` yet."""
        return self._space.settled

    def set_tombstones(self, tombstones: PurgeTombstones) -> None:
        super().set_tombstones(tombstones)
        self._writer.tombstones = tombstones

    def set_pending_copies(self, pending_copies: PendingCopies) -> None:
        """Set the blocks that eviction copies first."""
        self._state.pending_copies = pending_copies

    def reconfigure(self, limits: quota.CapacityLimits, order: EvictionConfig) -> None:
        """Apply other limits and another order. Returns immediately; the next `maintain`, due now, enforces them."""
        self._space.reconfigure(limits, order)

    def scan(self) -> None:
        """Fill the table with the blocks found; remove other files. Reads are served meanwhile, writes wait."""
        self._scanner.scan()

    def contains(self, block_key: bytes) -> bool:
        return self._reader.contains(block_key)

    def open(self, block_key: bytes) -> Block | None:
        return self._reader.open_many((block_key,))[0]

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        return self._reader.open_many(keys)

    def peek_fd(self, block_key: bytes) -> int:
        """Return a descriptor of the block's file, or -1. Does not record a use."""
        return self._reader.peek_fd(block_key)

    def delete(self, block_key: bytes) -> bool:
        return self._remover.delete(block_key)

    def purge(self, keys: Sequence[bytes]) -> int:
        return self._remover.purge(keys)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return self._remover.purge_quarantine(doomed)

    def quarantine(self, block_key: bytes) -> bool:
        return self._remover.quarantine(block_key)

    def maintain(self) -> None:
        self._space.maintain()

    def headroom_bytes(self) -> int:
        """Return the bytes that fit below the low watermark and the file system's reserve; 0 or less: none."""
        return self._space.headroom_bytes()

    def peek(self, block_key: bytes) -> Block | None:
        fd = self.peek_fd(block_key)
        return None if fd < 0 else Block(fd, max(0, os.fstat(fd).st_size - HEADER_BYTES))

    def payload_len(self, block_key: bytes) -> int:
        """As the table knows it; 0 if the block is not here."""
        with self._state.lock:
            entry = self._state.policy.get(block_key)
        return 0 if entry is None or self._state.health.fenced else entry.payload_len

    def used_since(self, idle_s: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and idle seconds of the blocks that were used within the last `idle_s`."""
        now = self._state.now()
        with self._state.lock:
            found = self._state.policy.used_since(now - idle_s)
        return [(key, payload_len, max(0.0, now - when)) for key, payload_len, when in found]

    def coldest_idle_s(self) -> float:
        """Seconds for which the coldest tenth of the blocks has not been used; 0: nothing is here."""
        now = self._state.now()
        with self._state.lock:
            uses = self._state.policy.last_uses()
        return max(0.0, now - heapq.nsmallest(len(uses) // 10 + 1, uses)[-1]) if uses else 0.0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of blocks that go last, because they are used so often."""
        with self._state.lock:
            return self._state.policy.pinned_bytes

    def usage(self) -> Usage:
        with self._state.lock:
            return Usage(self._state.limits.capacity, self._state.used_bytes, len(self._state.policy))

    def tenants(self) -> dict[bytes, TenantUsage]:
        """Usage by tenant tag, where blocks are attributed to tenants; else empty."""
        with self._state.lock:
            tables = self._state.policy.policies() if isinstance(self._state.policy, PerTenant) else {}
            return {
                tag: TenantUsage(table.total_bytes, len(table), self._state.over_quota[tag])
                for tag, table in tables.items()
            }

    def keys(self) -> Iterator[tuple[bytes, int]]:
        with self._state.lock:
            snapshot = list(self._state.policy)
        for key in snapshot:
            with self._state.lock:
                entry = self._state.policy.get(key)
            if entry is not None:
                yield key, entry.payload_len

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """A prompt's blocks in order, as far as this drive is their place."""
        with self._state.lock:
            self._state.policy.observe_sequence(keys, tenant)

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes) -> int:
        """Apply a session's hint to the blocks of its prompt that are here; return how many took it."""
        with self._state.lock:
            return self._state.policy.hint(hint, keys, tenant)

    def session_marks(self) -> list[MarksStatus]:
        """What the tables of this drive learned from sessions, with the drive's capacity as the unit of their rates."""
        with self._state.lock:
            policy = self._state.policy
            tables = policy.policies().values() if isinstance(policy, PerTenant) else (policy,)
            return [MarksStatus.of(table.marks) for table in tables if table.marks is not None]

    def mark_shared(self, block_key: bytes) -> None:
        """Persist the copy in the sticky bit of the file, which has no other meaning for a file."""
        fd = self.peek_fd(block_key)
        if fd < 0:
            return
        try:
            os.fchmod(fd, _SHARED_MODE)
        except OSError as e:
            self._state.record_error(e)  # it is copied once more after a restart
        finally:
            os.close(fd)
        self._state.events.emit(BlockReplicated(block_key))

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        return self._writer.begin(block_key, payload_len)

    def require_room(self, block_key: bytes, payload_len: int) -> None:
        """Raise TierFullError if a block of this length cannot be stored now. Evicts nothing."""
        self._writer.require_room(block_key, payload_len)

    def import_block(
        self, block_key: bytes, payload_len: int, header: BlockHeader, write: Callable[[int], None]
    ) -> bool:
        """Store a block that `write` writes into the given file. See BlockWriter.import_block."""
        return self._writer.import_block(block_key, payload_len, header, write)

    def close(self) -> None:
        self._state.closed = True
        with self._state.lock:
            pending = list(self._state.pending)
        for p in pending:
            p.abort()
        self._state.held.close()
        self._state.directory.close()


def _check_dedicated(name: str, path: str, directory: TierDirectory, settings: DriveSettings) -> bool:
    """Return whether the tier is on the node's own file system. ConfigError if `settings.dedicated` forbids that."""
    shares = filesystem.is_shared(directory.blocks, settings.node_files)
    if shares and settings.dedicated != "Ignore":
        filesystem.require(name, path, shared=settings.dedicated == "Require")
        log.warning("tier %s is on the node's own file system: reserveFree is all that keeps it from filling", name)
    return shares
