"""Interface of everything that stores blocks, and the transaction that writes one.

A block is written once, through an unnamed or temporary file. It becomes visible as a whole under its key or not at
all, never changes afterwards, and may vanish at any time. The test suite of this contract is `StoreContract`
(sidecar/testing).
"""

from __future__ import annotations

import abc
import contextlib
import enum
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError, RefusedError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.blocks.file import Expect
    from kvpool_sidecar.storage.tombstones import PurgeTombstones

__all__ = [
    "Block",
    "CommitOutcome",
    "Store",
    "TenantUsage",
    "TransactionTarget",
    "Usage",
    "WrapperStore",
    "WriteTransaction",
]


class Block(NamedTuple):
    """An open block. The receiver closes `fd` (read-only; header at offset 0, payload at 4096)."""

    fd: int
    payload_len: int  # bytes


class Usage(NamedTuple):
    """Space of a store, in bytes. `capacity_bytes` is 0 where the store sets no limit."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


class TenantUsage(NamedTuple):
    """Space of one tenant. `over_quota`: blocks evicted because of its quota since the process started."""

    used_bytes: int = 0
    blocks: int = 0
    over_quota: int = 0


class CommitOutcome(enum.Enum):
    """Result of a commit that raised no error."""

    STORED = "stored"
    ALREADY_PRESENT = "already present"  # another writer was first; its block is the same


class TransactionTarget(abc.ABC):
    """Hooks of a store that writes blocks itself. Only WriteTransaction calls them, in this order."""

    tombstones: PurgeTombstones | None = None

    @abc.abstractmethod
    def seal(self, transaction: WriteTransaction) -> None:
        """Make the file immutable for other holders of its descriptor. RefusedError if one can still write."""

    def fill_checksum(self, transaction: WriteTransaction, header: BlockHeader) -> BlockHeader:
        """Compute the payload's checksum and write it into the header of the sealed file."""
        return blockfile.fill_checksum(transaction.reader, header)

    @abc.abstractmethod
    def publish(self, transaction: WriteTransaction, header: BlockHeader) -> bool:
        """Make the block visible under its key. False if the key exists."""

    def release(self, transaction: WriteTransaction) -> None:
        """Close descriptors and return the reserved bytes. Called exactly once."""
        fd, transaction.reader = transaction.reader, -1
        if fd >= 0:
            os.close(fd)


class WriteTransaction:
    """One block that is being written: `writer` for the client (-1 once closed), `reader` for the store.

    It ends with exactly one `commit` or `abort`. Thread-safe.
    """

    def __init__(
        self,
        target: TransactionTarget,
        block_key: bytes,
        payload_len: int,
        writer: int,
        reader: int,
        *,
        reserved: int,
        name: str = "",
    ) -> None:
        self.target = target
        self.block_key = block_key
        self.payload_len = payload_len
        self.writer = writer
        self.reader = reader
        self.reserved = reserved  # bytes
        self.name = name  # of the temporary file; empty for an unnamed file
        self.created_at = time.monotonic()
        self._claimed = False
        self._lock = threading.Lock()

    @property
    def file_bytes(self) -> int:
        """Size of the block's file: header and payload."""
        return HEADER_BYTES + self.payload_len

    def close_writer(self) -> None:
        """Close this process's writing descriptor. OSError if the data could not be written."""
        with self._lock:
            fd, self.writer = self.writer, -1
        if fd >= 0:
            os.close(fd)

    def claim(self) -> bool:
        """Return True for exactly one caller: the one that ends the transaction."""
        with self._lock:
            claimed, self._claimed = self._claimed, True
            return not claimed

    def commit(self, expect: Expect = blockfile.ANYTHING, *, fill_checksum: bool = False) -> CommitOutcome:
        """Check the written file and make the block visible. The transaction ends in any case.

        Parameters
        ----------
        expect
            Fields that the header must contain.
        fill_checksum
            Compute the payload's checksum and write it into the header.

        Raises
        ------
        RefusedError
            A writer still has the file open, the transaction has ended, or the block was purged.
        CorruptBlockError
            The file is not the announced block.
        OSError
            The medium fails.
        """
        if not self.claim():
            raise RefusedError("the write transaction has already ended", block_key=self.block_key.hex())
        target = self.target
        try:
            self.close_writer()
            target.seal(self)
            header = blockfile.read_header(self.reader, self.block_key, self.payload_len, expect)
            if target.tombstones is not None and target.tombstones.rejects(header):
                raise RefusedError("the block was purged", block_key=self.block_key.hex())
            if fill_checksum:
                header = target.fill_checksum(self, header)
            return CommitOutcome.STORED if target.publish(self, header) else CommitOutcome.ALREADY_PRESENT
        finally:
            target.release(self)

    def abort(self) -> bool:
        """Discard the file and free its space immediately. Idempotent. False if the transaction has already ended."""
        if not self.claim():
            return False
        with contextlib.suppress(OSError):
            self.close_writer()
        with contextlib.suppress(OSError):  # other holders of the descriptor are left with an empty file
            os.truncate(f"/proc/self/fd/{self.reader}", 0)
        self.target.release(self)
        return True


