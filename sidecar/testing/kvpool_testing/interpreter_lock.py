"""Whether a call lets other threads of the process run.

An engine's scheduler is one thread among those that move blocks. It stands still while a call holds the interpreter's
lock, however fast the call is.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["lets_others_run", "turns_during"]

_NEVER_S = 3600.0
_PATIENCE_S = 30.0


def turns_during(call: Callable[[], object]) -> int:
    """Return how often another thread of pure Python ran while `call` did.

    No thread is asked to release the lock: 0 for a call that never releases it, on any machine.
    """
    turns = 0
    done = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)  # releases the lock

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=take_turns, daemon=True)
    sys.setswitchinterval(_NEVER_S)  # before the thread starts: a request that it made could be met during the call
    try:
        thread.start()
        before = turns
        call()
        return turns - before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()


def lets_others_run(call: Callable[[], object]) -> bool:
    """Return whether another thread ever ran during `call`, which is repeated: a busy machine may not wake it."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if turns_during(call):
            return True
    return False
