"""Eviction policies: a table of blocks and the order in which they are evicted. Pure; the owner locks.

A block's modification time persists its last use across restarts, to within `PERSIST_EVERY_S`. Its nanoseconds encode
the number of uses.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool_sidecar.eviction.pinning import PinSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvpool_sidecar.eviction.session_marks import SessionHint, SessionMarks

__all__ = ["PERSIST_EVERY_S", "DriveUsage", "Entry", "EvictionPolicy", "decode_uses", "encode_mtime_ns"]

PERSIST_EVERY_S = 600
_MARK_NS = 777_000_000  # uses are kept above it; a time that the kernel set is there once in four million
_MAX_USES = 255


class Entry(NamedTuple):
    size: int  # bytes as allocated on the drive
    payload_len: int
    persisted_at: float  # Unix seconds
    uses: int = 0  # as saved; a table counts further itself
    tenant: bytes = b""  # tag
    created: float = 0.0  # Unix seconds
    drive: int = 0  # number of the drive that holds it


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


class EvictionPolicy(abc.ABC):
    """Blocks, their sizes and the eviction order. Not thread-safe. All operations but `pop_victims` are O(1) unless
    noted.
    """

    persists_uses = True  # does a use change what a restart must know?

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._pins: PinSet | None = None
        self._by_drive: dict[int, DriveUsage] = {}
        self.total_bytes = 0
        self.persist_every_s: float = PERSIST_EVERY_S
        self.journal: dict[bytes, None] | None = None  # blocks that came or went since it was set, in order

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_key: bytes) -> bool:
        return block_key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return self._in_order() if self._pins is None else iter(self._entries)

    def set_pins(self, pins: PinSet) -> None:
        """Evict the blocks of `pins`, which is empty, last."""
        self._pins = pins

    def configure_pins(self, budget_bytes: int, min_uses: int) -> None:
        """Pin up to `budget_bytes` of blocks used `min_uses` times; 0: none."""
        if self._pins is None:
            if budget_bytes:
                self.set_pins(PinSet(budget_bytes, min_uses))
            return
        for key in self._pins.resize(budget_bytes, min_uses):
            self._admit(key, self._entries[key])
        if not budget_bytes:
            self._pins = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks."""
        return 0 if self._pins is None else self._pins.total_bytes

    def get(self, block_key: bytes) -> Entry | None:
        """Return the entry of a block."""
        return self._entries.get(block_key)

    def add(self, block_key: bytes, entry: Entry) -> None:
        """Add a stored block, or replace it."""
        self.discard(block_key)
        self._entries[block_key] = entry
        self._account(entry, 1)
        self._note(block_key)
        self._admit(block_key, entry)

    def touch(self, block_key: bytes, now: float) -> bool:
        """Record a use. True if the file's modification time should be updated."""
        entry = self._entries.get(block_key)
        if entry is None:
            return False
        if self._pins is None:
            self._use(block_key)
        else:
            self._use_or_pin(block_key, entry, self._pins)
        if now - entry.persisted_at < self.persist_every_s:
            return False
        self._entries[block_key] = entry._replace(persisted_at=now, uses=self.uses(block_key))
        return self.persists_uses

    def keys(self) -> list[bytes]:
        """Return the keys of all blocks, unordered. Atomic: the owner need not lock."""
        return list(self._entries)

    def expired(self, idle_since: float, created_before: float, among: Iterable[bytes] | None = None) -> list[bytes]:
        """Return blocks last used before `idle_since` or created before `created_before` (Unix seconds).

        The last use may be `persist_every_s` too early. O(blocks), or of those in `among`.
        """
        late = idle_since - self.persist_every_s
        return [k for k, e in self._items(among) if e.persisted_at < late or 0 < e.created < created_before]

    def _items(self, among: Iterable[bytes] | None) -> Iterable[tuple[bytes, Entry]]:
        if among is None:
            return self._entries.items()
        return ((key, entry) for key in among if (entry := self._entries.get(key)) is not None)

    def discard(self, block_key: bytes) -> bool:
        """Remove a block. False if it was absent."""
        entry = self._entries.pop(block_key, None)
        if entry is None:
            return False
        self._account(entry, -1)
        self._note(block_key)
        if self._pins is None or not self._pins.discard(block_key):
            self._forget(block_key)
        return True

    def on_drive(self, drive: int) -> DriveUsage:
        """Return what the table has on the drive with this number."""
        return self._by_drive.get(drive, _NOTHING)

    def pop_victims(
        self, need_bytes: int, max_count: int, *, at_least: int = 0, drive: int | None = None
    ) -> list[tuple[bytes, Entry]]:
        """Remove and return victims until `need_bytes` and `at_least` blocks are freed, at most `max_count`.

        With `drive` only blocks on that drive are taken: in this order as far as it is cheap, else O(blocks).
        """
        taken: list[tuple[bytes, Entry]] = []
        freed = 0
        while self._entries and len(taken) < max_count and (freed < need_bytes or len(taken) < at_least):
            if drive is None:
                key = self._next_victim()
            elif self.on_drive(drive).blocks:
                key = self._next_on(drive)
            else:
                break
            entry = self._entries.pop(key)
            self._account(entry, -1)
            taken.append((key, entry))
            freed += entry.size
        self._note(*(key for key, _ in taken))
        return taken

    def _account(self, entry: Entry, sign: int) -> None:
        self.total_bytes += sign * entry.size
        total, blocks = self._by_drive.get(entry.drive, _NOTHING)
        self._by_drive[entry.drive] = DriveUsage(total + sign * entry.size, blocks + sign)

    def _next_on(self, drive: int) -> bytes:
        """Remove and return the next victim on a drive that has blocks."""
        key = self._find_on(drive)
        if self._pins is None or not self._pins.discard(key):
            self._forget(key)
        return key

    def _find_on(self, drive: int) -> bytes:
        for keys in (self._in_order(), self._entries):
            for key in keys:
                if self._entries[key].drive == drive:
                    return key
        raise KeyError(drive)

    def _note(self, *keys: bytes) -> None:
        if self.journal is not None:
            for key in keys:
                self.journal.pop(key, None)
                self.journal[key] = None

    def _next_victim(self) -> bytes:
        if self._pins is not None and len(self._pins) == len(self._entries):
            return self._pins.pop_last()
        return self._evict()

    def _use_or_pin(self, block_key: bytes, entry: Entry, pins: PinSet) -> None:
        if block_key not in pins:
            self._use(block_key)
        if pins.record_use(block_key, entry.size):
            self._forget(block_key)
        for faded in pins.expired():
            self._admit(faded, self._entries[faded])

    def reinsert(self, block_key: bytes, entry: Entry) -> None:
        """Add a victim again that could not be deleted; it is the next victim."""
        self.add(block_key, entry)
        self._demote(block_key)

    def load(self, entries: Sequence[tuple[bytes, Entry]]) -> None:
        """Fill an empty table with blocks, in the order of their last uses."""
        self._entries = dict(entries)
        for _, entry in entries:
            self._account(entry, 1)
        self.sort_by_last_use()

    def sort_by_last_use(self) -> None:
        """Order the entries by last use, as after a scan."""
        found = sorted(self._entries.items(), key=lambda item: item[1].persisted_at)
        self._reset()
        self._entries = dict(found)
        for key, entry in found:
            if self._pins is None or key not in self._pins:
                self._admit(key, entry)

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:  # noqa: B027 - most orders have no use for it
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
        return (
            self._uses_of(block_key)
            if self._pins is None or block_key not in self._pins
            else self._pins.uses(block_key)
        )

    def _in_order(self) -> Iterator[bytes]:
        return iter(self._entries)

    def _uses_of(self, block_key: bytes) -> int:
        entry = self._entries.get(block_key)
        return 0 if entry is None else entry.uses

    @abc.abstractmethod
    def _admit(self, block_key: bytes, entry: Entry) -> None:
        """Add a block to the order; `entry` is in the table."""

    @abc.abstractmethod
    def _use(self, block_key: bytes) -> None:
        """Update the order after a use."""

    @abc.abstractmethod
    def _forget(self, block_key: bytes) -> None:
        """Remove a block from the order."""

    @abc.abstractmethod
    def _evict(self) -> bytes:
        """Remove and return the next victim. The order is not empty."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Remove all blocks from the order."""

    def _demote(self, block_key: bytes) -> None:  # noqa: B027 - where there is no first place the block takes its chance
        """Make a block the next victim."""
