"""State that the parts of a drive share, and the few calls that all of them need."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks.events import BlockEvents, DriveIncident
from kvpool_sidecar.eviction import Entry, EvictionConfig, decode_uses
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.local.health import DriveHealth
from kvpool_sidecar.storage.local.held import HeldFiles
from kvpool_sidecar.storage.scan import prune
from kvpool_sidecar.system import filesystem
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.base import WriteTransaction
    from kvpool_sidecar.storage.local.directory import TierDirectory
    from kvpool_sidecar.tenancy import limits as quota

__all__ = ["DriveSettings", "DriveState", "PendingCopies", "entry_of"]

log = logging.getLogger(__name__)

_KEPT_IN_QUARANTINE = 8
_PAGE = 4096
_DRIVE_ERRORS = {errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EUCLEAN}


class PendingCopies(Protocol):
    """Blocks whose copy to the shared tier is pending (kvpool_sidecar.replication.write_back)."""

    def dirty(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these blocks should be copied, if possible, before they are evicted."""

    def expedite(self, keys: Sequence[bytes]) -> None:
        """Copy these blocks next: they are evicted once they are copied."""


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

    `lock` guards `policy`, `limits`, `config`, `pending`, `pending_bytes`, `quarantine_bytes` and `over_quota`. It is
    held for table operations only, never during I/O or while an event is emitted.
    """

    def __init__(
        self,
        name: str,
        directory: TierDirectory,
        limits: quota.CapacityLimits,
        events: BlockEvents,
        settings: DriveSettings,
    ) -> None:
        self.name = name
        self.directory = directory
        self.events = events
        self.settings = settings
        self.health = DriveHealth(name, directory.probe)
        self.held = HeldFiles()
        self.pending_copies: PendingCopies | None = None
        self.lock = threading.Lock()
        self.limits = limits
        self.config = settings.order
        self.policy = evict.create(self.config, limits)
        self.pending: set[WriteTransaction] = set()
        self.pending_bytes = 0
        self.quarantine_bytes = 0
        self.over_quota: Counter[bytes] = Counter()
        self.scan_done = threading.Event()
        self.closed = False
        self._started_at, self._started = time.time(), time.monotonic()

    @property
    def scanned(self) -> bool:
        """True once the policy's table is complete."""
        return self.scan_done.is_set()

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks and quarantined blocks. The lock is held."""
        return self.policy.total_bytes + self.quarantine_bytes

    @property
    def reads_headers(self) -> bool:
        """True if the table needs fields of the blocks' headers."""
        return self.settings.read_headers or self.limits.by_tenant or self.limits.by_age

    def now(self) -> float:
        """Return Unix seconds that advance evenly, also when the node's clock is set."""
        clock = self.settings.clock
        return clock() if clock is not None else self._started_at + time.monotonic() - self._started

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
            return block.decode_header(os.pread(fd, HEADER_BYTES, 0))
        except (CorruptBlockError, OSError):
            return None
        finally:
            os.close(fd)

    def prune_quarantine(self) -> None:
        """Keep the newest few quarantined blocks and count their bytes."""
        kept = prune(self.directory.quarantined, _KEPT_IN_QUARANTINE)
        with self.lock:
            self.quarantine_bytes = kept


def entry_of(info: os.stat_result, header: BlockHeader | None = None) -> Entry:
    """Return the table entry of a block's file."""
    tenant = header.tenant_tag if header is not None else b""
    size = max(info.st_blocks * 512, _PAGE)
    created = min(header.created_ms / 1000, info.st_mtime) if header is not None else 0.0
    return Entry(size, info.st_size - HEADER_BYTES, info.st_mtime, decode_uses(info.st_mtime_ns), tenant, created)
