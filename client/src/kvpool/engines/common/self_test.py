"""Self-test of a plug-in: one private block goes to the pool and comes back before the plug-in reports a hit."""

from __future__ import annotations

import enum
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.protocol.keys import block_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.client import Client

__all__ = ["SelfTest", "Verdict"]

_RETRY_S = 5.0
_BYTES = 4096


class Verdict(enum.Enum):
    """Outcome: `UNKNOWN` if the pool took no block, or the engine changed its memory at the same time."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class SelfTest:
    """One test per client. Thread-safe.

    `source` returns memory of the engine whose bytes are stored; None: random bytes. Nothing is written there.
    """

    def __init__(self, source: Callable[[], memoryview] | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._tested: Client | None = None
        self._verdict = Verdict.UNKNOWN
        self._next = 0.0

    def run(self, client: Client) -> Verdict:
        """Return the verdict for `client`; an unknown one is tested again after a few seconds. Never raises."""
        with self._lock:
            if client is not self._tested:
                self._tested, self._verdict, self._next = client, Verdict.UNKNOWN, 0.0
            if self._verdict is Verdict.UNKNOWN and client.connected and time.monotonic() >= self._next:
                self._next = time.monotonic() + _RETRY_S
                try:
                    self._verdict = self._test(client)
                except Exception:  # whatever failed here would fail for the engine's blocks
                    self._verdict = Verdict.FAILED
            return self._verdict

    def _test(self, client: Client) -> Verdict:
        source = self._source() if self._source is not None else memoryview(bytearray(os.urandom(_BYTES)))
        before = bytes(source)
        name = block_id(client.fingerprint, os.urandom(32), b"self-test")  # no other engine knows it
        (stored,) = client.put_from([name], [source])
        if not stored.ok or bytes(source) != before:
            return Verdict.UNKNOWN
        back = memoryview(bytearray(len(before)))
        (loaded,) = client.get_into([name], [back])
        if not loaded.ok:
            return Verdict.UNKNOWN
        return Verdict.PASSED if bytes(back) == before else Verdict.FAILED
