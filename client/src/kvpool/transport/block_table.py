"""A sidecar's block table (kvpool.protocol.block_table) in this process: mapped read-only, with a cache of its answers.

A set of this process has the block ids that were found, so that another lookup of them is one operation of the set. The
table's ring of removals keeps it current. A file that could shrink is never mapped, for a read beyond its end would end
the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError
from kvpool.protocol import block_table as layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BlockTable"]

_F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_MAX_CACHED = 1 << 16  # ids: 15 MB
_TAG = layout.TAG_BYTES


class BlockTable:
    """Thread-safe. Maps the file of `descriptor`, which the caller closes.

    Raises
    ------
    ProtocolError
        The file is not sealed as it must be, or is no table.
    OSError
        It cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = _mapped(descriptor)
        self._mask = layout.HEADER.unpack_from(self._memory)[1] - 1
        self._lock = threading.Lock()
        self._found: set[bytes] = set()  # ids
        self._by_tag: dict[bytes, bytes] = {}
        self._applied = layout.HEADER.unpack_from(self._memory)[3]  # removals

    @property
    def is_valid(self) -> bool:
        """False once the sidecar has replaced the table or does not renew it."""
        valid_until: int = layout.HEADER.unpack_from(self._memory)[layout.VALID_UNTIL]
        return time.monotonic_ns() < valid_until

    @property
    def removed(self) -> int:
        """Number of removals so far; -1 if the table is not valid."""
        _, _, valid_until, removed = layout.HEADER.unpack_from(self._memory)
        return int(removed) if time.monotonic_ns() < valid_until else -1

    def removals(self, first: int, end: int) -> list[bytes] | None:
        """Return the tags of the blocks that were removed between two counts; None if they are no longer known."""
        if not 0 <= end - first < layout.REMOVALS:
            return None
        tags = [self._removal(number) for number in range(first, end)]
        latest = layout.HEADER.unpack_from(self._memory)[3]
        return tags if latest - first < layout.REMOVALS else None

    def has_all(self, block_ids: Sequence[bytes]) -> bool:
        """Return whether the table has each of these blocks. False if it is not valid, or in use: this never waits."""
        _, _, valid_until, removed = layout.HEADER.unpack_from(self._memory)
        if time.monotonic_ns() >= valid_until:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if removed != self._applied:
                self._apply_removals(removed)
            return self._found.issuperset(block_ids) or self._find(block_ids)
        finally:
            self._lock.release()

    def forget(self, block_ids: Iterable[bytes]) -> None:
        """Ask the table again for blocks that could not be loaded."""
        with self._lock:
            for block_id in block_ids:
                self._found.discard(block_id)
                self._by_tag.pop(block_id[:_TAG], None)

    def _find(self, block_ids: Sequence[bytes]) -> bool:
        """Search the buckets for what the cache does not have; stop at the first block that is not there."""
        memory, mask, found, by_tag = self._memory, self._mask, self._found, self._by_tag
        start, size = layout.JOURNAL_END, layout.BUCKET_BYTES
        if len(found) + len(block_ids) > _MAX_CACHED:
            found.clear()
            by_tag.clear()
        for block_id in block_ids:
            if block_id in found:
                continue
            tag = block_id[:_TAG]
            first, second = layout.buckets_of(tag, mask)
            at = start + first * size
            if tag not in memory[at : at + size]:
                at = start + second * size
                if tag not in memory[at : at + size]:
                    return False
            if tag == layout.EMPTY:
                return False
            found.add(block_id)
            by_tag[tag] = block_id
        return True

    def _apply_removals(self, removed: int) -> None:
        """Drop what the sidecar has removed since the last call."""
        tags = self.removals(self._applied, removed)
        if tags is None:
            self._found.clear()
            self._by_tag.clear()
        else:
            for tag in tags:
                if (block_id := self._by_tag.pop(tag, None)) is not None:
                    self._found.discard(block_id)
        self._applied = removed

    def _removal(self, number: int) -> bytes:
        at = layout.JOURNAL_START + number % layout.REMOVALS * _TAG
        return self._memory[at : at + _TAG]


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & layout.REQUIRED_SEALS != layout.REQUIRED_SEALS:
        raise ProtocolError("a block table that others could change")
    size = os.fstat(descriptor).st_size
    if not layout.file_bytes(1) <= size <= layout.file_bytes(layout.MAX_SLOTS // layout.PLACES):
        raise ProtocolError(f"a block table of {size} bytes")
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    magic, buckets, _, _ = layout.HEADER.unpack_from(memory)
    if magic != layout.MAGIC or buckets & (buckets - 1) or layout.file_bytes(buckets) != size:
        with contextlib.suppress(BufferError):
            memory.close()
        raise ProtocolError("not a block table of this version")
    return memory
