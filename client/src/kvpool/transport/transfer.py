"""Move payload bytes between the engine's buffers and descriptors or peer streams, one block at a time.

Rule that keeps late bytes out of the engine's memory: a thread that writes into a buffer holds the transfer's `gate`,
never blocks in the kernel while holding it (a peer stream: only until the deadline), and checks `Batch.closed` first.
A caller that abandons a batch closes it and then acquires every gate once; after that no thread writes into its
buffers, even if one is stuck in a read on a hung file system. So bytes of this node's drives are brought into the page
cache first, and a read that may still block goes through a bounce buffer of the reading thread.

Bytes are moved and checksummed by calls that release the interpreter's lock, so that the engine's threads run beside a
load.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, DeadlineExceededError, PoolUnavailableError, ProtocolError
from kvpool.protocol import block, peer_wire, wire
from kvpool.transport import page_cache
from kvpool.transport.pending import PeerMissError
from kvpool.transport.piece_size import MAX_PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.transport.pending import Batch, Expectation, PendingRead

__all__ = ["PIECE_BYTES", "UNSUPPORTED", "PeerStream", "read_file", "read_hot", "refuse_if_over", "rest_of"]

PIECE_BYTES = MAX_PIECE_BYTES
_BOUNCE_BYTES = 4 << 20  # per read from a drive
_SLACK_S = 0.002  # of a stream's timeout
_FILL_BYTES = PIECE_BYTES  # of a file that is brought into the page cache before they are read
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_thread = threading.local()


def _window(load: PendingRead, limit: int) -> list[memoryview]:
    """Return the views that receive the next bytes of the block file: at most `limit` bytes of header and payload."""
    start = load.offset
    views = []
    if start < block.HEADER_BYTES:
        views.append(memoryview(load.header)[start:])
    first = max(start - block.HEADER_BYTES, 0)
    last = start + limit - block.HEADER_BYTES
    if last > first:
        views.append(load.view[first:last])
    return views


def _advance(load: PendingRead, count: int) -> None:
    """Account for `count` received bytes and checksum the payload among them."""
    first = max(load.offset - block.HEADER_BYTES, 0)
    load.offset += count
    if load.sum is not None:
        last = load.offset - block.HEADER_BYTES
        if last > first:
            load.sum.update(load.view[first:last])


def _verify(load: PendingRead, expect: Expectation) -> None:
    expected = _payload_sum(load, expect)
    _require_sum(load, expect, load.sum.digest() if load.sum is not None else None, expected)


def _require_sum(load: PendingRead, expect: Expectation, found: bytes | None, expected: bytes) -> None:
    if found is None:
        return
    if found != expected:
        raise CorruptBlockError("payload fails its checksum", block_key=load.block_key.hex())
    if len(load.view) <= PIECE_BYTES and block.tenant_tag_of(load.header) == expect.tenant_tag:
        load.payload_sum = expected


def _payload_sum(load: PendingRead, expect: Expectation) -> bytes:
    tag = expect.tenant_tag
    if expect.readable and (claimed := block.tenant_tag_of(load.header)) in expect.readable:
        tag = claimed
    return block.payload_sum_of(load.header, load.block_key, load.block_id, expect.fingerprint, tag, len(load.view))


def refuse_if_over(batch: Batch, needed_s: float = 0.0) -> None:
    """DeadlineExceededError if the batch was closed, or less than `needed_s` seconds are left."""
    if batch.closed or time.monotonic() + needed_s >= batch.deadline:
        raise DeadlineExceededError("the batch was abandoned or missed its deadline")


def _needed_s(load: PendingRead, batch: Batch) -> float:
    """Return the seconds of the next piece, once this block has had one: a rate from before says nothing."""
    return batch.pieces.seconds(batch.pieces.bytes) if load.offset else 0.0


def read_file(
    load: PendingRead, batch: Batch, expect: Expectation, may_block: bool, preadv: Callable[..., int] = os.preadv
) -> bool:
    """Read the block from `load.descriptor` and verify it. Return False if the rest is not cached and not `may_block`.

    Raises CorruptBlockError, DeadlineExceededError (also if the batch was closed) and OSError. After True, and only
    then, the buffer holds the requested block.
    """
    total = block.HEADER_BYTES + len(load.view)
    if load.offset == 0 and load.tier == wire.Tier.LOCAL and not load.cold and not batch.is_warm:
        batch.is_warm = page_cache.ends_in_memory(load.descriptor, total, preadv)
        load.cold = not batch.is_warm
    if load.cold:
        if not may_block:
            return False
        _fill_page_cache(load, batch, total)
    if load.offset == 0 and len(load.view) <= batch.pieces.bytes and _read_at_once(load, batch, expect, total, preadv):
        return True
    if load.sum is None and expect.verify:
        load.sum = block.running_checksum()
    while load.offset < total:
        if load.cold:
            _fill_page_cache(load, batch, total)
        count = _read_cached(load, batch, preadv)
        if count is None:
            if not may_block:
                return False
            count = _read_through_bounce(load, batch, total, preadv)
        if count == 0:
            raise CorruptBlockError("block file is too short", block_key=load.block_key.hex())
        _advance(load, count)
    _verify(load, expect)
    return True


def _fill_page_cache(load: PendingRead, batch: Batch, total: int) -> None:
    """Bring the next bytes of a cold file into the page cache; without the gate, because this waits for the drive."""
    while load.filled <= load.offset:
        refuse_if_over(batch)
        page_cache.fill(load.descriptor, load.filled, min(total - load.filled, _FILL_BYTES + block.HEADER_BYTES))
        load.filled += _FILL_BYTES


def _read_at_once(load: PendingRead, batch: Batch, expect: Expectation, total: int, preadv: Callable[..., int]) -> bool:
    """Read a small, fully cached block by one call and one checksum. Return False to continue piece by piece."""
    if not _NOWAIT:
        return False
    with load.gate:
        refuse_if_over(batch)
        try:
            if preadv(load.descriptor, (load.header, load.view), 0, _NOWAIT) != total:
                batch.is_warm = False
                return False
        except BlockingIOError:
            batch.is_warm = False
            return False
        except OSError as e:
            if e.errno in UNSUPPORTED:
                return False
            raise
    expected = _payload_sum(load, expect)
    _require_sum(load, expect, block.checksum(load.view) if expect.verify else None, expected)
    return True


def read_hot(load: PendingRead, batch: Batch, preadv: Callable[..., int] = os.preadv) -> bool:
    """Read a block again by a descriptor whose header was verified before. False if that needs more than a copy.

    One call and one checksum: a block that is kept has at most PIECE_BYTES. DeadlineExceededError.
    """
    with load.gate:
        refuse_if_over(batch)
        try:
            count = preadv(load.descriptor, (load.view,), block.HEADER_BYTES, _NOWAIT)
        except OSError:
            count = -1
    return count == len(load.view) and block.checksum(load.view) == load.payload_sum


def _read_cached(load: PendingRead, batch: Batch, preadv: Callable[..., int]) -> int | None:
    """Copy cached bytes; None if the page cache holds none here or the file system does not support RWF_NOWAIT."""
    if not _NOWAIT:
        return None
    views = _window(load, batch.pieces.bytes)
    began = time.monotonic()
    with load.gate:
        refuse_if_over(batch, _needed_s(load, batch))
        try:
            count = preadv(load.descriptor, views, load.offset, _NOWAIT)
            batch.pieces.note(count, time.monotonic() - began)
            return count
        except BlockingIOError:
            return None
        except OSError as e:
            if e.errno in UNSUPPORTED:
                return None
            raise


def _read_through_bounce(load: PendingRead, batch: Batch, total: int, preadv: Callable[..., int]) -> int:
    bounce = _bounce()
    if load.offset < _BOUNCE_BYTES:
        with contextlib.suppress(OSError):
            os.posix_fadvise(load.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    want = min(_BOUNCE_BYTES, total - load.offset)
    count = preadv(load.descriptor, [bounce[:want]], load.offset)  # may block for as long as the drive does
    done = 0
    for view in _window(load, count):
        _copy(view, bounce[done : done + len(view)], load, batch)
        done += len(view)
    return count


def _copy(to: memoryview, source: memoryview, load: PendingRead, batch: Batch) -> None:
    """Copy bytes between writable buffers of one length. Releases the GIL, which `to[:] = source` holds."""
    done = 0
    while done < len(to):
        size, began = min(batch.pieces.bytes, len(to) - done), time.monotonic()
        with load.gate:
            refuse_if_over(batch)
            ctypes.memmove(_address_of(to) + done, _address_of(source) + done, size)
        batch.pieces.note(size, time.monotonic() - began)
        done += size


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _bounce() -> memoryview:
    """Return this thread's page-aligned buffer of _BOUNCE_BYTES."""
    view: memoryview | None = getattr(_thread, "bounce", None)
    if view is None:
        view = _thread.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
    return view


