"""Eviction policies: a table of blocks and the order in which they are evicted. Pure; the owner locks.

A block's modification time persists its last use across restarts, to within `PERSIST_EVERY_S`. Its nanoseconds encode
the number of uses.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.eviction.pinning import PinSet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PERSIST_EVERY_S", "Entry", "EvictionPolicy", "decode_uses", "encode_mtime_ns"]

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


def encode_mtime_ns(now: float, uses: int) -> int:
    """The modification time, in nanoseconds, that says both."""
    return int(now) * 1_000_000_000 + _MARK_NS + min(uses, _MAX_USES)


def decode_uses(mtime_ns: int) -> int:
    """How many uses a modification time tells of; 0 if it is not one of ours."""
    uses = mtime_ns % 1_000_000_000 - _MARK_NS
    return uses if 0 <= uses <= _MAX_USES else 0


class EvictionPolicy(abc.ABC):
    """Blocks, their bytes, and what goes first. Not thread-safe. All calls but `pop_victims` take constant time."""

    persists_uses = True  # does a use change what a restart must know?

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._pins: PinSet | None = None
        self.total_bytes = 0
        self.persist_every_s: float = PERSIST_EVERY_S
        self.journal: dict[bytes, None] | None = None  # blocks that came or went since it was set, in order

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return self._in_order() if self._pins is None else iter(self._entries)

    def set_pins(self, pins: PinSet) -> None:
        """What `pins` holds goes last; it holds nothing yet."""
        self._pins = pins

    def configure_pins(self, budget_bytes: int, min_uses: int) -> None:
        """So many bytes of blocks that were used so often go last from now on; 0: none."""
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
        """Bytes of blocks that go last."""
        return 0 if self._pins is None else self._pins.total_bytes

    def get(self, key: bytes) -> Entry | None:
        """What is known of one block."""
        return self._entries.get(key)

    def add(self, key: bytes, entry: Entry) -> None:
        """A block that was stored just now; a known one is replaced."""
        self.discard(key)
        self._entries[key] = entry
        self.total_bytes += entry.size
        self._note(key)
        self._admit(key, entry)

    def touch(self, key: bytes, now: float) -> bool:
        """Mark as just used. True if the file's modification time should be brought up to date."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if self._pins is None:
            self._use(key)
        else:
            self._use_or_pin(key, entry, self._pins)
        if now - entry.persisted_at < self.persist_every_s:
            return False
        self._entries[key] = entry._replace(persisted_at=now, uses=self.uses(key))
        return self.persists_uses

    def expired(self, idle_since: float, created_before: float) -> list[bytes]:
        """Blocks whose last use is older than `idle_since`, or that were made before `created_before` (Unix seconds).

        A use counts as of when it was noted, up to `persist_every_s` too early. Takes time for every block."""
        late = idle_since - self.persist_every_s
        return [k for k, e in self._entries.items() if e.persisted_at < late or 0 < e.created < created_before]

    def used_since(self, when: float) -> list[tuple[bytes, int, float]]:
        """Key, payload length and last use (Unix seconds) of the blocks used after `when`, noted as for `expired`.

        Takes time for every block."""
        since = when - self.persist_every_s
        return [(k, e.payload_len, e.persisted_at) for k, e in self._entries.items() if e.persisted_at >= since]

    def last_uses(self) -> list[float]:
        """When each block was last used, in no order. Takes time for every block."""
        return [entry.persisted_at for entry in self._entries.values()]

    def discard(self, key: bytes) -> bool:
        """Take a block out. False if it was not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.total_bytes -= entry.size
        self._note(key)
        if self._pins is None or not self._pins.discard(key):
            self._forget(key)
        return True

    def pop_victims(self, need_bytes: int, max_count: int, *, at_least: int = 0) -> list[tuple[bytes, Entry]]:
        """Take out what goes first until `need_bytes` and `at_least` so many are gone, `max_count` at most."""
        taken: list[tuple[bytes, Entry]] = []
        freed = 0
        while self._entries and len(taken) < max_count and (freed < need_bytes or len(taken) < at_least):
            key = self._next_victim()
            entry = self._entries.pop(key)
            taken.append((key, entry))
            freed += entry.size
        self.total_bytes -= freed
        self._note(*(key for key, _ in taken))
        return taken

    def _note(self, *keys: bytes) -> None:
        if self.journal is not None:
            for key in keys:
                self.journal.pop(key, None)
                self.journal[key] = None

    def _next_victim(self) -> bytes:
        if self._pins is not None and len(self._pins) == len(self._entries):
            return self._pins.pop_last()
        return self._evict()

    def _use_or_pin(self, key: bytes, entry: Entry, pins: PinSet) -> None:
        if key not in pins:
            self._use(key)
        if pins.record_use(key, entry.size):
            self._forget(key)
        for faded in pins.expired():
            self._admit(faded, self._entries[faded])

    def reinsert(self, key: bytes, entry: Entry) -> None:
        """A victim that could not be removed."""
        self.add(key, entry)
        self._demote(key)

    def sort_by_last_use(self) -> None:
        """Once after a scan, which meets files in no order; later uses have a later `persisted_at` or none was due."""
        found = sorted(self._entries.items(), key=lambda item: item[1].persisted_at)
        self._reset()
        self._entries = dict(found)
        for key, entry in found:
            if self._pins is None or key not in self._pins:
                self._admit(key, entry)

    def observe_sequence(self, keys: Sequence[bytes], tenant: bytes = b"") -> None:  # noqa: B027 - most orders have no use for it
        """A prompt's blocks in order, from its first on: each is worth nothing without those before it."""

    def uses(self, key: bytes) -> int:
        """How often a block was used, as far as this policy counts."""
        return self._uses_of(key) if self._pins is None or key not in self._pins else self._pins.uses(key)

    def _in_order(self) -> Iterator[bytes]:
        return iter(self._entries)

    def _uses_of(self, key: bytes) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.uses

    @abc.abstractmethod
    def _admit(self, key: bytes, entry: Entry) -> None:
        """A new block; `entry` is in the table already."""

    @abc.abstractmethod
    def _use(self, key: bytes) -> None:
        """A block of the table was used."""

    @abc.abstractmethod
    def _forget(self, key: bytes) -> None:
        """A block was taken out, though it was not its turn."""

    @abc.abstractmethod
    def _evict(self) -> bytes:
        """The block that goes first, which is forgotten. There is at least one."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Forget all blocks."""

    def _demote(self, key: bytes) -> None:  # noqa: B027 - where there is no first place the block takes its chance
        """Put a block where it goes first."""
