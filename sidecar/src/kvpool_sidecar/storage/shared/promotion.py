"""Base of stores that keep blocks in another form: they bring a block to this node in its plain form."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError
from kvpool.protocol.block import HEADER_BYTES, encode_header
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted
from kvpool_sidecar.storage.base import CommitOutcome, Store, TransactionTarget, WrapperStore, WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader

__all__ = ["PromotingStore", "open_memory", "write_at"]

_WAIT_S = 20.0


class PromotingStore(WrapperStore, TransactionTarget):
    """See Store. Blocks are written in memory first; `publish` of the subclass stores them in `inner`.

    `local` is the store that blocks are promoted to, with an event BlockPromoted. A payload of more than `max_payload`
    bytes is not promoted.
    """

    def __init__(
        self,
        inner: Store,
        local: Store,
        *,
        max_payload: int,
        events: BlockEvents | None = None,
        count: Callable[[str, int], None] = lambda _what, _n: None,
    ) -> None:
        super().__init__(inner)
        self._local = local
        self._max_payload = max_payload
        self._events = events or BlockEvents()
        self._count = count
        self._promotions = _Promotions()

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        writer, reader = open_memory()
        os.ftruncate(writer, HEADER_BYTES + payload_len)
        return WriteTransaction(self, block_key, payload_len, writer, reader, reserved=0)

    def seal(self, pending: WriteTransaction) -> None:
        """Only this process writes here, and it has closed its descriptor."""

    def _promote(self, plain: BlockHeader, write_payload: Callable[[int], None], *, counted: str) -> None:
        """Store the plain block in the local tier; `write_payload(fd)` writes its payload behind the header."""
        pending = _begin_local(self._local, plain.block_key, plain.payload_len)
        if pending is None:
            return
        try:
            write_payload(pending.writer)
            os.pwrite(pending.writer, encode_header(plain), 0)
            outcome = pending.commit()
        except BaseException:
            pending.abort()
            raise
        self._count(counted, 1)
        if outcome is CommitOutcome.STORED:
            self._events.emit(BlockPromoted(plain.block_key, plain.payload_len))


class _Promotions:
    """Runs one promotion per block at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[bytes, threading.Event] = {}

    def run(self, block_key: bytes, promote: Callable[[], None]) -> None:
        """Call `promote`; if another call promotes the block already, wait for that one at most 20 s instead."""
        with self._lock:
            coming = self._coming.get(block_key)
            if coming is None:
                mine = self._coming[block_key] = threading.Event()
        if coming is not None:
            coming.wait(_WAIT_S)
            return
        try:
            promote()
        finally:
            with self._lock:
                del self._coming[block_key]
            mine.set()


def _begin_local(local: Store, block_key: bytes, payload_len: int) -> WriteTransaction | None:
    """Begin a write in the local tier; None if the block is there. TierFullError also if its drive fails."""
    try:
        return local.begin(block_key, payload_len)
    except OSError as e:  # the local drive's trouble is not the shared tier's
        raise TierFullError(f"the local tier: {e.strerror}", block_key=block_key.hex()) from None


def open_memory() -> tuple[int, int]:
    """A file in memory: one descriptor to write, one to read."""
    writer = os.memfd_create("kvpool-block", os.MFD_CLOEXEC)
    try:
        return writer, os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(writer)
        raise


def write_at(fd: int, piece: memoryview, offset: int) -> None:
    """Write all of `piece` at `offset`. OSError."""
    while piece:
        done = os.pwrite(fd, piece, offset)
        piece, offset = piece[done:], offset + done
