"""Startup scan of a drive: fills the eviction table with the blocks found and removes all other files."""

from __future__ import annotations

import logging
import os
import stat
import time
from typing import TYPE_CHECKING

from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockReplicated, BlockStored, BlockUnreplicated, DriveIncident
from kvpool_sidecar.storage.scan import remove_orphan, scan

if TYPE_CHECKING:
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["Scanner"]

log = logging.getLogger(__name__)


class Scanner:
    """Runs once per process. Reads are served meanwhile; writes wait."""

    def __init__(self, state: DriveState) -> None:
        self._state = state

    def scan(self) -> bool:
        """Walk the directory; ends early when the drive is closed. True if no other drive is still being scanned."""
        started = time.monotonic()
        for name in os.listdir(self._state.directory.tmp):
            if remove_orphan(self._state.directory.tmp, name):
                self._state.events.emit(DriveIncident("junk", 1))
        self._state.prune_quarantine()
        scan(
            self._state.directory.blocks,
            self.add_found,
            lambda: self._state.events.emit(DriveIncident("junk", 1)),
            lambda: self._state.closed,
        )
        seconds = time.monotonic() - started
        log.info("tier %s: scanned in %.2f s", self._state.name, seconds)
        with self._state.lock:
            self._state.walked = True
            return all(drive.walked or drive.health.fenced for drive in self._state.table.drives)

    def end(self) -> None:
        """Declare the table complete as far as this drive is concerned."""
        self._state.scan_done.set()
        with self._state.lock:
            blocks, used = self._state.policy.on_drive(self._state.number).blocks, self._state.used_bytes
        log.info("tier %s: %d blocks, %d bytes", self._state.name, blocks, used)

    def add_found(self, block_key: bytes, info: os.stat_result) -> None:
        """Add a block that the scan, or a reader before it, has found. `info`: of its file."""
        header = self._state.header_of(block_key) if self._state.reads_headers else None
        with self._state.lock:
            known = self._state.policy.get(block_key)
            is_new = known is None
            if is_new:
                self._state.policy.add(block_key, self._state.entry_of(info, header))
        if known is not None and known.drive != self._state.number:  # placed again while this drive was away
            self._state.unlink(block_key)
            self._state.events.emit(DriveIncident("junk", 1))
        if is_new and header is not None:
            self._state.events.emit(BlockStored(block_key, header))
        if is_new and not info.st_mode & stat.S_ISVTX:
            self._state.events.emit(BlockUnreplicated(block_key, info.st_size - HEADER_BYTES))
        elif is_new:
            self._state.events.emit(BlockReplicated(block_key))
