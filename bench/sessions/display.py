"""What a run shows while it goes on, on standard error."""

from __future__ import annotations

import sys
import time

__all__ = ["Display"]


class Display:
    """Lines with the seconds since the start; on a terminal, a line that counts turns."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._clear()
        print(f"{self.seconds:5.0f} s  {text}", file=sys.stderr, flush=True)

    def count(self, what: str, done: int, total: int) -> None:
        """Progress of one run."""
        if self._terminal:
            self._clear()
            print(f"{self.seconds:5.0f} s  {what}: {done} of {total}", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr)
