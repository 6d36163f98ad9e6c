"""Payload bytes between the engine's buffers and descriptors or peer streams, one block at a time.

The rule that keeps late bytes out of the engine's memory: whoever writes into a buffer holds the transfer's `gate`,
never blocks in the kernel while holding it (a peer stream: only until the deadline), and looks at `Batch.closed` first.
Who gives up on a batch closes it and then takes every gate once; from then on nobody writes into its buffers, even if a
thread is stuck in a read on a dead file system. So a read that may block (bytes that are not in the page cache) goes
through a bounce buffer of the reading thread.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, DeadlineExceededError, KVPoolError, PoolUnavailableError, ProtocolError
from kvpool.protocol import block, peer_wire, wire

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "PIECE_BYTES",
    "Batch",
    "Expectation",
    "PeerMissError",
    "PendingRead",
    "PendingWrite",
    "read_file",
    "read_stream",
    "write_file",
]

PIECE_BYTES = 1 << 20  # at a time from the page cache or a peer: checksummed while it is in the processor's cache
_BOUNCE_BYTES = 4 << 20  # at a time from a drive
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_thread = threading.local()


class PeerMissError(KVPoolError):
    """The index named a peer that no longer has the block."""


class Expectation:
    """What every block of this connection must say of itself: it is of `tenant_tag`, or of one of `readable`."""

    __slots__ = ("fingerprint", "readable", "tenant_tag", "verify")

    def __init__(
        self, fingerprint: bytes, tenant_tag: bytes, *, verify: bool, readable: tuple[bytes, ...] = ()
    ) -> None:
        self.fingerprint = fingerprint
        self.tenant_tag = tenant_tag
        self.readable = readable
        self.verify = verify  # False: the sidecar verifies payloads (Flag.VERIFY)


class Batch:
    """Blocks that one caller waits for together. Thread-safe."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.closed = False
        self.ready: collections.deque[PendingRead] = collections.deque()  # readable without waiting, probably
        self.cold: collections.deque[PendingRead] = collections.deque()  # may wait for a drive: pool threads only
        self._pending = 0
        self._condition = threading.Condition()

    def expect(self, count: int) -> None:
        """`count` more blocks are under way."""
        with self._condition:
            self._pending += count

    def settle(self, count: int = 1) -> None:
        """So many blocks are done, well or not."""
        with self._condition:
            self._pending -= count
            if self._pending <= 0:
                self._condition.notify_all()

    def wait(self) -> bool:
        """Until all that was expected is settled; False at the deadline."""
        with self._condition:
            while self._pending > 0:
                remaining = self.deadline - time.monotonic()
                if remaining <= 0 or not self._condition.wait(remaining):
                    return self._pending <= 0
        return True


class PendingRead:
    """One block on its way into one buffer (`view`: writable bytes of the payload's exact length)."""

    __slots__ = (
        "block_id",
        "block_key",
        "descriptor",
        "done",
        "gate",
        "header",
        "offset",
        "ok",
        "position",
        "reason",
        "stream",
        "sum",
        "tier",
        "view",
    )

    def __init__(self, position: int, block_id: bytes, block_key: bytes, tier: wire.Tier, view: memoryview) -> None:
        self.position = position
        self.block_id = block_id
        self.block_key = block_key
        self.tier = tier
        self.view = view
        self.descriptor = -1  # of the block's file, or
        self.stream = -1  # the number of the peer stream that brings it
        self.gate = threading.Lock()
        self.header = bytearray(block.HEADER_BYTES)
        self.offset = 0
        self.sum: block.RunningChecksum | None = None
        self.ok = False
        self.done = 0.0  # when it was there and verified, by the monotonic clock
        self.reason = ""

    def close(self) -> None:
        """Close the block's descriptor; safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PendingWrite:
    """One block being written from a buffer to an unnamed file; `engine_block` and `salt_tag` go into its header."""

    __slots__ = (
        "block_id",
        "block_key",
        "descriptor",
        "engine_block",
        "ok",
        "position",
        "reason",
        "salt_tag",
        "token",
        "view",
    )

    def __init__(self, position: int, block_id: bytes, block_key: bytes, token: int, view: memoryview) -> None:
        self.position = position
        self.block_id = block_id
        self.block_key = block_key
        self.token = token
        self.view = view
        self.engine_block: block.EngineBlock | None = None
        self.salt_tag = block.NO_SALT
        self.descriptor = -1
        self.ok = False
        self.reason = ""

    def close(self) -> None:
        """Close the file's descriptor; safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _window(load: PendingRead, limit: int) -> list[memoryview]:
    """Where the next bytes of the block file go: at most `limit` bytes of header and payload."""
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
    """`count` bytes have arrived: move on, and checksum the payload while it is in the processor's cache."""
    first = max(load.offset - block.HEADER_BYTES, 0)
    load.offset += count
    if load.sum is not None:
        last = load.offset - block.HEADER_BYTES
        if last > first:
            load.sum.update(load.view[first:last])


