"""Write path of a drive: unnamed files that become blocks."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from kvpool.errors import RefusedError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import BlockStored
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.base import TransactionTarget, WriteTransaction
from kvpool_sidecar.storage.local.endurance import DriveEndurance

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.eviction import Entry
    from kvpool_sidecar.storage.local.space import SpaceManager
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["BLOCK_MODE", "BlockWriter", "file_space"]

BLOCK_MODE = 0o400
_PAGE = 4096
_SCAN_WAIT_S = 0.2


class BlockWriter(TransactionTarget):
    """Thread-safe. No pod gets a descriptor of its files: a pod's bytes come from the landing zone."""

    def __init__(self, state: DriveState, space: SpaceManager) -> None:
        self._state = state
        self._space = space
        self.endurance = DriveEndurance(state.directory.blocks)

    def require_room(self, block_key: bytes, payload_len: int) -> None:
        """Raise TierFullError if a block of this length cannot be stored now. Evicts nothing."""
        self._require_writable()
        self._space.require_room(file_space(payload_len))

    def import_block(
        self, block_key: bytes, payload_len: int, header: BlockHeader, write: Callable[[int], None]
    ) -> bool:
        """Store a block that `write` writes into the file it is given. False if the key exists.

        Raises
        ------
        TierFullError
            No space can be reserved.
        RefusedError
            The block was purged meanwhile.
        OSError
            The drive fails; other errors are those of `write`.
        """
        pending = self.begin(block_key, payload_len)
        pending.claim()
        try:
            self._fill(pending, write)
            if self.tombstones is not None and self.tombstones.rejects(header):
                raise RefusedError("the block was purged", block_key=block_key.hex())
            return self.publish(pending, header)
        finally:
            with contextlib.suppress(OSError):
                pending.close_writer()
            self.release(pending)

    def _fill(self, pending: WriteTransaction, write: Callable[[int], None]) -> None:
        try:
            with self._state.health:
                write(pending.writer)
                pending.close_writer()
        except OSError as e:
            self._state.record_error(e)
            raise

    def begin(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        """See Store.begin_write."""
        self._require_writable()
        need = file_space(payload_len)
        try:
            with self._state.health:
                self._space.reserve(need)
                pending = self._new_pending(block_key, payload_len, need)
        except OSError as e:
            self._state.record_error(e)
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TierFullError("no space left", block_key=block_key.hex(), where=self._state.name) from None
            raise
        with self._state.lock:
            self._state.pending.add(pending)
        return pending

    def _new_pending(self, block_key: bytes, payload_len: int, need: int) -> WriteTransaction:
        fds: list[int] = []
        name = ""
        try:
            fd, name = self._state.directory.create_temporary()
            fds.append(fd)
            os.posix_fallocate(fd, 0, HEADER_BYTES + payload_len)
            fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            for opened in fds:
                os.close(opened)
            if name:
                os.unlink(name, dir_fd=self._state.directory.tmp)
            with self._state.lock:
                self._state.pending_bytes -= need
            raise
        return WriteTransaction(self, block_key, payload_len, fds[0], fds[1], reserved=need, name=name)

    def seal(self, pending: WriteTransaction) -> None:
        blockfile.acquire_read_lease(pending.reader)

    def fill_checksum(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        blockfile.release_read_lease(pending.reader)  # our own writing would break the lease
        done = super().fill_checksum(pending, header)
        blockfile.acquire_read_lease(pending.reader)
        return done

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        self.endurance.written.add(pending.file_bytes)
        with self._state.health:
            try:
                os.fchmod(pending.reader, BLOCK_MODE)
                if not self._state.directory.link(pending.reader, pending.name, names.block_path(pending.block_key)):
                    return False
            except OSError as e:
                self._state.record_error(e)
                raise
            info = os.fstat(pending.reader)
        if not self._add(pending.block_key, self._state.entry_of(info, header)):
            self._state.unlink(pending.block_key)
            return False
        self._state.events.emit(BlockStored(pending.block_key, header))
        self._space.enforce_quota(header.tenant_tag)
        return True

    def _add(self, block_key: bytes, entry: Entry) -> bool:
        """Add a block to the table. False if another drive, which works, has it from another writer."""
        table = self._state.table
        with self._state.lock:
            known = table.policy.get(block_key)
            if known is not None and known.drive != self._state.number:
                other = table.drives[known.drive]
                if not other.health.fenced:
                    return False
                other.doom([(block_key, known)])
            table.policy.add(block_key, entry)
        return True

    def release(self, pending: WriteTransaction) -> None:
        with self._state.lock:
            if pending in self._state.pending:
                self._state.pending.discard(pending)
                self._state.pending_bytes -= pending.reserved
        if pending.name:
            with contextlib.suppress(OSError):
                os.unlink(pending.name, dir_fd=self._state.directory.tmp)
        super().release(pending)

    def _require_writable(self) -> None:
        if not self._state.scan_done.wait(_SCAN_WAIT_S):
            raise TierFullError("the drive is still being scanned", where=self._state.name)
        if self._state.health.fenced:
            raise TierFullError("the drive is fenced: it returned errors or did not answer", where=self._state.name)


def file_space(payload_len: int) -> int:
    """Return the bytes that a block's file takes."""
    return -(-(HEADER_BYTES + payload_len) // _PAGE) * _PAGE
