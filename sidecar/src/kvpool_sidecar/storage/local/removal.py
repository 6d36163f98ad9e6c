"""Removal of a drive's blocks: deletion, quarantine, and files that are no blocks."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from kvpool_sidecar.blocks.events import BlocksRemoved, DriveIncident
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.scan import purge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["BlockRemover"]

log = logging.getLogger(__name__)


_BATCH = 256


class BlockRemover:
    """Removes blocks from table and directory, and emits their removal. Thread-safe."""

    def __init__(self, state: DriveState) -> None:
        self._state = state

    def delete(self, block_key: bytes) -> bool:
        """See Store.delete."""
        with self._state.lock:
            known = self._state.discard(block_key)
        return self._state.unlink(block_key) or known

    def remove_doomed(self) -> None:
        """Unlink the victims of evictions; those that cannot be unlinked now stay for the next call."""
        state = self._state
        failed: list[tuple[bytes, int]] = []
        for _ in range(len(state.doomed) // _BATCH + 1):
            with state.lock:
                some = [state.doomed.popleft() for _ in range(min(_BATCH, len(state.doomed)))]
                state.doomed_bytes -= sum(size for _, size in some)
                stored_again = {key for key, _ in some if state.get(key) is not None}
            for number, (key, size) in enumerate(some):
                if state.closed or state.health.fenced:
                    failed += some[number:]
                    break
                if key not in stored_again and not self._unlink_victim(key):
                    failed.append((key, size))
        if failed:
            with state.lock:
                state.doomed.extend(failed)
                state.doomed_bytes += sum(size for _, size in failed)

    def _unlink_victim(self, block_key: bytes) -> bool:
        try:
            with self._state.health:
                self._state.held.unlink(block_key, names.block_path(block_key), self._state.directory.blocks)
        except FileNotFoundError:
            return True
        except OSError as e:
            self._state.record_error(e)
            return False
        return True

    def purge(self, keys: Sequence[bytes]) -> int:
        """See Store.purge."""
        gone = [key for key in keys if self.delete(key)]
        if gone:
            self._state.events.emit(DriveIncident("purged", len(gone)))
            self._state.events.emit(BlocksRemoved(gone, "purged"))
        return len(gone)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        """See Store.purge_quarantine."""
        removed = purge(self._state.directory.quarantined, doomed)
        self._state.prune_quarantine()
        return removed

    def quarantine(self, block_key: bytes) -> bool:
        """See Store.quarantine."""
        name = block_key.hex()
        with self._state.lock:
            self._state.discard(block_key)
        try:
            directory = self._state.directory
            os.rename(names.block_path(block_key), name, src_dir_fd=directory.blocks, dst_dir_fd=directory.quarantined)
        except FileNotFoundError:
            return False
        except OSError as e:
            self._state.record_error(e)
            self._state.unlink(block_key)
        else:
            self._state.prune_quarantine()
        log.warning("block %s of tier %s is corrupt: quarantined", name[:16], self._state.name)
        self._state.events.emit(DriveIncident("quarantined", 1))
        self._state.events.emit(BlocksRemoved([block_key], "quarantined"))
        return True

    def forget_missing(self, block_key: bytes) -> None:
        """Drop the table entry of a block whose file is missing.

        A writer adds the entry after it links the file, so the file is checked once more under the lock.
        """
        with self._state.lock:
            if self._state.get(block_key) is None:
                return
            with contextlib.suppress(OSError):
                os.stat(names.block_path(block_key), dir_fd=self._state.directory.blocks, follow_symlinks=False)
                return
            self._state.discard(block_key)
        self._state.events.emit(BlocksRemoved([block_key]))

    def remove_non_block(self, block_key: bytes) -> None:
        """Remove a link, directory or empty file that stands where a block should be."""
        with self._state.lock:
            known = self._state.discard(block_key)
        if self._state.unlink(block_key):
            self._state.events.emit(DriveIncident("junk", 1))
        if known:
            self._state.events.emit(BlocksRemoved([block_key]))
