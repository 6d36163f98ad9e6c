"""How many bytes one system call reads into an engine's buffer. No I/O.

The caller of a load waits for the call in progress, because nothing may write into its buffer afterwards. Without a
free processor a call of 4 MiB takes half a second: the size follows the rate of the last calls.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_PIECE_BYTES", "PieceSize"]

MAX_PIECE_BYTES: Final = 4 << 20  # a call waits for the interpreter's lock twice: fewer, larger ones are cheaper
_MIN_PIECE_BYTES: Final = 256 << 10
_PIECE_S: Final = 0.02


class PieceSize:
    """Size of the next piece from the rate of the last ones. Thread-safe; takes no lock.

    The rate falls immediately and at most doubles with each piece: other threads may have had the processor.
    """

    def __init__(self) -> None:
        self._rate = float("inf")  # bytes per second

    @property
    def bytes(self) -> int:
        """Bytes that take about 20 ms at the last rate: 256 KiB to 4 MiB, whole pages."""
        if self._rate * _PIECE_S >= MAX_PIECE_BYTES:
            return MAX_PIECE_BYTES
        return max(_MIN_PIECE_BYTES, int(self._rate * _PIECE_S) & -4096)

    def seconds(self, size: int) -> float:
        """Return how long `size` bytes take at the last rate."""
        return size / self._rate

    def note(self, size: int, seconds: float) -> None:
        """Record that `size` bytes took `seconds`."""
        if size >= _MIN_PIECE_BYTES:
            self._rate = min(size / max(seconds, 1e-6), 2 * self._rate)
