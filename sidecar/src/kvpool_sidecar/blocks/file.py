"""Reads and verifies a block's file through its descriptor. The format is kvpool.protocol.block."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from dataclasses import replace
from typing import NamedTuple

from kvpool.errors import CorruptBlockError, RefusedError
from kvpool.protocol import block

__all__ = [
    "ANYTHING",
    "Expect",
    "acquire_read_lease",
    "codec_of",
    "copy",
    "fill_checksum",
    "header_of",
    "payload_checksum",
    "read_header",
    "read_start",
    "release_read_lease",
    "verify",
]

_CODEC_AT = 10  # kvpool.protocol.block
_STEP = 1 << 20  # stays in the processor's cache between read and checksum
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_buffers = threading.local()


class Expect(NamedTuple):
    """Expected header fields; None: any. `packed`: the block may be compressed or encrypted."""

    block_id: bytes | None = None
    tenant_tag: bytes | None = None
    packed: bool = False


ANYTHING = Expect()


def read_header(fd: int, key: bytes, stored_len: int, expect: Expect = ANYTHING) -> block.BlockHeader:
    """Header of the file `fd`, which must be of `key` and have exactly `stored_len` bytes behind it.

    That is the payload's length unless the block is compressed. CorruptBlockError otherwise.
    """
    size = os.fstat(fd).st_size
    if size != block.HEADER_BYTES + stored_len:
        raise CorruptBlockError(f"block file has {size} bytes", block_key=key.hex())
    where = key.hex()[:16]
    header = block.decode_header(os.pread(fd, block.HEADER_BYTES, 0), where=where, packed=expect.packed)
    block.require(header, block_key=key, block_id=expect.block_id, tenant_tag=expect.tenant_tag)
    if header.stored_len != stored_len:
        raise CorruptBlockError("block has another length", block_key=key.hex(), where=where)
    return header


def codec_of(fd: int) -> int:
    """Return the codec of the unverified header; CODEC_NONE for a file that is no block, which its reader detects."""
    start = os.pread(fd, _CODEC_AT + 1, 0)
    return start[_CODEC_AT] if len(start) > _CODEC_AT and start.startswith(block.MAGIC) else block.CODEC_NONE


def read_start(fd: int) -> bytes:
    """Return the header's bytes, leaving the page cache as it was: a single page keeps the others out of large folios.

    OSError. Changes the read-ahead of `fd`, which is for this alone.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    start = bytearray(block.HEADER_BYTES)
    if _NOWAIT:
        with contextlib.suppress(OSError):  # not cached, or not supported
            return bytes(start[: os.preadv(fd, [start], 0, _NOWAIT)])
    data = os.pread(fd, block.HEADER_BYTES, 0)
    os.posix_fadvise(fd, 0, block.HEADER_BYTES, os.POSIX_FADV_DONTNEED)
    return data


def header_of(fd: int, key: bytes | None = None) -> block.BlockHeader:
    """Return the header of the file `fd`, and close it. CorruptBlockError if it is undecodable or has another `key`."""
    try:
        header = block.decode_header(read_start(fd), packed=True)
    finally:
        os.close(fd)
    block.require(header, block_key=key)
    return header


def payload_checksum(fd: int, payload_len: int) -> bytes:
    """XXH3-128 of the payload, read in steps through one buffer per thread. CorruptBlockError if it is cut short."""
    buffer = getattr(_buffers, "buffer", None)
    if buffer is None:
        buffer = _buffers.buffer = memoryview(bytearray(_STEP))
    running = block.running_checksum()
    done = 0
    while done < payload_len:
        got = os.preadv(fd, [buffer[: min(_STEP, payload_len - done)]], block.HEADER_BYTES + done)
        if got == 0:
            raise CorruptBlockError("payload is truncated")
        running.update(buffer[:got])
        done += got
    return running.digest()


def copy(source: int, target: int, key: bytes, payload_len: int) -> None:
    """Write the block file `source` to the file `target`, verified while it passes. CorruptBlockError, OSError."""
    header = read_header(source, key, payload_len)
    start = os.pread(source, block.HEADER_BYTES, 0)
    step = memoryview(bytearray(_STEP))
    running = block.running_checksum()
    done = 0
    while done < payload_len:
        got = os.preadv(source, [step[: min(_STEP, payload_len - done)]], block.HEADER_BYTES + done)
        if got == 0:
            break
        running.update(step[:got])
        _write(target, step[:got], block.HEADER_BYTES + done)
        done += got
    block.require(header, payload_sum=running.digest)
    _write(target, memoryview(start), 0)


def _write(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, offset)
        piece, offset = piece[done:], offset + done


def verify(fd: int, key: bytes, payload_len: int) -> block.BlockHeader:
    """Header and payload of the file `fd` are whole and of `key`. CorruptBlockError otherwise."""
    header = read_header(fd, key, payload_len)
    block.require(header, payload_sum=lambda: payload_checksum(fd, payload_len))
    return header


def acquire_read_lease(fd: int) -> None:
    """Take a read lease on `fd`: the kernel refuses it while a writer has the file open (fcntl(2), F_SETLEASE).

    RefusedError if a writer remains. The lease lasts until `fd` is closed.
    """
    # a broken lease raises SIGIO, which ends a process by default: use a signal that is ignored by default
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        raise RefusedError("the file is still open for writing") from None


def release_read_lease(fd: int) -> None:
    """Release the lease."""
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def fill_checksum(fd: int, header: block.BlockHeader) -> block.BlockHeader:
    """The header with the payload's checksum, computed and written into the file `fd`.

    RefusedError if another process holds a lease on the file: opening it would wait until that lease is broken.
    """
    done = replace(header, payload_sum=payload_checksum(fd, header.payload_len))
    try:
        writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except BlockingIOError:
        raise RefusedError("another process holds a lease on the file", block_key=header.block_key.hex()) from None
    try:
        os.pwrite(writer, block.encode_header(done), 0)
    finally:
        os.close(writer)
    return done
