"""Background lookups of a request's blocks, one message per request and engine step.

An engine's scheduler queries block by block and must not wait: the first answer is "unknown"; the lookups of one step
are sent together at its end, and the next step reads the results. Independent of the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

from kvpool.protocol.wire import Tier
from kvpool.stats import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvpool.transport.responses import LookupResult

__all__ = ["LookupSource", "LookupTable"]

_log = logging.getLogger("kvpool")

_GRACE = 4  # multiple of the engine's waiting time that a background lookup may take; nothing waits for it


class LookupSource(Protocol):
    """Where a table sends lookups, and where it counts them."""

    @property
    def wait_s(self) -> float:
        """How long a lookup may stay pending before it is a miss."""

    def query(self, keys: Sequence[bytes], deadline: float) -> LookupResult:
        """Return a Tier for each key and the reason of the first miss; runs on a thread of the table."""

    def count(self, keys: Sequence[bytes], hits: Sequence[bool], reason: Reason) -> None:
        """Count keys that a request asked for, once each, as the engine sees them. Does not block."""


class _Verdict:
    __slots__ = ("tier", "until")

    def __init__(self) -> None:
        self.tier: Tier | None = None
        self.until: float | None = None  # set when the lookup is sent


class LookupTable:
    """Verdicts per request.

    Verdicts live as long as their request, so a block that failed to load is not retried for it (mark_miss), and polls
    of a block count once. Thread-safe.
    """

    def __init__(self, source: LookupSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._requests: dict[str, dict[bytes, _Verdict]] = {}
        self._fresh: dict[str, dict[bytes, _Verdict]] = {}
        self._queue: queue.SimpleQueue[dict[str, dict[bytes, _Verdict]] | None] = queue.SimpleQueue()
        self.deadline_misses = 0  # lookups that became misses because their time was up
        self._thread = threading.Thread(target=self._run, name="kvpool-lookup", daemon=True)
        self._thread.start()

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Return True for a hit, False for a miss or a timeout, None if pending: query again in the next step."""
        with self._lock:
            verdicts = self._requests.setdefault(request, {})
            verdict = verdicts.get(key)
            if verdict is None:
                verdict = verdicts[key] = self._fresh.setdefault(request, {})[key] = _Verdict()
            elif verdict.tier is None and verdict.until is not None and time.monotonic() >= verdict.until:
                verdict.tier = Tier.MISS
                self.deadline_misses += 1
            return None if verdict.tier is None else verdict.tier != Tier.MISS

    def flush(self) -> None:
        """Send the lookups of this step, which is over."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            until = time.monotonic() + self._source.wait_s
            for verdicts in fresh.values():
                for verdict in verdicts.values():
                    verdict.until = until
        if fresh:
            self._queue.put(fresh)

    def mark_miss(self, keys: Collection[bytes]) -> None:
        """Make failed loads misses for all current requests."""
        with self._lock:
            for verdicts in self._requests.values():
                for key in keys:
                    verdict = verdicts.get(key)
                    if verdict is not None:
                        verdict.tier = Tier.MISS

    def finish(self, request: str) -> None:
        """Discard a request."""
        with self._lock:
            self._requests.pop(request, None)
            self._fresh.pop(request, None)

    def close(self) -> None:
        """Stop the thread; waits at most two seconds."""
        self._queue.put(None)
        self._thread.join(2.0)

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            for verdicts in batch.values():
                keys = list(verdicts)
                deadline = time.monotonic() + _GRACE * self._source.wait_s
                reason = Reason.INTERNAL
                try:
                    result = self._source.query(keys, deadline)
                    tiers, reason = dict(zip(keys, result.tiers, strict=True)), result.reason
                except Exception:
                    _log.exception("kvpool: lookup failed; its blocks count as misses")
                    tiers = {}
                with self._lock:
                    for key, verdict in verdicts.items():
                        if verdict.tier is None:
                            verdict.tier = tiers.get(key, Tier.MISS)
                        elif tiers.get(key):
                            reason = Reason.LATE
                    hits = [verdict.tier != Tier.MISS for verdict in verdicts.values()]
                self._count(keys, hits, reason)

    def _count(self, keys: Sequence[bytes], hits: Sequence[bool], reason: Reason) -> None:
        try:
            self._source.count(keys, hits, reason)
        except Exception:
            _log.exception("kvpool: a lookup was not counted")