class Store(abc.ABC):
    """A set of blocks by key. Keys are 32 bytes; lengths are payload bytes. Thread-safe.

    OSError passes through where the medium fails.
    """

    name: str
    tombstones: PurgeTombstones | None = None

    def set_tombstones(self, tombstones: PurgeTombstones) -> None:
        """Reject late copies of purged blocks."""
        self.tombstones = tombstones

    @abc.abstractmethod
    def contains(self, block_key: bytes) -> bool:
        """Return whether the block is present. Cheap, and a hint: the block may vanish a moment later."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return `contains` of each key, in order."""
        return [self.contains(key) for key in keys]

    @abc.abstractmethod
    def open(self, block_key: bytes) -> Block | None:
        """Open a block and record its use. None if it is absent."""

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        """Open several blocks that are needed together; in order, None for those that are absent."""
        found: list[Block | None] = []
        try:
            found.extend(self.open(key) for key in keys)
        except BaseException:
            for block in found:
                if block is not None:
                    os.close(block.fd)
            raise
        return found

    def begin(self, block_key: bytes, payload_len: int) -> WriteTransaction | None:
        """Start writing a block of `payload_len` bytes.

        Returns
        -------
        A transaction with a file of full length, or None if the block is present.

        Raises
        ------
        TierFullError
            No space can be reserved.
        """
        return None if self.contains(block_key) else self.begin_write(block_key, payload_len)

    @abc.abstractmethod
    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        """Create the transaction for `begin`, without checking whether the block is present."""

    def verify(self, block_key: bytes) -> bool:
        """Read the block, compare its checksum, and quarantine it on a mismatch. False if corrupt or absent."""
        found = self.peek(block_key)
        if found is None:
            return False
        try:
            blockfile.verify(found.fd, block_key, found.payload_len)
        except CorruptBlockError:
            self.quarantine(block_key)
            return False
        finally:
            os.close(found.fd)
        return True

    def peek(self, block_key: bytes) -> Block | None:
        """Open a block without recording a use, where the store distinguishes the two."""
        return self.open(block_key)

    def header(self, block_key: bytes) -> BlockHeader | None:
        """Return the block's header; None if the block is absent. CorruptBlockError if it cannot be decoded."""
        found = self.peek(block_key)
        return None if found is None else blockfile.header_of(found.fd, block_key)

    @abc.abstractmethod
    def quarantine(self, block_key: bytes) -> bool:
        """Take a corrupt block out of service and keep it for inspection. False if it was absent."""

    @abc.abstractmethod
    def delete(self, block_key: bytes) -> bool:
        """Delete a block. False if it was absent."""

    def purge(self, keys: Sequence[bytes]) -> int:
        """Delete blocks on request, and emit their removal. Returns how many were present."""
        return sum(self.delete(key) for key in keys)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        """Delete the quarantined blocks that `doomed` selects by header (None: undecodable). Returns how many."""
        return 0

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Return capacity, bytes in use and number of blocks."""

    @abc.abstractmethod
    def keys(self) -> Iterator[tuple[bytes, int]]:
        """Yield key and payload length of each block, unordered; concurrent changes may be missed."""

    def payload_len(self, block_key: bytes) -> int:
        """Return the payload length as far as it is known without I/O; 0 if the block is absent."""
        return 0

    def record_opened(  # noqa: B027 - memory has no such files
        self, keys: Sequence[bytes], tenant: bytes, *, again: bool = False
    ) -> None:
        """Record that descriptors of these blocks went to a pod of the tenant with this tag.

        `again`: they went there before, and were read once more; those blocks that are here count as used.
        """

    def holds_too_much(self, tenant: bytes) -> bool:
        """Return whether pods of this tenant keep too many bytes of removed blocks open: they get no more."""
        return False

    def mark_shared(self, block_key: bytes) -> None:  # noqa: B027 - volatile stores have nothing to persist
        """Persist that the shared tier has a copy of this block."""

    def maintain(self) -> None:  # noqa: B027 - no maintenance is a valid default
        """Run periodic maintenance: watermarks, abandoned writes. Ends in bounded time."""

    def close(self) -> None:  # noqa: B027
        """Close descriptors. Blocks that persist stay."""


class WrapperStore(Store):
    """Delegates every operation to `inner`. Base class of stores that change some of them."""

    def __init__(self, inner: Store) -> None:
        self.name = inner.name
        self._inner = inner

    @property
    def inner(self) -> Store:
        """The wrapped store."""
        return self._inner

    def set_tombstones(self, tombstones: PurgeTombstones) -> None:
        super().set_tombstones(tombstones)
        self._inner.set_tombstones(tombstones)

    def contains(self, block_key: bytes) -> bool:
        return self._inner.contains(block_key)

    def open(self, block_key: bytes) -> Block | None:
        return self._inner.open(block_key)

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        return self._inner.begin_write(block_key, payload_len)

    def verify(self, block_key: bytes) -> bool:
        return self._inner.verify(block_key)

    def peek(self, block_key: bytes) -> Block | None:
        return self._inner.peek(block_key)

    def header(self, block_key: bytes) -> BlockHeader | None:
        return self._inner.header(block_key)

    def quarantine(self, block_key: bytes) -> bool:
        return self._inner.quarantine(block_key)

    def delete(self, block_key: bytes) -> bool:
        return self._inner.delete(block_key)

    def purge(self, keys: Sequence[bytes]) -> int:
        return self._inner.purge(keys)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return self._inner.purge_quarantine(doomed)

    def usage(self) -> Usage:
        return self._inner.usage()

    def keys(self) -> Iterator[tuple[bytes, int]]:
        return self._inner.keys()

    def payload_len(self, block_key: bytes) -> int:
        return self._inner.payload_len(block_key)

    def mark_shared(self, block_key: bytes) -> None:
        self._inner.mark_shared(block_key)

    def maintain(self) -> None:
        self._inner.maintain()

    def close(self) -> None:
        self._inner.close()
