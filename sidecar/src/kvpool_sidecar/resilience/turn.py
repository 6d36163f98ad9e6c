"""The turn of the request that the current thread handles: it covers computation and ends before the thread waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["begin_turn", "end_turn"]

_thread = threading.local()


def begin_turn(end: Callable[[], None]) -> None:
    """Begin this thread's turn; `end` is called once, by `end_turn`."""
    _thread.end = end


def end_turn() -> None:
    """End this thread's turn, if it has one: call this before waiting for a file system, the network or a queue."""
    end: Callable[[], None] | None = getattr(_thread, "end", None)
    if end is not None:
        _thread.end = None
        end()