def _verify(load: PendingRead, expect: Expectation) -> None:
    wanted = _payload_sum(load, expect)
    if load.sum is not None and load.sum.digest() != wanted:
        raise CorruptBlockError("payload fails its checksum", key=load.block_key.hex())


def _payload_sum(load: PendingRead, expect: Expectation) -> bytes:
    tag = expect.tenant_tag
    if expect.readable and (told := block.tenant_tag_of(load.header)) in expect.readable:
        tag = told
    return block.payload_sum_of(load.header, load.block_key, load.block_id, expect.fingerprint, tag, len(load.view))


def _refuse_if_closed(batch: Batch) -> None:
    if batch.closed:
        raise DeadlineExceededError("the load was given up")


def read_file(
    load: PendingRead, batch: Batch, expect: Expectation, may_block: bool, preadv: Callable[..., int] = os.preadv
) -> bool:
    """Read the block from `load.descriptor` and verify it; False if the rest is not in memory and `may_block` is off.

    Raises CorruptBlockError, DeadlineExceededError (the batch was closed) and OSError. After True, and only then, the
    buffer holds the block that was asked for.
    """
    total = block.HEADER_BYTES + len(load.view)
    if load.offset == 0 and len(load.view) <= PIECE_BYTES and _read_at_once(load, batch, expect, total, preadv):
        return True
    if load.sum is None and expect.verify:
        load.sum = block.running_checksum()
    while load.offset < total:
        count = _read_cached(load, batch, preadv)
        if count is None:
            if not may_block:
                return False
            count = _read_through_bounce(load, batch, total, preadv)
        if count == 0:
            raise CorruptBlockError("block file is too short", key=load.block_key.hex())
        _advance(load, count)
    _verify(load, expect)
    return True


def _read_at_once(load: PendingRead, batch: Batch, expect: Expectation, total: int, preadv: Callable[..., int]) -> bool:
    """A small block that is in memory as a whole: one call, one checksum. False: go on piece by piece."""
    if not _NOWAIT:
        return False
    with load.gate:
        _refuse_if_closed(batch)
        try:
            if preadv(load.descriptor, (load.header, load.view), 0, _NOWAIT) != total:
                return False
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno in _UNSUPPORTED:
                return False
            raise
    wanted = _payload_sum(load, expect)
    if expect.verify and block.checksum(load.view) != wanted:
        raise CorruptBlockError("payload fails its checksum", key=load.block_key.hex())
    return True


def _read_cached(load: PendingRead, batch: Batch, preadv: Callable[..., int]) -> int | None:
    """Copy what the page cache holds; None if it holds nothing here or the file system cannot tell."""
    if not _NOWAIT:
        return None
    views = _window(load, PIECE_BYTES)
    with load.gate:
        _refuse_if_closed(batch)
        try:
            return preadv(load.descriptor, views, load.offset, _NOWAIT)
        except BlockingIOError:
            return None
        except OSError as e:
            if e.errno in _UNSUPPORTED:
                return None
            raise


