"""Write one block into the file of a store: header and payload, checksummed on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from kvpool.protocol import block
from kvpool.transport.transfer import PIECE_BYTES, UNSUPPORTED, refuse_if_over, rest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.transport.pending import Batch, Expectation, PendingWrite

__all__ = ["write_file"]

_WRITE_BYTES = 4 << 20  # per write to a drive
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_SUM = bytes(16)  # the sidecar computes it


def write_file(
    store: PendingWrite,
    batch: Batch,
    expect: Expectation,
    clock_ms: Callable[[], int] = lambda: int(time.time() * 1000),
) -> None:
    """Write header and payload into `store.descriptor`. Raises OSError or DeadlineExceededError.

    A small block is one system call; a large one is written and checksummed in pieces, with O_DIRECT where length and
    buffer are aligned (a quarter of the processor time on a drive). The payload is only read. A thread that is stuck
    here after the batch was closed does no harm: its file never gets a name.
    """
    if len(store.view) <= PIECE_BYTES:
        refuse_if_over(batch)
        checksum = block.checksum(store.view) if expect.verify else _NO_SUM
        _write_all(store.descriptor, [memoryview(_header_of(store, expect, checksum, clock_ms())), store.view])
    else:
        checksum = _write_pieces(store, batch, verify=expect.verify)
        _write_all(store.descriptor, [memoryview(_header_of(store, expect, checksum, clock_ms()))])


def _write_pieces(store: PendingWrite, batch: Batch, *, verify: bool) -> bytes:
    """Write the payload behind the place of the header. Return its checksum."""
    running = block.running_checksum() if verify else None
    size = len(store.view)
    flags = fcntl.fcntl(store.descriptor, fcntl.F_GETFL)
    direct = bool(_O_DIRECT) and size % block.HEADER_BYTES == 0 and _set_flags(store.descriptor, flags | _O_DIRECT)
    done = 0
    while done < size:
        refuse_if_over(batch)
        piece = store.view[done : done + _WRITE_BYTES]
        try:
            count = os.pwrite(store.descriptor, piece, block.HEADER_BYTES + done)
        except OSError as e:
            if direct and e.errno in UNSUPPORTED:  # the buffer is not aligned
                direct = not _set_flags(store.descriptor, flags)
                continue
            raise
        if running is not None:
            running.update(piece[:count])
        done += count
    if direct:
        _set_flags(store.descriptor, flags)  # the sidecar shares this open file
    return running.digest() if running is not None else _NO_SUM


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    """Write `views` one after the other from the start of the file."""
    at = 0
    while views:
        count = os.pwritev(descriptor, views, at)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        at += count
        views = rest_of(views, count)


def _header_of(store: PendingWrite, expect: Expectation, checksum: bytes, created_ms: int) -> bytes:
    header = block.BlockHeader(
        block_key=store.block_key,
        block_id=store.block_id,
        fingerprint=expect.fingerprint,
        tenant_tag=expect.tenant_tag,
        payload_len=len(store.view),
        payload_sum=checksum,
        created_ms=created_ms,
        engine_block=store.engine_block,
        salt_tag=store.salt_tag,
    )
    return block.encode_header(header)


def _set_flags(descriptor: int, flags: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True
