"""Eviction policies: a table of blocks and the order in which they are evicted. Pure; the owner locks.

A block's modification time persists its last use across restarts, to within `PERSIST_EVERY_S`. Its nanoseconds encode
the number of uses.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool_sidecar.eviction.packed_table import Entry, PackedTable
from kvpool_sidecar.eviction.pinning import PinSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvpool_sidecar.eviction.session_marks import SessionHint, SessionMarks

__all__ = ["PERSIST_EVERY_S", "DriveUsage", "Entry", "EvictionPolicy", "decode_uses", "encode_mtime_ns"]

PERSIST_EVERY_S = 600
_MARK_NS = 777_000_000  # uses are kept above it; a time that the kernel set is there once in four million
_MAX_USES = 255


def encode_mtime_ns(now: float, uses: int) -> int:
    """Return the modification time, in nanoseconds, that encodes the last use and the number of uses."""
    return int(now) * 1_000_000_000 + _MARK_NS + min(uses, _MAX_USES)


def decode_uses(mtime_ns: int) -> int:
    """Return the number of uses in a modification time; 0 if the time was not encoded by `encode_mtime_ns`."""
    uses = mtime_ns % 1_000_000_000 - _MARK_NS
    return uses if 0 <= uses <= _MAX_USES else 0


class DriveUsage(NamedTuple):
    """Blocks of a table on one drive."""

    total_bytes: int = 0
    blocks: int = 0


_NOTHING: Final = DriveUsage()


class BlockAccounts:
    """Bytes and blocks of a table, in total and by drive."""

    def __init__(self) -> None:
        self._by_drive: dict[int, DriveUsage] = {}
        self.total_bytes = 0

    def on_drive(self, drive: int) -> DriveUsage:
        """Return what the table has on the drive with this number."""
        return self._by_drive.get(drive, _NOTHING)

    def _account(self, entry: Entry, sign: int) -> None:
        self.total_bytes += sign * entry.size
        total, blocks = self._by_drive.get(entry.drive, _NOTHING)
        self._by_drive[entry.drive] = DriveUsage(total + sign * entry.size, blocks + sign)


class EvictionPolicy(BlockAccounts, abc.ABC):
    """Blocks, their sizes and the eviction order, of the slots of `_table`. Not thread-safe.

    All operations but `pop_victims` are O(1) unless noted.
    """

    persists_uses = True  # does a use change what a restart must know?

    def __init__(self) -> None:
        super().__init__()
        self._table = PackedTable()
        self._pins: PinSet | None = None
        self.persist_every_s: float = PERSIST_EVERY_S
        self.journal: dict[bytes, None] | None = None  # blocks that came or went since it was set, in order

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block_key: bytes) -> bool:
        return self._table.find(block_key) != 0

    def __iter__(self) -> Iterator[bytes]:
        return map(self._table.key, self._in_order() if self._pins is None else iter(self._table))

    def set_pins(self, pins: PinSet) -> None:
        """Evict the blocks of `pins`, which is empty, last."""
        self._pins = pins

    def configure_pins(self, budget_bytes: int, min_uses: int) -> None:
        """Pin up to `budget_bytes` of blocks used `min_uses` times; 0: none."""
        if self._pins is None:
            if budget_bytes:
                self.set_pins(PinSet(budget_bytes, min_uses))
            return
        self._unpin(self._pins.resize(budget_bytes, min_uses))
        if not budget_bytes:
            self._pins = None

    def _unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._admit(key, self._table.find(key))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks."""
        return 0 if self._pins is None else self._pins.total_bytes

    def get(self, block_key: bytes) -> Entry | None:
        """Return the entry of a block."""
        slot = self._table.find(block_key)
        return self._table.entry(slot) if slot else None

    def drive_of(self, block_key: bytes) -> int:
        """Return the number of a block's drive; -1 if the block is absent."""
        slot = self._table.find(block_key)
        return self._table.drive(slot) if slot else -1

    def add(self, block_key: bytes, entry: Entry) -> None:
        """Add a stored block, or replace it."""
        self.discard(block_key)
        slot = self._table.add(block_key, entry)
        self._account(entry, 1)
        self._note(block_key)
        self._admit(block_key, slot)

    def touch(self, block_key: bytes, now: float) -> bool:
        """Record a use. True if the file's modification time should be updated."""
        table = self._table
        slot = table.find(block_key)
        if not slot:
            return False
        if self._pins is None:
            self._use(block_key, slot)
        else:
            self._use_or_pin(block_key, slot, self._pins)
        if now - table.persisted_at(slot) < self.persist_every_s:
            return False
        table.save(slot, now, self.uses(block_key))
        return self.persists_uses

    @property
    def slots(self) -> int:
        """Number of places that `entries_in` can read; blocks that stay keep theirs."""
        return self._table.slots

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory that each place takes."""
        return self._table.bytes_per_slot

    def entries_in(self, slots: Iterable[int]) -> list[tuple[bytes, Entry]]:
        """Return the blocks in these places."""
        table = self._table
        return [(table.key(slot), table.entry(slot)) for slot in slots if table.has(slot)]

    def last_uses_in(self, slots: Iterable[int]) -> list[tuple[float, int]]:
        """Return the persisted last use of the blocks in these places, Unix seconds, with the place."""
        table = self._table
        return [(table.persisted_at(slot), slot) for slot in slots if table.has(slot)]

    def expired(self, idle_since: float, created_before: float, slots: Iterable[int] | None = None) -> list[bytes]:
        """Return blocks last used before `idle_since` or created before `created_before` (Unix seconds).

        The last use may be `persist_every_s` too early. O(blocks), or of those in `slots`.
        """
        table, late = self._table, idle_since - self.persist_every_s
        here = (slot for slot in (table if slots is None else slots) if table.has(slot))
        idle_or_old = (s for s in here if table.persisted_at(s) < late or 0 < table.created(s) < created_before)
        return [table.key(slot) for slot in idle_or_old]

    def discard(self, block_key: bytes) -> bool:
        """Remove a block. False if it was absent."""
        slot = self._table.find(block_key)
        if not slot:
            return False
        if self._pins is None or not self._pins.discard(block_key):
            self._forget(block_key, slot)
        self._take(slot)
        self._note(block_key)
        return True

    def pop_victims(
        self, need_bytes: int, max_count: int, *, at_least: int = 0, drive: int | None = None
    ) -> list[tuple[bytes, Entry]]:
        """Remove and return victims until `need_bytes` and `at_least` blocks are freed, at most `max_count`.

        With `drive` only blocks on that drive are taken: in this order as far as it is cheap, else O(blocks).
        """
        taken: list[tuple[bytes, Entry]] = []
        freed = 0
        while len(self) and len(taken) < max_count and (freed < need_bytes or len(taken) < at_least):
            if drive is not None and not self.on_drive(drive).blocks:
                break
            key, entry = self._pop(drive)
            taken.append((key, entry))
            freed += entry.size
        self._note(*(key for key, _ in taken))
        return taken

    def _pop(self, drive: int | None) -> tuple[bytes, Entry]:
        """Remove and return the next victim, of those on a drive; there is one."""
        return self._take(self._next_victim() if drive is None else self._next_on(drive))

    def _take(self, slot: int) -> tuple[bytes, Entry]:
        """Remove a block that is in no order from the table."""
        key, entry = self._table.key(slot), self._table.entry(slot)
        self._table.remove(slot)
        self._release(slot)
        self._account(entry, -1)
        return key, entry

    def _release(self, slot: int) -> None:
        """Allow that the slot is used again."""
        self._table.release(slot)

    def _next_on(self, drive: int) -> int:
        """Return the next victim on a drive that has blocks; it is out of the order."""
        slot = self._find_on(drive)
        key = self._table.key(slot)
        if self._pins is None or not self._pins.discard(key):
            self._forget(key, slot)
        return slot

    def _find_on(self, drive: int) -> int:
        for slots in (self._in_order(), self._table):
            for slot in slots:
                if self._table.drive(slot) == drive:
                    return slot
        raise KeyError(drive)

    def _note(self, *keys: bytes) -> None:
        if self.journal is not None:
            for key in keys:
                self.journal.pop(key, None)
                self.journal[key] = None

    def _next_victim(self) -> int:
        if self._pins is not None and len(self._pins) == len(self):
            return self._table.find(self._pins.pop_last())
        return self._evict()

    def _use_or_pin(self, block_key: bytes, slot: int, pins: PinSet) -> None:
        if block_key not in pins:
            self._use(block_key, slot)
        if pins.record_use(block_key, self._table.size[slot]):
            self._forget(block_key, slot)
        self._unpin(pins.expired())

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        """Add a victim again that could not be deleted; it is the next victim."""
        self.add(block_key, entry)
        self._demote(self._table.find(block_key))

    def sort_by_last_use(self) -> None:
        """Order the entries by last use, as after a scan. O(blocks)."""
        table = self._table
        self._reset()
        for slot in sorted(table, key=table.persisted_at):
            key = table.key(slot)
            if self._pins is None or key not in self._pins:
                self._admit(key, slot)

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:
        """Record a prompt's blocks in order: each is useless without its predecessors."""

    def hint(self, hint: SessionHint, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        """Apply a session's hint to its prompt's blocks, in order; return how many blocks took it."""
        return 0

    @property
    def marks(self) -> SessionMarks | None:
        """What sessions said about these blocks; None if the order takes no hints."""
        return None

    def uses(self, block_key: bytes) -> int:
        """Return the number of uses that this policy counts."""
        if self._pins is not None and block_key in self._pins:
            return self._pins.uses(block_key)
        slot = self._table.find(block_key)
        return self._uses_of(slot) if slot else 0

    def _in_order(self) -> Iterator[int]:
        return iter(self._table)

    def _uses_of(self, slot: int) -> int:
        return self._table.saved_uses(slot)

    @abc.abstractmethod
    def _admit(self, block_key: bytes, slot: int) -> None:
        """Add a block to the order; it is in the table."""

    @abc.abstractmethod
    def _use(self, block_key: bytes, slot: int) -> None:
        """Update the order after a use."""

    @abc.abstractmethod
    def _forget(self, block_key: bytes, slot: int) -> None:
        """Remove a block from the order; it is still in the table."""

    @abc.abstractmethod
    def _evict(self) -> int:
        """Remove the next victim from the order and return its slot. The order is not empty."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Remove all blocks from the order."""

    def _demote(self, slot: int) -> None:
        """Make a block the next victim."""
