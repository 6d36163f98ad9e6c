"""The one interface of everything that keeps blocks.

A block is written once through an unnamed (or temporary) file and appears whole under its key or not at all; it never
changes afterwards; it may vanish at any time. Implementations are thread-safe. `kvpool_testing.store` is the
contract as tests.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, RefusedError
from kvpool.protocol.block import HEADER_BYTES
from kvpool.protocol.wire import CommitStatus
from kvpool_sidecar.blocks import file as blockfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.blocks.file import Expect
    from kvpool_sidecar.storage.tombstones import PurgeTombstones

__all__ = ["Block", "Store", "TenantUsage", "Usage", "WriteTransaction"]


class Block(NamedTuple):
    """An open block; the receiver closes `fd` (read-only; header at 0, payload at 4096)."""

    fd: int
    payload_len: int


class Usage(NamedTuple):
    capacity_bytes: int  # 0: no limit of ours
    used_bytes: int
    blocks: int


class TenantUsage(NamedTuple):
    used_bytes: int = 0
    blocks: int = 0
    over_quota: int = 0  # blocks that went because of the tenant's quota, since the process started


class WriteTransaction:
    """A file that is being written: `writer` for who writes it (-1 once given up), `reader` for us."""

    def __init__(
        self, key: bytes, payload_len: int, writer: int, reader: int, *, reserved: int, name: str = ""
    ) -> None:
        self.key = key
        self.payload_len = payload_len
        self.writer = writer
        self.reader = reader
        self.reserved = reserved  # bytes promised to it
        self.name = name  # of a temporary file; empty while the file has none
        self.drive = 0  # which it is on, in a store that has several
        self.created_at = time.monotonic()
        self._claimed = False
        self._lock = threading.Lock()

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_len

    def close_writer(self) -> None:
        """Our copy of the writing descriptor, once it has been handed over. OSError if the data could not be kept."""
        with self._lock:
            fd, self.writer = self.writer, -1
        if fd >= 0:
            os.close(fd)

    def claim(self) -> bool:
        """True for exactly one caller: whoever ends this file, by commit or by abort."""
        with self._lock:
            claimed, self._claimed = self._claimed, True
            return not claimed


class Store(abc.ABC):
    """Keys are 32 bytes; lengths are of the payload. OSError comes through where the medium fails."""

    name: str
    tombstones: PurgeTombstones | None = None  # of purged blocks, which are not to come back

    @abc.abstractmethod
    def contains(self, key: bytes) -> bool:
        """Is the block here? Cheap, and only a hint: it may be gone a moment later."""

    @abc.abstractmethod
    def open(self, key: bytes) -> Block | None:
        """The block, marked as just used; None if it is not here."""

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        """Like `open`, of several blocks that are wanted together."""
        found: list[Block | None] = []
        try:
            found.extend(self.open(key) for key in keys)
        except BaseException:
            for block in found:
                if block is not None:
                    os.close(block.fd)
            raise
        return found

    def begin(self, key: bytes, payload_len: int) -> WriteTransaction | None:
        """A file of full length to write into; None if the block is here. TierFullError if there is no space."""
        return None if self.contains(key) else self._create(key, payload_len)

    def commit(
        self, pending: WriteTransaction, expect: Expect = blockfile.ANYTHING, *, fill: bool = False
    ) -> CommitStatus:
        """Check the written file and give it its name: STORED, or HAVE if another writer was first.

        `fill`: compute the payload's checksum and write it into the header. Raises RefusedError if somebody can still
        write, the file was given up or the block was purged, CorruptBlockError if it is not the block that was
        announced. `pending` is over in any case.
        """
        if not pending.claim():
            raise RefusedError("the time to commit is over", key=pending.key.hex())
        try:
            pending.close_writer()
            self._seal(pending)
            header = blockfile.read_header(pending.reader, pending.key, pending.payload_len, expect)
            if self.tombstones is not None and self.tombstones.rejects(header):
                raise RefusedError("a copy of a block that was purged", key=pending.key.hex())
            if fill:
                header = self._fill(pending, header)
            return CommitStatus.STORED if self._publish(pending, header) else CommitStatus.HAVE
        finally:
            self._release(pending)

    def abort(self, pending: WriteTransaction) -> bool:
        """Give the file up; its space is free at once. Safe to call twice. False if it was over already."""
        if not pending.claim():
            return False
        with contextlib.suppress(OSError):
            pending.close_writer()
        with contextlib.suppress(OSError):  # whoever still holds the descriptor holds an empty file
            os.truncate(f"/proc/self/fd/{pending.reader}", 0)
        self._release(pending)
        return True

    def verify(self, key: bytes) -> bool:
        """Read the block and compare its checksum; a bad one is quarantined. False if it is bad or not here."""
        found = self.peek(key)
        if found is None:
            return False
        try:
            blockfile.verify(found.fd, key, found.payload_len)
        except CorruptBlockError:
            self.quarantine(key)
            return False
        finally:
            os.close(found.fd)
        return True

    def peek(self, key: bytes) -> Block | None:
        """Like `open`, but it does not count as a use, where that can be told apart."""
        return self.open(key)

    def header(self, key: bytes) -> BlockHeader | None:
        """What a block says of itself; None if it is not here. CorruptBlockError if that cannot be read."""
        found = self.peek(key)
        return None if found is None else blockfile.header_of(found.fd, key)

    @abc.abstractmethod
    def quarantine(self, key: bytes) -> bool:
        """Take a bad block out of service, keep it for a look. False if it was not here."""

    @abc.abstractmethod
    def delete(self, key: bytes) -> bool:
        """Remove a block. False if it was not here."""

    def purge(self, keys: Sequence[bytes]) -> int:
        """Remove blocks because somebody wants them gone, and tell whom it concerns; how many were here."""
        return sum(self.delete(key) for key in keys)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        """The same for bad blocks that are kept for a look, by what they say of themselves (None: nothing)."""
        return 0

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Capacity, bytes in use, blocks."""

    @abc.abstractmethod
    def keys(self) -> Iterator[tuple[bytes, int]]:
        """Every block and its payload length, in no order; blocks that come or go meanwhile may be missed."""

    def payload_len(self, key: bytes) -> int:
        """Of a block, as far as it can be told without asking the medium; 0 if it is not here."""
        return 0

    def mark_shared(self, key: bytes) -> None:  # noqa: B027 - what forgets its blocks need not remember this
        """The shared tier has a copy of this block, which should be known after a restart."""

    def maintain(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Called every few seconds: watermarks, forgotten writers. Must end in bounded time."""

    def close(self) -> None:  # noqa: B027
        """Let go of descriptors. Nothing is lost by not calling it."""

    @abc.abstractmethod
    def _create(self, key: bytes, payload_len: int) -> WriteTransaction:
        """A new file for `begin`."""

    @abc.abstractmethod
    def _seal(self, pending: WriteTransaction) -> None:
        """See to it that nobody can write any more; RefusedError if somebody can."""

    def _fill(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        """Complete the header of a sealed file."""
        return blockfile.fill_checksum(pending.reader, header)

    @abc.abstractmethod
    def _publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        """Give the file its name; False if the name was taken."""

    def _release(self, pending: WriteTransaction) -> None:
        """Close what is open and take back the promised bytes."""
        fd, pending.reader = pending.reader, -1
        if fd >= 0:
            os.close(fd)
