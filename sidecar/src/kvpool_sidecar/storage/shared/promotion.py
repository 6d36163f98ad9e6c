"""How shared stores bring a block to this node: one promotion at a time per block, and files in memory."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.storage.base import Store, WriteTransaction

__all__ = ["Promotions", "keep_room", "open_memory", "write_at"]

_WAIT_S = 20.0


class Promotions:
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


def keep_room(local: Store, block_key: bytes, payload_len: int) -> WriteTransaction | None:
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
