"""Self-test of the pool on an untested vLLM: one private block is stored and loaded before the first hit.

It runs in the background, so the engine's start does not wait for it; until it is over, lookups are misses. The block
has a random id, so no engine asks for it. Needs no vLLM.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from kvpool.stats import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.client import Client

__all__ = ["SelfTest", "region_problem"]

_log = logging.getLogger("vllm.kvpool")
_BYTES: Final = 4096
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.2
_POLL_S: Final = 0.05


class SelfTest:
    """Result of the test. `is_passed` may be read by any thread.

    A pool that refuses or loses the block proves nothing, so only an error or wrong bytes fail the test.
    """

    def __init__(self, client: Client | None, on_failure: Callable[[str], None], *, is_needed: bool) -> None:
        self.is_passed = not is_needed
        self._closed = threading.Event()
        self._on_failure = on_failure
        if is_needed and client is not None:
            threading.Thread(target=self._run, args=(client,), name="kvpool-self-test", daemon=True).start()

    def close(self) -> None:
        """Stop the test. Does not wait for it."""
        self._closed.set()

    def _run(self, client: Client) -> None:
        try:
            while not client.connected:
                if self._closed.wait(_POLL_S):
                    return
            problem = _round_trips(client, self._closed)
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
        if problem:
            _log.error("kvpool: the self-test failed; this engine runs without the pool: %s", problem)
            self._on_failure(f"the self-test failed: {problem}")
        else:
            self.is_passed = True


def region_problem(region: memoryview, slot_bytes: int) -> str:
    """Return why slots of vLLM's host tier cannot be addressed, "" if they can. Leaves its bytes as they are.

    `region`: two-dimensional, one row of `slot_bytes` per chunk, as a tier is constructed with.
    """
    if region.ndim != 2 or region.readonly or not region.c_contiguous:
        return "vLLM's host tier is not a writable table of chunks"
    rows, columns = region.shape or (0, 0)
    if region.itemsize != 1 or slot_bytes <= 0 or rows * slot_bytes != region.nbytes or columns != slot_bytes:
        return "the chunks of vLLM's host tier do not follow each other"
    return ""


def _round_trips(client: Client, closed: threading.Event) -> str:
    for attempt in range(_ATTEMPTS):
        if attempt:
            closed.wait(_PAUSE_S)
        written, read = bytearray(os.urandom(_BYTES)), bytearray(_BYTES)
        name = os.urandom(32)
        (stored,) = client.put_from([name], [written])
        if stored.reason == Reason.INTERNAL:
            return "a block could not be stored; see the engine's log"
        if not stored.ok:
            continue
        (loaded,) = client.get_into([name], [read], time.monotonic() + client.load_seconds(_BYTES))
        if loaded.reason == Reason.INTERNAL:
            return "a block could not be loaded; see the engine's log"
        if loaded.ok:
            return "" if written == read else "a block came back with other bytes"
    return ""
