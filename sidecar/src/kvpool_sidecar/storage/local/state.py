"""State that the parts of a drive share, and the few calls that all of them need."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError
from kvpool.protocol.block import HEADER_BYTES, decode_header
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import BlockEvents, DriveIncident
from kvpool_sidecar.eviction import Entry, EvictionConfig, decode_uses
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.local.health import DriveHealth
from kvpool_sidecar.storage.local.held import HeldFiles
from kvpool_sidecar.storage.scan import prune
from kvpool_sidecar.system import filesystem
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction import EvictionPolicy
    from kvpool_sidecar.storage.base import WriteTransaction
    from kvpool_sidecar.storage.local.directory import TierDirectory
    from kvpool_sidecar.storage.local.node_table import NodeTable
    from kvpool_sidecar.tenancy import limits as quota

__all__ = ["DriveSettings", "DriveState"]

log = logging.getLogger(__name__)

_KEPT_IN_QUARANTINE = 8
_MAX_DOOMED = 1 << 17  # of a drive that does not work; further files are found by the next scan
_PAGE = 4096
_DRIVE_ERRORS = {errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EUCLEAN}


@dataclass(frozen=True)
class DriveSettings:
    """Settings of one drive that do not change while it is open, and its initial eviction order."""

    order: EvictionConfig = field(default_factory=EvictionConfig)
    read_path: str | None = None  # the same directory mounted read-only: what readers get is opened there
    use_tmpfile: bool = True  # write to unnamed files where the file system has them
    dedicated: str = "Ignore"  # whether the tier needs its own file system: Require, Prefer or Ignore
    node_files: tuple[str, ...] = filesystem.NODE_FILES  # paths on the node's own file system
    clock: Callable[[], float] | None = None  # Unix seconds; None: the system's, made monotonic
    pending_max_age_s: float = 60.0  # unfinished writes are aborted after this time
    read_headers: bool = False  # the scan reads each block's header, for BlockStored


class DriveState:
    """Shared by reader, remover, space manager and scanner of one drive.

    `lock`, of the node's table, guards `limits`, `walked`, `pending`, `pending_bytes`, `quarantine_bytes`, `doomed` and
    `doomed_bytes`.
    """

    def __init__(
        self,
        name: str,
        directory: TierDirectory,
        limits: quota.CapacityLimits,
        events: BlockEvents,
        settings: DriveSettings,
        table: NodeTable,
    ) -> None:
        self.name = name
        self.directory = directory
        self.events = events
        self.settings = settings
        self.health = DriveHealth(name, directory.probe)
        self.held = HeldFiles()
        self.table = table
        self.lock = table.lock
        self.due = threading.Event()  # maintenance has work to do
        self.limits = limits
        self.pending: set[WriteTransaction] = set()
        self.pending_bytes = 0
        self.quarantine_bytes = 0
        self.doomed: deque[tuple[bytes, int]] = deque()  # key and size of victims that are not unlinked yet
        self.doomed_bytes = 0
        self.available_bytes: int | None = None  # what blocks may take of the file system, as last measured
        self.walked = False  # the scan has seen all files; the table is not in order yet
        self.scan_done = threading.Event()
        self.closed = False
        self.number = table.join(self)

    @property
    def policy(self) -> EvictionPolicy:
        """The order of the node's blocks. The lock is held."""
        return self.table.policy

    def get(self, block_key: bytes) -> Entry | None:
        """Return the entry of a block on this drive. The lock is held."""
        entry = self.policy.get(block_key)
        return entry if entry is not None and entry.drive == self.number else None

    def discard(self, block_key: bytes) -> bool:
        """Remove a block of this drive from the table; False if it is not there. The lock is held."""
        return self.get(block_key) is not None and self.policy.discard(block_key)

    def doom(self, victims: Iterable[tuple[bytes, Entry]]) -> None:
        """Have files unlinked by the next maintenance, due now; they are out of the table. The lock is held."""
        for key, entry in victims:
            if len(self.doomed) < _MAX_DOOMED:
                self.doomed.append((key, entry.size))
                self.doomed_bytes += entry.size
        self.due.set()

    @property
    def scanned(self) -> bool:
        """True once the table has all blocks of the drive."""
        return self.scan_done.is_set()

    @property
    def is_usable(self) -> bool:
        """True if blocks can be stored and removed."""
        return self.scanned and not self.health.fenced

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks and quarantined blocks. The lock is held."""
        return self.policy.on_drive(self.number).total_bytes + self.quarantine_bytes

    @property
    def room_bytes(self) -> int:
        """The capacity; less where the file system is smaller, so that another drive's blocks go as well."""
        available, limits = self.available_bytes, self.limits
        if available is None or len(self.table.drives) == 1:
            return limits.capacity
        return max(0, min(limits.capacity, available * 100 // max(1, limits.high_percent)))

    @property
    def reads_headers(self) -> bool:
        """True if the table needs fields of the blocks' headers."""
        limits = self.table.limits
        return self.settings.read_headers or limits.by_tenant or limits.by_age

    def record_error(self, error: OSError) -> None:
        """Count an error of the drive itself; several within a short time fence the drive."""
        if error.errno not in _DRIVE_ERRORS:
            return
        self.events.emit(DriveIncident("io_error", 1))
        log.warning("tier %s: %s", self.name, error.strerror)
        self.health.record_error(error)

    def unlink(self, block_key: bytes) -> bool:
        """Unlink the block's file. False if that fails."""
        try:
            self.held.unlink(block_key, names.block_path(block_key), self.directory.blocks)
        except OSError as e:
            self.record_error(e)
            return False
        return True

    def header_of(self, block_key: bytes) -> BlockHeader | None:
        """Read the header of a block from an earlier process; None if it is unreadable, which its reader detects."""
        try:
            fd = safefs.open_beneath(self.directory.blocks, names.block_path(block_key), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return decode_header(blockfile.read_start(fd))
        except (CorruptBlockError, OSError):
            return None
        finally:
            os.close(fd)

    def entry_of(self, info: os.stat_result, header: BlockHeader | None = None) -> Entry:
        """Return the table entry of a block's file."""
        size = max(info.st_blocks * 512, _PAGE)
        payload_len = info.st_size - HEADER_BYTES
        uses = decode_uses(info.st_mtime_ns)
        if header is None:
            return Entry(size, payload_len, info.st_mtime, uses, drive=self.number)
        created = min(header.created_ms / 1000, info.st_mtime)
        return Entry(size, payload_len, info.st_mtime, uses, header.tenant_tag, created, self.number)

    def prune_quarantine(self) -> None:
        """Keep the newest few quarantined blocks and count their bytes."""
        kept = prune(self.directory.quarantined, _KEPT_IN_QUARANTINE)
        with self.lock:
            self.quarantine_bytes = kept
