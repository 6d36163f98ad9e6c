"""Self-test of a plug-in: one private block goes to the pool and comes back before the plug-in reports a hit."""

from __future__ import annotations

import enum
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.engines.common.without_pool import report_without_pool
from kvpool.engines.tested_versions import is_tested
from kvpool.protocol.keys import block_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.client import Client

__all__ = ["SelfTest", "SelfTests", "Verdict", "is_trusted"]

_RETRY_S = 5.0
_BYTES = 4096
_MAX_TESTS = 64


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
        """Return the verdict for `client`. Never raises, and never blocks.

        The test runs in a thread, because a store may take longer than a lookup. An unknown verdict is tested again
        after a few seconds.
        """
        with self._lock:
            if client is not self._tested:
                self._tested, self._verdict, self._next = client, Verdict.UNKNOWN, 0.0
            if self._verdict is Verdict.UNKNOWN and client.connected and time.monotonic() >= self._next:
                self._next = float("inf")
                try:
                    threading.Thread(target=self._run, args=(client,), name="kvpool-self-test", daemon=True).start()
                except RuntimeError:  # no thread can be started
                    self._next = time.monotonic() + _RETRY_S
            return self._verdict

    def run_now(self, client: Client) -> Verdict:
        """Return the verdict of one test for `client`. Never raises; blocks as long as a store and a load do."""
        try:
            return self._test(client)
        except Exception:  # whatever failed here would fail for the engine's blocks
            return Verdict.FAILED

    def _run(self, client: Client) -> None:
        verdict = self.run_now(client)
        with self._lock:
            if client is self._tested:
                self._verdict, self._next = verdict, time.monotonic() + _RETRY_S

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


class SelfTests:
    """One test per fingerprint, for a plug-in with several clients. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tests: dict[bytes, SelfTest] = {}

    def run(self, client: Client) -> Verdict:
        """Return the verdict for this client."""
        with self._lock:
            if len(self._tests) >= _MAX_TESTS:
                self._tests.clear()
            test = self._tests.setdefault(client.fingerprint, SelfTest())
        return test.run(client)


def is_trusted(test: SelfTest | SelfTests, client: Client, engine: str, version: str) -> bool:
    """Whether lookups may hit: a release that is not tested has to pass the self-test first."""
    if is_tested(engine, version):
        return True
    verdict = test.run(client)
    if verdict is Verdict.FAILED:
        report_without_pool("the self-test read other bytes than it stored", engine)
    return verdict is Verdict.PASSED