def _read_through_bounce(load: PendingRead, batch: Batch, total: int, preadv: Callable[..., int]) -> int:
    bounce = _bounce()
    if load.offset <= PIECE_BYTES:
        with contextlib.suppress(OSError):
            os.posix_fadvise(load.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    want = min(_BOUNCE_BYTES, total - load.offset)
    count = preadv(load.descriptor, [bounce[:want]], load.offset)  # may hang for as long as the drive does
    with load.gate:
        _refuse_if_closed(batch)
        done = 0
        for view in _window(load, count):
            view[:] = bounce[done : done + len(view)]
            done += len(view)
    return count


def _bounce() -> memoryview:
    """This thread's page-aligned buffer of _BOUNCE_BYTES."""
    view: memoryview | None = getattr(_thread, "bounce", None)
    if view is None:
        view = _thread.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
    return view


def read_stream(load: PendingRead, stream: socket.socket, batch: Batch, expect: Expectation) -> None:
    """Read the next answer on a peer stream: PEER_RESPONSE, header, payload; verify it.

    CorruptBlockError and PeerMissError leave the stream in order for the next block. Anything
    else (ProtocolError, DeadlineExceededError, PoolUnavailableError, OSError) means that it must be thrown away.
    """
    response = bytearray(peer_wire.PEER_RESPONSE.size)
    _receive(stream, [memoryview(response)], load, batch)
    magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(response)
    if magic != wire.MAGIC:
        raise ProtocolError("not a peer's answer")
    if status == peer_wire.PeerStatus.MISS and size == 0:
        raise PeerMissError("the peer no longer has it", key=load.block_key.hex())
    if status != peer_wire.PeerStatus.OK or size != block.HEADER_BYTES + len(load.view):
        raise ProtocolError(f"a peer's answer of status {status} and {size} bytes")
    load.sum = block.running_checksum() if expect.verify else None
    while load.offset < size:
        views = _window(load, PIECE_BYTES + block.HEADER_BYTES)
        _receive(stream, views, load, batch)
        _advance(load, sum(map(len, views)))
    _verify(load, expect)


def _receive(stream: socket.socket, views: list[memoryview], load: PendingRead, batch: Batch) -> None:
    """Fill `views` exactly, before the batch's deadline."""
    while views:
        remaining = batch.deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceededError("a peer's block is late")
        with load.gate:
            _refuse_if_closed(batch)
            # in the kernel for at most `remaining`: SO_RCVTIMEO bounds the whole of MSG_WAITALL
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(remaining))
            try:
                count, _, _, _ = stream.recvmsg_into(views, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                count = -1
        if count == 0:
            raise PoolUnavailableError("the peer closed its stream")
        if count > 0:
            views = _rest(views, count)
        else:  # late, or the sidecar left the socket non-blocking
            poller = select.poll()
            poller.register(stream, select.POLLIN)
            poller.poll(max(0.0, batch.deadline - time.monotonic()) * 1000)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What of `views` is still to be filled after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []


def _timeval(seconds: float) -> bytes:
    micros = max(1000, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def write_file(
    store: PendingWrite,
    batch: Batch,
    expect: Expectation,
    clock_ms: Callable[[], int] = lambda: int(time.time() * 1000),
) -> None:
    """Write payload, then header, into `store.descriptor`; OSError or DeadlineExceededError if it did not work.

    O_DIRECT where length and buffer are aligned (a quarter of the processor time), else buffered. The payload is only
    read; a thread that is stuck here after the batch was closed can do no harm, for its file never gets a name.
    """
    running = block.running_checksum() if expect.verify else None
    size = len(store.view)
    flags = fcntl.fcntl(store.descriptor, fcntl.F_GETFL)
    direct = bool(_O_DIRECT) and size % block.HEADER_BYTES == 0 and _set_flags(store.descriptor, flags | _O_DIRECT)
    done = 0
    while done < size:
        _refuse_if_closed(batch)
        piece = store.view[done : done + _BOUNCE_BYTES]
        try:
            count = os.pwrite(store.descriptor, piece, block.HEADER_BYTES + done)
        except OSError as e:
            if direct and e.errno in _UNSUPPORTED:  # the buffer is not aligned
                direct = not _set_flags(store.descriptor, flags)
                continue
            raise
        if running is not None:
            running.update(piece[:count])
        done += count
    if direct:
        _set_flags(store.descriptor, flags)  # the sidecar shares this open file
    header = block.BlockHeader(
        key=store.block_key,
        block_id=store.block_id,
        fingerprint=expect.fingerprint,
        tenant_tag=expect.tenant_tag,
        payload_len=size,
        payload_sum=running.digest() if running is not None else bytes(16),
        created_ms=clock_ms(),
        engine_block=store.engine_block,
        salt_tag=store.salt_tag,
    )
    encoded = block.encode_header(header)
    if os.pwrite(store.descriptor, encoded, 0) != len(encoded):
        raise OSError("short write of a block's header")


def _set_flags(descriptor: int, flags: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True
