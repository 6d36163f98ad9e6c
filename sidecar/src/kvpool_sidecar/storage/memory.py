"""Blocks in memory files (memfd_create): the same contract without a drive, for tests and models of behaviour."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import RefusedError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.eviction import Entry, Lru
from kvpool_sidecar.storage.base import Block, Store, TransactionTarget, Usage, WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.protocol.block import BlockHeader

__all__ = ["MemoryStore"]


class MemoryStore(Store, TransactionTarget):
    """See Store. Evicts the least recently opened block at `capacity_bytes`."""

    name = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._files: dict[bytes, int] = {}
        self._lru = Lru()
        self.quarantined: list[bytes] = []

    def contains(self, block_key: bytes) -> bool:
        with self._lock:
            return block_key in self._files

    def open(self, block_key: bytes) -> Block | None:
        with self._lock:
            if block_key not in self._files:
                return None
            self._lru.touch(block_key, time.time())
            fd = _reopen(self._files[block_key])
        return Block(fd, os.fstat(fd).st_size - HEADER_BYTES)

    def quarantine(self, block_key: bytes) -> bool:
        found = self.delete(block_key)
        if found:
            self.quarantined.append(block_key)
        return found

    def delete(self, block_key: bytes) -> bool:
        with self._lock:
            return self._drop(block_key)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._capacity, self._lru.total_bytes, len(self._lru))

    def keys(self) -> Iterator[tuple[bytes, int]]:
        with self._lock:
            return iter([(key, entry.payload_len) for key in self._lru if (entry := self._lru.get(key))])

    def close(self) -> None:
        with self._lock:
            for key in list(self._files):
                self._drop(key)

    def _drop(self, block_key: bytes) -> bool:
        fd = self._files.pop(block_key, None)
        self._lru.discard(block_key)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        total = HEADER_BYTES + payload_len
        with self._lock:
            for victim, _ in self._lru.pop_victims(self._lru.total_bytes + total - self._capacity, len(self._lru)):
                self._drop(victim)
            if self._lru.total_bytes + total > self._capacity:
                raise TierFullError("over capacity", block_key=block_key.hex(), where=self.name)
        writer = os.memfd_create("kvpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(writer, total)
        return WriteTransaction(self, block_key, payload_len, writer, _reopen(writer), reserved=total)

    def seal(self, pending: WriteTransaction) -> None:
        """Revoke write access for every holder of the descriptor (fcntl(2), F_SEAL_WRITE)."""
        try:
            writer = os.open(f"/proc/self/fd/{pending.reader}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            finally:
                os.close(writer)
        except OSError as e:
            raise RefusedError(
                f"the file is mapped for writing: {e.strerror}", block_key=pending.block_key.hex()
            ) from None

    def fill_checksum(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        sealed = pending.reader
        copy = os.memfd_create("kvpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            done = 0
            while done < pending.file_bytes:
                done += os.sendfile(copy, sealed, done, pending.file_bytes - done)
            pending.reader = _reopen(copy)
        finally:
            os.close(copy)
            os.close(sealed)
        filled = super().fill_checksum(pending, header)
        self.seal(pending)
        return filled

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        with self._lock:
            if pending.block_key in self._files:
                return False
            self._files[pending.block_key] = os.dup(pending.reader)
            self._lru.add(pending.block_key, Entry(pending.file_bytes, pending.payload_len, time.time()))
            return True


def _reopen(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
