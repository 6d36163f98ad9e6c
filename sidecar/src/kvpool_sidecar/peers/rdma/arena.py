"""Allocator of ranges of one registered region: first fit over a sorted list of gaps. Pure; not thread-safe."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 4096


class Arena:
    """Offsets in bytes, multiples of ALIGNMENT."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self._gaps: list[tuple[int, int]] = [(0, self.size)] if self.size else []  # first, end
        self._taken: dict[int, int] = {}  # first: end

    @property
    def free_bytes(self) -> int:
        """Sum of the bytes of all gaps."""
        return sum(end - first for first, end in self._gaps)

    def allocate(self, count: int) -> int | None:
        """Return the offset of `count` free bytes; None if no gap is large enough."""
        need = -(-count // ALIGNMENT) * ALIGNMENT
        if need <= 0:
            return None
        for at, (first, end) in enumerate(self._gaps):
            if end - first >= need:
                self._taken[first] = first + need
                if end - first == need:
                    del self._gaps[at]
                else:
                    self._gaps[at] = (first + need, end)
                return first
        return None

    def free(self, offset: int) -> None:
        """Free an offset that `allocate` returned. KeyError for any other, also for a second call."""
        first, end = offset, self._taken.pop(offset)
        at = bisect_left(self._gaps, (first, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == first:
            at -= 1
            first = self._gaps.pop(at)[0]
        self._gaps.insert(at, (first, end))
