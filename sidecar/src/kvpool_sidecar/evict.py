"""What goes first when space is needed: the least recently opened block. Pure; the owner locks.

Recency comes from OPEN. `saved_at` is when the recency was last written to the file's modification time, so that the
order survives a restart to within `SAVE_EVERY_S`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SAVE_EVERY_S", "Entry", "Lru"]

SAVE_EVERY_S = 600


class Entry(NamedTuple):
    size: int  # bytes as allocated on the drive
    payload_len: int
    saved_at: float  # Unix seconds


class Lru:
    """Blocks in order of use, least recent first, and their bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """What is known of one block."""
        return self._entries.get(key)

    def add(self, key: bytes, entry: Entry) -> None:
        """A block that was used just now; a known one is replaced."""
        self.discard(key)
        self._entries[key] = entry
        self.total_bytes += entry.size

    def touch(self, key: bytes, now: float) -> bool:
        """Mark as just used. True if the file's modification time should be brought up to date."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._entries.move_to_end(key)
        if now - entry.saved_at < SAVE_EVERY_S:
            return False
        self._entries[key] = entry._replace(saved_at=now)
        return True

    def discard(self, key: bytes) -> bool:
        """Take a block out. False if it was not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.total_bytes -= entry.size
        return True

    def take_victims(self, need_bytes: int, max_count: int, *, at_least: int = 0) -> list[tuple[bytes, Entry]]:
        """Take out the least recently used until `need_bytes` and `at_least` so many are gone, `max_count` at most."""
        taken: list[tuple[bytes, Entry]] = []
        freed = 0
        while self._entries and len(taken) < max_count and (freed < need_bytes or len(taken) < at_least):
            key, entry = self._entries.popitem(last=False)
            taken.append((key, entry))
            freed += entry.size
        self.total_bytes -= freed
        return taken

    def put_back(self, key: bytes, entry: Entry) -> None:
        """A victim that could not be removed."""
        self.add(key, entry)
        self._entries.move_to_end(key, last=False)

    def sort_by_saved(self) -> None:
        """Once after a scan, which meets files in no order; later uses have a later `saved_at` or none was due."""
        self._entries = OrderedDict(sorted(self._entries.items(), key=lambda item: item[1].saved_at))
