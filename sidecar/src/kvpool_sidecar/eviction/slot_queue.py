"""Queues of a table's slots: doubly linked, in two columns of the table. Pure; the owner locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

__all__ = ["SlotQueue"]


class SlotQueue:
    """Slots in order. Queues share the two columns, as a slot is in one queue at most. All operations are O(1).

    Both columns are 0 for slots in no queue. `ahead` and `behind`: of each slot, its neighbors in the order.
    """

    def __init__(self, ahead: array[int], behind: array[int]) -> None:
        self._ahead = ahead
        self._behind = behind
        self.first = 0
        self._last = 0

    def __bool__(self) -> bool:
        return self.first != 0

    def __iter__(self) -> Iterator[int]:
        slot = self.first
        while slot:
            yield slot
            slot = self._behind[slot]

    def append(self, slot: int) -> None:
        """Add a slot as the last one."""
        last = self._last
        self._ahead[slot], self._behind[slot] = last, 0
        if last:
            self._behind[last] = slot
        else:
            self.first = slot
        self._last = slot

    def append_first(self, slot: int) -> None:
        """Add a slot as the first one."""
        first = self.first
        self._ahead[slot], self._behind[slot] = 0, first
        if first:
            self._ahead[first] = slot
        else:
            self._last = slot
        self.first = slot

    def remove(self, slot: int) -> None:
        """Remove a slot of this queue."""
        before, after = self._ahead[slot], self._behind[slot]
        if before:
            self._behind[before] = after
        else:
            self.first = after
        if after:
            self._ahead[after] = before
        else:
            self._last = before
        self._ahead[slot] = self._behind[slot] = 0

    def pop_first(self) -> int:
        """Remove and return the first slot of a queue that is not empty."""
        slot = self.first
        self.remove(slot)
        return slot

    def clear(self) -> None:
        """Remove all slots: O(their number)."""
        while self.first:
            self.remove(self.first)
