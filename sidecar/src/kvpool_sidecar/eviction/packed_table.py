"""A table of blocks in columns of machine words instead of objects: tens of bytes a block. Pure; the owner locks.

A block has a slot, a number from 1 on, for as long as it is in the table; columns are indexed by it. Keys are found by
linear hashing (Litwin, "Linear hashing: a new tool for file and table addressing", VLDB 1980): each insertion moves the
blocks of at most one bucket, so no insertion waits for a rehash of the whole table. Columns grow by a fixed number of
slots, each in another insertion, since the allocator may copy a column; freed slots are used again.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Entry", "KeyTable", "PackedTable"]

_GROWTH: Final = 1 << 10  # slots
_AHEAD: Final = 1 << 7  # free slots at which columns begin to grow, more than there are columns
_LOAD: Final = 2  # blocks in a bucket, on average
_FIRST_BUCKETS: Final = 64
_MAX_WORD: Final = (1 << 32) - 1
_TICKS: Final = 64  # a second; a time has 40 bits of them


class Entry(NamedTuple):
    """What a table knows of a block."""

    size: int  # bytes as allocated on the drive
    payload_len: int
    persisted_at: float  # Unix seconds; a table has them to within 16 ms
    uses: int = 0  # as saved; a table counts further itself
    tenant: bytes = b""  # tag
    created: float = 0.0  # Unix seconds
    drive: int = 0  # number of the drive that holds it


class KeyTable:
    """Slots by key. All keys have the length of the first one. Every operation is O(1)."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._key_bytes = 0
        self._heads = array("I", bytes(4 * _FIRST_BUCKETS))
        self._low = _FIRST_BUCKETS - 1
        self._high = 2 * _FIRST_BUCKETS - 1
        self._split = 0  # buckets below it use the larger mask
        self._free = 0  # slots of removed blocks, linked by `_next`
        self._fresh = 1  # slots from here on were never used
        self._ready = 0  # slots that all columns have
        self._growing: list[Callable[[], None]] = []
        self._columns: dict[str, array[int]] = {}
        self._next = self.column("next", "I")  # the next slot of the same bucket, or of the free slots
        self._state = self.column("state", "B")  # 0: no block
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def slots(self) -> int:
        """Number of slots, free ones included; slot 0 is none."""
        return self._fresh if self._ready else 0

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all columns, and of the buckets, for each slot."""
        columns = sum(column.itemsize for column in self._columns.values())
        return self._key_bytes + self._heads.itemsize // _LOAD + columns

    def column(self, name: str, typecode: str) -> array[int]:
        """Return a new column of zeros, or the one with this name; it grows with the table."""
        if name not in self._columns:
            self._columns[name] = array(typecode)
            self._extend(self._columns[name], self._ready + _GROWTH if self._growing else self._ready)
        return self._columns[name]

    def find(self, block_key: bytes) -> int:
        """Return the slot of a block; 0 if it is absent."""
        hashed = hash(block_key)
        bucket = hashed & self._low
        if bucket < self._split:
            bucket = hashed & self._high
        slot = self._heads[bucket]
        keys, width, following = self._keys, self._key_bytes, self._next
        while slot:
            if keys[slot * width : slot * width + width] == block_key:
                return slot
            slot = following[slot]
        return 0

    def key(self, slot: int) -> bytes:
        """Return the key of the block in a slot."""
        width = self._key_bytes
        return bytes(self._keys[slot * width : slot * width + width])

    def has(self, slot: int) -> bool:
        """Return whether there is a block in the slot."""
        return self._state[slot] != 0

    def insert(self, block_key: bytes, state: int = 1) -> int:
        """Add a block that is absent; return its slot. ValueError: the key has another length than the others."""
        width = self._key_bytes
        if len(block_key) != width:
            if width or not block_key:
                raise ValueError(f"a key of {len(block_key)} bytes, not {width}")
            width = self._key_bytes = len(block_key)
        slot = self._free
        if slot:
            self._free = self._next[slot]
        else:
            slot = self._take_fresh()
        self._keys[slot * width : slot * width + width] = block_key
        self._state[slot] = state
        self._count += 1
        bucket = self._bucket(block_key)
        self._next[slot] = self._heads[bucket]
        self._heads[bucket] = slot
        if self._count > _LOAD * len(self._heads):
            self._split_bucket()
        return slot

    def remove(self, slot: int) -> None:
        """Remove a block. Its slot is not used for another one before `release`."""
        bucket = self._bucket(self.key(slot))
        following = self._next
        here, after = self._heads[bucket], following[slot]
        if here == slot:
            self._heads[bucket] = after
        else:
            while following[here] != slot:
                here = following[here]
            following[here] = after
        self._state[slot] = 0
        self._count -= 1

    def release(self, slot: int) -> None:
        """Allow that the slot of a removed block is used again."""
        self._next[slot] = self._free
        self._free = slot

    def __iter__(self) -> Iterator[int]:
        state = self._state
        return (slot for slot in range(1, self._fresh) if state[slot])

    def _bucket(self, block_key: bytes) -> int:
        hashed = hash(block_key)
        bucket = hashed & self._low
        return hashed & self._high if bucket < self._split else bucket

    def _take_fresh(self) -> int:
        slot, self._fresh = self._fresh, self._fresh + 1
        while slot >= self._ready:
            self._grow()
        if self._growing or self._fresh + _AHEAD >= self._ready:
            self._grow()
        return slot

    def _grow(self) -> None:
        """Extend one column."""
        if not self._growing:
            target = self._ready + _GROWTH
            self._growing = [partial(self._extend, column, target) for column in self._columns.values()]
            self._growing.append(partial(self._extend_keys, target))
        self._growing.pop()()
        if not self._growing:
            self._ready += _GROWTH

    def _extend(self, column: array[int], slots: int) -> None:
        while len(column) < slots:
            column.frombytes(bytes(_GROWTH * column.itemsize))

    def _extend_keys(self, slots: int) -> None:
        self._keys += bytes(slots * self._key_bytes - len(self._keys))

    def _split_bucket(self) -> None:
        slot, bit = self._heads[self._split], self._low + 1
        stays = moves = 0
        following = self._next
        while slot:
            after = following[slot]
            if hash(self.key(slot)) & bit:
                following[slot], moves = moves, slot
            else:
                following[slot], stays = stays, slot
            slot = after
        self._heads[self._split] = stays
        self._heads.append(moves)
        self._split += 1
        if self._split > self._low:
            self._low, self._high, self._split = self._high, 2 * self._high + 1, 0


class PackedTable(KeyTable):
    """Entries by key. Columns that no entry needs take no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.size = self.column("size", "I")
        self._payload = self.column("payload", "I")
        self._time = self.column("time", "I")
        self._time_low = self.column("time_low", "B")
        self._uses = self.column("uses", "B")
        self._tags: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._tenant: array[int] | None = None
        self._created: array[int] | None = None

    def add(self, block_key: bytes, entry: Entry) -> int:
        """Add a block that is absent; return its slot. OverflowError: the drive's number is above 254."""
        slot = self.insert(block_key, entry.drive + 1)
        self.size[slot] = min(entry.size, _MAX_WORD)
        self._payload[slot] = min(entry.payload_len, _MAX_WORD)
        self.save(slot, entry.persisted_at, entry.uses)
        number = self._numbers.get(entry.tenant)
        if number is None:
            number = self._numbers[entry.tenant] = len(self._tags)
            self._tags.append(entry.tenant)
        if self._tenant is not None or number:
            if self._tenant is None:
                self._tenant = self.column("tenant", "I")
            self._tenant[slot] = number
        if self._created is not None or entry.created:
            if self._created is None:
                self._created = self.column("created", "d")
            self._created[slot] = entry.created  # type: ignore[call-overload]
        return slot

    def save(self, slot: int, persisted_at: float, uses: int) -> None:
        """Set what is known of the uses of a block after a restart."""
        ticks = min(max(0, int(persisted_at * _TICKS)), _MAX_WORD << 8)
        self._time[slot], self._time_low[slot] = ticks >> 8, ticks & 255
        self._uses[slot] = min(max(0, uses), 255)

    def drive(self, slot: int) -> int:
        """Return the number of the drive that holds the block."""
        return self._state[slot] - 1

    def persisted_at(self, slot: int) -> float:
        """Return the last use as persisted, Unix seconds."""
        return (self._time[slot] << 8 | self._time_low[slot]) / _TICKS

    def created(self, slot: int) -> float:
        """Return when the block was created, Unix seconds; 0: unknown."""
        return 0.0 if self._created is None else self._created[slot]

    def saved_uses(self, slot: int) -> int:
        """Return the number of uses as persisted."""
        return self._uses[slot]

    def tenant(self, slot: int) -> bytes:
        """Return the tag of the block's tenant."""
        return self._tags[0 if self._tenant is None else self._tenant[slot]]

    def entry(self, slot: int) -> Entry:
        """Return all that the table knows of a block."""
        return Entry(
            self.size[slot],
            self._payload[slot],
            self.persisted_at(slot),
            self._uses[slot],
            self.tenant(slot),
            self.created(slot),
            self._state[slot] - 1,
        )
