"""One block table (kvpool.protocol.block_table): the memory file, and what the sidecar must know to change it.

The file is sealed before anybody else has it: the kernel then refuses every new writable mapping, write and change of
size, for every descriptor. The mapping that this process made before is the only one that writes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array

from kvpool.protocol import block_table as layout

__all__ = ["SLOT_BYTES", "BlockTableWriter"]

SLOT_BYTES = layout.TAG_BYTES + 16
"""Memory of one place for a tag, shared and private."""
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL, Linux 6.3
_KEY_PLACES = 16
_KEYS_PER_SLOT = 2  # places for keys per place for a tag: sets of 16 are then rarely full
_MAX_FILLED = 0.75


class BlockTableWriter:
    """Writes one table. Not thread-safe: the owner holds a lock. OSError if the kernel cannot make such a file.

    `slots`: places for tags, a power of two from 16 to MAX_SLOTS.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.count = 0
        self._mask = slots // layout.PLACES - 1
        size = layout.file_bytes(self._mask + 1)
        self._fd = _memory_file()
        try:
            os.fchmod(self._fd, 0o400)  # clients get a descriptor; other users cannot open it again by /proc
            os.ftruncate(self._fd, size)
            os.posix_fallocate(self._fd, 0, size)  # so that this process's memory is charged, not a reader's
            self._memory = mmap.mmap(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, layout.REQUIRED_SEALS)
        except BaseException:
            os.close(self._fd)
            raise
        self._fields = memoryview(self._memory)[: layout.HEADER.size].cast("Q")  # for stores of 8 bytes
        self._keys = array("Q", bytes(8 * slots))  # first half of the key of each place's block; 0: free
        self._places = array("I", bytes(4 * slots * _KEYS_PER_SLOT))  # place + 1 by key, in sets
        self._fields[0], self._fields[1] = layout.MAGIC, self._mask + 1

    def open_for_reading(self) -> int:
        """Return a new read-only descriptor of the file, which the caller closes."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def set_valid_until(self, nanoseconds: int) -> None:
        """Set until when readers may use the table, in nanoseconds of the monotonic clock; 0: not any more."""
        self._fields[layout.VALID_UNTIL] = nanoseconds

    def close(self) -> None:
        """Invalidate the table for its readers and release the memory that they do not map."""
        self.set_valid_until(0)
        self._fields.release()
        self._memory.close()
        os.close(self._fd)

    def __contains__(self, block_key: bytes) -> bool:
        return self._find_key(_half(block_key)) >= 0

    @property
    def is_full(self) -> bool:
        """True if no place is free but by replacing another block."""
        return self.count >= self.slots * _MAX_FILLED

    def insert(self, tag: bytes, block_key: bytes, *, replaces: bool = False) -> bool:
        """Add a block; False if there is no place for it. Adding it again changes nothing.

        `replaces`: remove another block from a full table.
        """
        buckets = layout.buckets_of(tag, self._mask)
        if tag == layout.EMPTY or any(self._has_tag(tag, bucket) for bucket in buckets):
            return True
        if self.is_full:
            if not replaces:
                return False
            self._replace(buckets[0])
        return self._add(tag, _half(block_key), buckets)

    def remove(self, block_key: bytes) -> bool:
        """Remove a block; False if it is not in the table."""
        return self._remove(_half(block_key))

    def copy_places(self, start: int, count: int, other: BlockTableWriter) -> None:
        """Add the blocks of `count` places to another table, as far as they fit."""
        for place, half in enumerate(self._keys[start : start + count], start):
            if half:
                tag = self._tag(place)
                other._add(tag, half, layout.buckets_of(tag, other._mask))

    def _remove(self, half: int) -> bool:
        at = self._find_key(half)
        if at < 0:
            return False
        place = self._places[at] - 1
        tag = self._tag(place)
        self._places[at] = self._keys[place] = 0
        self.count -= 1
        self._write_tag(place, layout.EMPTY)
        number = self._fields[3]
        start = layout.JOURNAL_START + number % layout.REMOVALS * layout.TAG_BYTES
        self._memory[start : start + layout.TAG_BYTES] = tag
        self._fields[3] = number + 1  # last: a reader that sees it finds the tag
        return True

    def _replace(self, bucket: int) -> None:
        """Remove a block of this bucket, if it has one."""
        start = bucket * layout.PLACES
        used = [half for half in self._keys[start : start + layout.PLACES] if half]
        if used:
            self._remove(used[self._fields[3] % len(used)])

    def _add(self, tag: bytes, half: int, buckets: tuple[int, int]) -> bool:
        if self._find_key(half) >= 0:
            return True
        start = self._set_of(half)
        try:
            at = start + self._places[start : start + _KEY_PLACES].index(0)
        except ValueError:
            return False
        place = self._free_place(buckets[0])
        if place < 0:
            place = self._free_place(buckets[1])
        if place < 0:
            place = self._make_room(buckets[0])
        if place < 0:
            return False
        self._keys[place], self._places[at] = half, place + 1
        self._write_tag(place, tag)
        self.count += 1
        return True

    def _make_room(self, bucket: int) -> int:
        """Move one tag of a full bucket to its other bucket; return its place, or -1. Readers always find the tag."""
        for place in range(bucket * layout.PLACES, (bucket + 1) * layout.PLACES):
            tag, half = self._tag(place), self._keys[place]
            other = next((b for b in layout.buckets_of(tag, self._mask) if b != bucket), bucket)
            free = self._free_place(other)
            at = self._find_key(half)
            if free < 0 or at < 0:
                continue
            self._write_tag(free, tag)
            self._keys[free], self._keys[place], self._places[at] = half, 0, free + 1
            return place
        return -1

    def _free_place(self, bucket: int) -> int:
        start = bucket * layout.PLACES
        try:
            return start + self._keys[start : start + layout.PLACES].index(0)
        except ValueError:
            return -1

    def _has_tag(self, tag: bytes, bucket: int) -> bool:
        start = layout.JOURNAL_END + bucket * layout.BUCKET_BYTES
        return tag in self._memory[start : start + layout.BUCKET_BYTES]

    def _set_of(self, half: int) -> int:
        return half % (len(self._places) // _KEY_PLACES) * _KEY_PLACES

    def _find_key(self, half: int) -> int:
        start = self._set_of(half)
        for n, place in enumerate(self._places[start : start + _KEY_PLACES], start):
            if place and self._keys[place - 1] == half:
                return n
        return -1

    def _tag(self, place: int) -> bytes:
        start = layout.JOURNAL_END + place * layout.TAG_BYTES
        return self._memory[start : start + layout.TAG_BYTES]

    def _write_tag(self, place: int, tag: bytes) -> None:
        start = layout.JOURNAL_END + place * layout.TAG_BYTES
        self._memory[start : start + layout.TAG_BYTES] = tag


def _half(block_key: bytes) -> int:
    """Return 8 bytes of a key, not 0. Keys are HMACs, so their bytes are uniform."""
    return int.from_bytes(block_key[:8], "little") or 1


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("kvpool-blocks", flags | _NOEXEC_SEAL)
    except OSError:  # an older kernel
        return os.memfd_create("kvpool-blocks", flags)
