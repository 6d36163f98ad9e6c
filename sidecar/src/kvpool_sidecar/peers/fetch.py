"""Copy one block from a peer into a store: in small pieces, as fast as a pace allows, verified before it has a name."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import wire
from kvpool_sidecar.blocks import file as blockfile

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.base import Store, WriteTransaction

__all__ = ["ByteRateLimiter", "fetch_block"]

_MAX_PIECE = 256 << 10
_MIN_PIECE = 16 << 10
_PIECES_PER_S = 20
_PATIENCE_S = 10.0
_LONGEST_S = 20.0  # of one block: a store gives up a file that takes a minute


class ByteRateLimiter:
    """At most `rate()` bytes per second, asked anew for each piece. For one thread; `stop` ends all waiting."""

    def __init__(self, rate: Callable[[], float], stop: threading.Event) -> None:
        self._rate = rate
        self._stop = stop
        self._free_at = 0.0

    def piece(self) -> int:
        """Bytes to take at a time: so few that the rate is even."""
        return max(_MIN_PIECE, min(_MAX_PIECE, int(self._rate() / _PIECES_PER_S)))

    def settle(self) -> None:
        """Wait until all that was taken is paid for. PoolUnavailableError once stopped."""
        self._wait(self._free_at)

    def spend(self, count: int, until: float) -> None:
        """`count` bytes are to be taken now: wait until they may, but not longer than `until`; the rest is owed."""
        self._free_at = max(self._free_at, time.monotonic()) + count / max(1.0, self._rate())
        self._wait(min(self._free_at, until))

    def _wait(self, until: float) -> None:
        if self._stop.wait(max(0.0, until - time.monotonic())):
            raise PoolUnavailableError("stopped")


def fetch_block(
    link: PeerConnection, key: bytes, payload_len: int, store: Store, pace: ByteRateLimiter
) -> wire.CommitStatus | None:
    """STORED or HAVE, or None if the peer does not have it, or it was purged (the link is in order then).

    CorruptBlockError: the bytes are not the block; nothing was kept and the link is in order. TierFullError: no space.
    Any other KVPoolError or OSError: the link must be closed.
    """
    pace.settle()
    pending = store.begin(key, payload_len)
    if pending is None:
        return wire.CommitStatus.HAVE
    try:
        link.request([key])
        size = link.response_size(time.monotonic() + _PATIENCE_S)
        if size == 0:
            store.abort(pending)
            return None
        _receive(link, pending, size, pace)
        blockfile.verify(pending.reader, key, payload_len)
        return _committed(store, pending)
    except BaseException:
        store.abort(pending)
        raise


def _committed(store: Store, pending: WriteTransaction) -> wire.CommitStatus | None:
    try:
        return store.commit(pending)
    except RefusedError:  # it was purged here meanwhile
        return None


def _receive(link: PeerConnection, pending: WriteTransaction, size: int, pace: ByteRateLimiter) -> None:
    if size != pending.file_bytes:
        raise ProtocolError(f"the peer sends {size} bytes", key=pending.key.hex())
    until = time.monotonic() + _LONGEST_S
    buffer = memoryview(bytearray(_MAX_PIECE))
    done = 0
    while done < pending.file_bytes:
        count = min(pace.piece(), pending.file_bytes - done)
        pace.spend(count, until)
        link.receive_into(buffer[:count], time.monotonic() + _PATIENCE_S)
        at = 0
        while at < count:
            at += os.pwrite(pending.writer, buffer[at:count], done + at)
        done += count
