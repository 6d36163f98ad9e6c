"""Copies one block from a peer into a store, in small chunks at a limited rate; verified before it is published."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError, RefusedError
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.resilience.rate_limiter import RateLimiter
    from kvpool_sidecar.storage.base import Store, WriteTransaction

__all__ = ["fetch_block"]

_MAX_CHUNK = 256 << 10
_MIN_CHUNK = 16 << 10
_CHUNKS_PER_S = 20
_READ_TIMEOUT_S = 10.0
_MAX_BLOCK_S = 20.0  # rate limiting of one block ends here: a store aborts a write that takes a minute


def fetch_block(
    link: PeerConnection, key: bytes, payload_len: int, store: Store, limiter: RateLimiter
) -> CommitOutcome | None:
    """Return the outcome; None if the peer does not have the block, or if it was purged here meanwhile.

    Raises CorruptBlockError if the bytes are not the block (nothing was stored) and TierFullError if there is no
    space; the connection can be reused in these cases. After any other KVPoolError or OSError it must be closed.
    """
    limiter.settle()
    pending = store.begin(key, payload_len)
    if pending is None:
        return CommitOutcome.ALREADY_PRESENT
    try:
        link.request([key])
        size = link.response_size(time.monotonic() + _READ_TIMEOUT_S)
        if size == 0:
            pending.abort()
            return None
        _receive(link, pending, size, limiter)
        blockfile.verify(pending.reader, key, payload_len)
        return _commit(pending)
    except BaseException:
        pending.abort()
        raise


def _commit(pending: WriteTransaction) -> CommitOutcome | None:
    try:
        return pending.commit()
    except RefusedError:  # purged here meanwhile
        return None


def _receive(link: PeerConnection, pending: WriteTransaction, size: int, limiter: RateLimiter) -> None:
    if size != pending.file_bytes:
        raise ProtocolError(
            f"the peer sends {size} bytes, expected {pending.file_bytes}", block_key=pending.block_key.hex()
        )
    deadline = time.monotonic() + _MAX_BLOCK_S
    buffer = memoryview(bytearray(_MAX_CHUNK))
    done = 0
    while done < pending.file_bytes:
        chunk = max(_MIN_CHUNK, min(_MAX_CHUNK, int(limiter.rate / _CHUNKS_PER_S)))
        count = min(chunk, pending.file_bytes - done)
        limiter.acquire(count, deadline)
        link.receive_into(buffer[:count], time.monotonic() + _READ_TIMEOUT_S)
        at = 0
        while at < count:
            at += os.pwrite(pending.writer, buffer[at:count], done + at)
        done += count
