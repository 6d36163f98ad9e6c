"""A clock that a test sets."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """`now` is the time that a call returns, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
