"""One directory on one drive of this node, as a store with its own capacity. The node's table decides what goes."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockEvents, BlockReplicated
from kvpool_sidecar.storage.base import Block, Store, Usage, WriteTransaction
from kvpool_sidecar.storage.local.directory import TierDirectory
from kvpool_sidecar.storage.local.node_eviction import NodeEviction
from kvpool_sidecar.storage.local.node_table import NodeTable
from kvpool_sidecar.storage.local.reader import BlockReader
from kvpool_sidecar.storage.local.removal import BlockRemover
from kvpool_sidecar.storage.local.scanner import Scanner
from kvpool_sidecar.storage.local.space import SpaceManager
from kvpool_sidecar.storage.local.state import DriveSettings, DriveState
from kvpool_sidecar.storage.local.writer import BLOCK_MODE, BlockWriter, file_space
from kvpool_sidecar.system import filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from threading import Event

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction import EvictionConfig
    from kvpool_sidecar.storage.local.endurance import DriveEndurance
    from kvpool_sidecar.storage.local.health import DriveHealth
    from kvpool_sidecar.storage.local.held import HeldFiles
    from kvpool_sidecar.storage.tombstones import PurgeTombstones
    from kvpool_sidecar.tenancy import limits as quota

__all__ = ["Drive"]

log = logging.getLogger(__name__)

_SHARED_MODE = BLOCK_MODE | stat.S_ISVTX
_DEFAULTS = DriveSettings()


class Drive(Store):
    """See Store. `scan` must run once. The directory is created if it is missing.

    `path` must belong to this user and be writable by no other user. ConfigError if the directory cannot be used
    (kvpool_sidecar.storage.local.directory). `node`: eviction of the node, shared by its drives; without it the drive
    is alone on its node.
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
        node: NodeEviction | None = None,
    ) -> None:
        self.name = name
        directory = TierDirectory(name, path, pool_uid, read_path=settings.read_path, use_tmpfile=settings.use_tmpfile)
        try:
            self.shares_filesystem = _check_dedicated(name, path, directory, settings)
        except ConfigError:
            directory.close()
            raise
        self.generation = directory.pool_id.generation
        self.node = node or NodeEviction(NodeTable(limits, settings.order, settings.clock))
        self._state = DriveState(name, directory, limits, events or BlockEvents(), settings, self.node.table)
        self._remover = BlockRemover(self._state)
        self._scanner = Scanner(self._state)
        self._reader = BlockReader(self._state, self._remover, self._scanner)
        self._space = SpaceManager(self._state, self.node, self._remover)
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

    def record_opened(self, keys: Sequence[bytes], tenant: bytes, *, again: bool = False) -> None:
        self.held.record_opened(self._reader.record_uses(keys) if again else keys, tenant)

    def holds_too_much(self, tenant: bytes) -> bool:
        return self._space.holds_too_much(tenant)

    @property
    def due(self) -> Event:
        """Set when `maintain` has work to do before its next period."""
        return self._state.due

    @property
    def scanned(self) -> bool:
        """True once the startup scan is complete."""
        return self._state.scanned

    @property
    def settled(self) -> bool:
        """False while the node does not follow the last `reconfigure` yet."""
        return self.node.settled

    def set_tombstones(self, tombstones: PurgeTombstones) -> None:
        super().set_tombstones(tombstones)
        self._writer.tombstones = tombstones

    def set_limits(self, limits: quota.CapacityLimits) -> None:
        """Apply another capacity and reserve. Returns immediately; the next `maintain`, due now, enforces them."""
        self._space.reconfigure(limits)

    def reconfigure(self, limits: quota.CapacityLimits, order: EvictionConfig) -> None:
        """Apply other limits and another order to a drive that is alone on its node; see `set_limits`."""
        self.node.reconfigure(limits, order)
        self.set_limits(limits)

    def scan(self) -> None:
        """Fill the table with the blocks found; remove other files. Reads are served meanwhile, writes wait."""
        if self._scanner.scan():
            self.node.sort()
        self._scanner.end()

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
        self.node.maintain()
        self._space.maintain()

    def has_room(self, payload_len: int) -> bool:
        """Return whether a block of this length fits below the high watermark, as far as is known without I/O."""
        return self._space.has_room(file_space(payload_len))

    def fill_ratio(self) -> float:
        """Return the share of the capacity that is occupied."""
        return self._space.fill_ratio()

    def headroom_bytes(self) -> int:
        """Return the bytes that fit below the low watermark and the file system's reserve; 0 or less: none."""
        return self._space.headroom_bytes()

    def peek(self, block_key: bytes) -> Block | None:
        fd = self.peek_fd(block_key)
        return None if fd < 0 else Block(fd, max(0, os.fstat(fd).st_size - HEADER_BYTES))

    def payload_len(self, block_key: bytes) -> int:
        """As the table knows it; 0 if the block is not here."""
        with self._state.lock:
            entry = self._state.get(block_key)
        return 0 if entry is None or self._state.health.fenced else entry.payload_len

    def usage(self) -> Usage:
        with self._state.lock:
            blocks = self._state.policy.on_drive(self._state.number).blocks
            return Usage(self._state.limits.capacity, self._state.used_bytes, blocks)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        for some in self._state.table.entries():
            for key, entry in some:
                if entry.drive == self._state.number:
                    yield key, entry.payload_len

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
        text = "tier %s is on the node's own file system: reserveFree is all that keeps it from filling [KVP0602]"
        log.warning(text, name)
    return shares
