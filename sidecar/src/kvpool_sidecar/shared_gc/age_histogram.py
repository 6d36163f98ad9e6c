"""Histogram of bytes by age of last use, of bounded size, and the cutoff age for a number of bytes.

Pure. Ages are seconds by the mount's clock; an age class is about a twelfth of the age wide.
"""

from __future__ import annotations

import math

__all__ = ["AgeCutoff", "AgeHistogram", "class_of"]

_PER_DOUBLING = 8
_OLDEST = 40 * _PER_DOUBLING


def class_of(age_s: float) -> int:
    """Return the age class: higher is older."""
    return min(_OLDEST, int(math.log2(1.0 + max(0.0, age_s)) * _PER_DOUBLING))


class AgeCutoff:
    """Selects blocks older than a class, and `bytes_left` bytes of that class."""

    def __init__(self, age_class: int, bytes_left: int) -> None:
        self.age_class = age_class
        self.bytes_left = bytes_left

    def selects(self, age_s: float, size: int) -> bool:
        """Return whether this block is selected, and count it."""
        found = class_of(age_s)
        if found != self.age_class:
            return found > self.age_class
        if self.bytes_left <= 0:
            return False
        self.bytes_left -= size
        return True


class AgeHistogram:
    """Bytes by age class."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self.total = 0

    def add(self, age_s: float, size: int) -> None:
        number = class_of(age_s)
        self._bytes[number] = self._bytes.get(number, 0) + size
        self.total += size

    def merge(self, other: AgeHistogram) -> None:
        for number, size in other._bytes.items():
            self._bytes[number] = self._bytes.get(number, 0) + size
        self.total += other.total

    def cutoff(self, need: int) -> AgeCutoff:
        """Return the cutoff that selects the oldest `need` bytes, or all."""
        last = 0
        for number in sorted(self._bytes, reverse=True):
            last = number
            if self._bytes[number] >= need:
                break
            need -= self._bytes[number]
        return AgeCutoff(last, need)
