"""Changes of this node's blocks that are not announced yet: the latest state of each block. Bounded; pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Journal"]


class Journal:
    """Not thread-safe. Holds at most `limit` blocks; a state is the payload length, or None for a removed block.

    What does not fit is dropped. A dropped announcement sets `is_incomplete`: comparing the store with the index finds
    it later. A dropped withdrawal needs nothing: readers detect stale entries.
    """

    def __init__(self, limit: int) -> None:
        self.is_incomplete = False
        self._limit = limit
        self._stored: dict[bytes, int] = {}
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._stored) + len(self._removed)

    @property
    def announcements(self) -> int:
        """Number of blocks to announce."""
        return len(self._stored)

    def put(self, states: Mapping[bytes, int | None]) -> None:
        """Record the latest state of these blocks, in place of an earlier one."""
        for key, length in states.items():
            if length is None:
                self._stored.pop(key, None)
                if len(self) < self._limit:
                    self._removed[key] = None
                continue
            self._removed.pop(key, None)
            if key in self._stored or len(self) < self._limit:
                self._stored[key] = length
            else:
                self.is_incomplete = True

    def first(self, count: int, *, only_withdrawals: bool = False) -> dict[bytes, int | None]:
        """Return the oldest changes, at most `count`, half of them withdrawals; they stay until `done`."""
        withdrawn = count if only_withdrawals or not self._stored else count // 2
        changes: dict[bytes, int | None] = dict.fromkeys(itertools.islice(self._removed, withdrawn))
        if not only_withdrawals:
            changes.update(itertools.islice(self._stored.items(), count - len(changes)))
        return changes

    def done(self, changes: Mapping[bytes, int | None]) -> None:
        """Remove published changes, except of blocks that have changed since."""
        for key, length in changes.items():
            if length is None:
                self._removed.pop(key, None)
            elif self._stored.get(key) == length:
                del self._stored[key]
