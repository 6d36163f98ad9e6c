"""Statistics of a client: counters by tier, by reason and by outcome. Thread-safe."""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUCKETS_S", "STORE", "Histogram", "Reason", "Stats"]

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram buckets in seconds; one more bucket holds longer times."""
STORE = "store"
"""Name of the store histogram, alongside one load histogram per tier."""


class Histogram:
    """Times by bucket, and their sum. Not thread-safe: the owner holds the lock."""

    __slots__ = ("counts", "micros")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.micros = 0

    def observe(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.micros += int(seconds * 1e6)

    @property
    def packed(self) -> list[int]:
        """Counts by bucket, then the sum in microseconds."""
        return [*self.counts, self.micros]


class Reason(str, enum.Enum):
    """Why a block was not loaded or not stored. The values are stable: they are label values of metrics."""

    NONE = ""  # it was
    ABSENT = "absent"  # no tier has it
    NO_SIDECAR = "no-sidecar"  # no connection to the sidecar of this node
    BREAKER = "breaker-open"  # repeated failures: not tried
    DEADLINE = "deadline"  # deadline exceeded
    LATE = "late"  # the engine stopped waiting for the lookup before its answer arrived
    CONNECTION = "connection"  # the connection failed during the request
    PROTOCOL = "protocol"  # the sidecar or a peer violated the protocol
    CORRUPT = "corrupt"  # header or payload does not match the request
    LENGTH = "length"  # the block's length differs from the buffer's
    PEER_ABSENT = "peer-absent"  # the index named a peer that no longer has it
    IO = "io"  # the file system returned an error
    BUFFER = "bad-buffer"  # the caller's buffer is read-only or not contiguous
    CLOSED = "closed"  # the client was closed
    INTERNAL = "internal"  # a defect of the client; see its log
    REFUSED = "refused"  # store: no space, over quota or too large
    REJECTED = "rejected"  # store: the sidecar did not accept the block
    BUSY = "busy"  # too many requests, in this client or on the node

    __str__ = str.__str__


class Stats:
    """Running totals, and their growth since the last report to the sidecar."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, Counter[str]] = {
            name: Counter() for name in ("hits", "bytes", "misses", "lookups", "stores", "stored_bytes", "tokens")
        }
        self._reported: dict[str, Counter[str]] = {name: Counter() for name in ("hits", "bytes", "misses", "tokens")}
        self._seconds: dict[str, Histogram] = {}
        self._reported_seconds: dict[str, list[int]] = {}

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Add `count` to one counter of `family` (hits, bytes, misses, lookups, stores, stored_bytes, tokens)."""
        if count:
            with self._lock:
                self._totals[family][name] += count

    def add_all(self, counts: Counter[tuple[str, str]], seconds: Mapping[str, float] | None = None) -> None:
        """Add `{(family, name): count}`, and to the histograms one time by tier, or STORE, of `seconds`."""
        with self._lock:
            for (family, name), count in counts.items():
                self._totals[family][name] += count
            for name, taken in (seconds or {}).items():
                self._seconds.setdefault(name, Histogram()).observe(taken)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return all totals: `{"hits": {tier: n}, "bytes": {tier: n}, "misses": {reason: n}, ...}`."""
        with self._lock:
            return {family: {str(k): n for k, n in counter.items()} for family, counter in self._totals.items()}

    def take_report(self) -> dict[str, Any]:
        """Return the growth since the last call, for the sidecar; empty if there is none."""
        with self._lock:
            report: dict[str, Any] = {}
            for family, before in self._reported.items():
                now = self._totals[family]
                grown = {name: now[name] - before[name] for name in now if now[name] > before[name]}
                if grown:
                    report[family] = grown
                    self._reported[family] = Counter(now)
            times = {}
            for name, histogram in self._seconds.items():
                packed = histogram.packed
                reported = self._reported_seconds.get(name, [0] * len(packed))
                if packed != reported:
                    times[name] = [n - before for n, before in zip(packed, reported, strict=True)]
                    self._reported_seconds[name] = packed
            if times:
                report["seconds"] = times
            return report
