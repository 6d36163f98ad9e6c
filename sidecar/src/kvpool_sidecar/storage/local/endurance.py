"""Bytes written to a drive since the start of the process and per day. Thread-safe."""

from __future__ import annotations

import collections
import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DAY_S", "DriveEndurance", "WriteMeter"]

DAY_S: Final = 86_400.0
_SAMPLE_S: Final = 600.0
_MIN_WINDOW_S: Final = 3600.0  # a burst after a start is not multiplied by more than 24


class WriteMeter:
    """Counts written bytes, and keeps a sample every 10 minutes for 24 hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._total = 0
        self._samples = collections.deque([(clock(), 0)])

    def add(self, size: int) -> None:
        """Count `size` bytes."""
        with self._lock:
            self._total += size
            self._sample()

    @property
    def total(self) -> int:
        """Bytes since the start."""
        return self._total

    def per_day(self) -> float:
        """Return the bytes of the last 24 hours; of a shorter time, but at least an hour, extrapolated to a day."""
        with self._lock:
            self._sample()
            began, before = self._samples[0]
            return (self._total - before) * DAY_S / max(self._clock() - began, _MIN_WINDOW_S)

    def _sample(self) -> None:
        now = self._clock()
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, self._total))
        while len(self._samples) > 1 and now - self._samples[1][0] >= DAY_S:
            self._samples.popleft()


class DriveEndurance:
    """Written bytes of one drive against the size of its file system. `folder`: descriptor of a directory on it."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self.written = WriteMeter()
        self.size_bytes = self._size()
        """Size of the file system as last read by `status`: admission needs it for each block, and must not wait."""

    def _size(self) -> int:
        info = os.fstatvfs(self._folder)
        return info.f_blocks * info.f_frsize

    def status(self) -> dict[str, float]:
        """For /status."""
        size = self.size_bytes = self._size()
        return {
            "written_bytes": self.written.total,
            "size_bytes": size,
            "writes_per_day": round(self.written.per_day() / size, 4) if size else 0.0,
        }