class PeerStream:
    """The answers of one batch on one peer stream, in order. Belongs to one thread.

    A call of the kernel fetches a block and the response in front of the next one. The stream's timeout is renewed
    only after `_SLACK_S`, and is shorter by as much: no call lasts beyond the batch's deadline.
    """

    def __init__(self, stream: socket.socket, batch: Batch, expect: Expectation) -> None:
        self._stream = stream
        self._batch = batch
        self._expect = expect
        self._response = memoryview(bytearray(peer_wire.PEER_RESPONSE.size))
        self._have = 0  # bytes of the next response
        self._armed = math.inf  # seconds that were left when the timeout was set

    def read(self, load: PendingRead, *, is_last: bool) -> None:
        """Read the next answer: PEER_RESPONSE, header, payload; verify it. `is_last`: no further one was requested.

        CorruptBlockError and PeerMissError leave the stream usable for the next block. After any other error
        (ProtocolError, DeadlineExceededError, PoolUnavailableError, OSError) it must be closed.
        """
        if self._have < len(self._response):
            self._receive([self._response[self._have :]], load)
        self._have = 0
        magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(self._response)
        if magic != wire.MAGIC:
            raise ProtocolError("not a peer's response")
        if status == peer_wire.PeerStatus.MISS and size == 0:
            raise PeerMissError("the peer no longer has it", block_key=load.block_key.hex())
        if status != peer_wire.PeerStatus.OK or size != block.HEADER_BYTES + len(load.view):
            raise ProtocolError(f"a peer's response with status {status} and {size} bytes")
        load.sum = block.running_checksum() if self._expect.verify else None
        while load.offset < size:
            refuse_if_over(self._batch, _needed_s(load, self._batch))
            views = _window(load, self._batch.pieces.bytes + block.HEADER_BYTES)
            count = sum(map(len, views))
            began = time.monotonic()
            if load.offset + count == size and not is_last:
                views.append(self._response)
                self._have = self._receive(views, load, count)
            else:
                self._receive(views, load)
            self._batch.pieces.note(count, time.monotonic() - began)
            _advance(load, count)
        _verify(load, self._expect)

    def _receive(self, views: list[memoryview], load: PendingRead, needed: int = 0) -> int:
        """Fill `views`, or `needed` bytes of them, before the batch's deadline. Return the bytes beyond `needed`."""
        needed = needed or sum(map(len, views))
        while needed > 0:
            remaining = self._batch.deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceededError("a peer's block missed the deadline")
            with load.gate:
                refuse_if_over(self._batch)
                self._set_timeout(remaining)
                try:
                    count, _, _, _ = self._stream.recvmsg_into(views, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    count = -1
            if count == 0:
                raise PoolUnavailableError("the peer closed its stream")
            if count > 0:
                views = rest_of(views, count)
                needed -= count
            else:  # the timeout, or the sidecar left the socket non-blocking
                poller = select.poll()
                poller.register(self._stream, select.POLLIN)
                poller.poll(max(0.0, self._batch.deadline - time.monotonic()) * 1000)
        return -needed

    def _set_timeout(self, remaining: float) -> None:
        """Let the kernel end the next call by the deadline: SO_RCVTIMEO bounds the whole of MSG_WAITALL."""
        if self._armed - remaining > _SLACK_S:
            self._armed = remaining
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(remaining - _SLACK_S))


def rest_of(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of `views` that is still to be filled after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []


def _timeval(seconds: float) -> bytes:
    micros = max(1000, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
