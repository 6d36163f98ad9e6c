"""What a client has seen: counters by tier, by reason and by outcome. Thread-safe."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUCKETS_S", "STORE", "Histogram", "Reason", "Stats"]

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets that times are counted in, in seconds; one more holds what took longer."""
STORE = "store"
"""Beside the tiers, of which times of loads are kept: that of stores."""


class Histogram:
    """Times by bucket, and their sum. Not thread-safe: its owner has the lock."""

    __slots__ = ("counts", "micros")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.micros = 0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.micros += int(seconds * 1e6)

    @property
    def packed(self) -> list[int]:
        """Counts by bucket, then the sum in microseconds."""
        return [*self.counts, self.micros]


class Reason:
    """Why a block was not loaded or not stored. Stable names: they appear in metrics."""

    ABSENT = "absent"  # nobody has it
    NO_SIDECAR = "no-sidecar"  # no connection to the sidecar of this node
    BREAKER = "breaker-open"  # repeated failures: not even tried
    DEADLINE = "deadline"  # not in time
    LATE = "late"  # the engine had stopped waiting for the lookup before the answer was there
    CONNECTION = "connection"  # the connection broke under way
    PROTOCOL = "protocol"  # the other side broke the protocol
    CORRUPT = "corrupt"  # header or payload is not what was asked for
    LENGTH = "length"  # the block has another length than the buffer
    PEER_ABSENT = "peer-absent"  # the index named a peer that no longer has it
    IO = "io"  # the file system said no
    BUFFER = "bad-buffer"  # the caller's buffer is read-only or not contiguous
    CLOSED = "closed"  # the client was closed
    INTERNAL = "internal"  # a defect of ours; the log has it
    REFUSED = "refused"  # store: no space, over quota or too large
    REJECTED = "rejected"  # store: the sidecar did not accept the block
    BUSY = "busy"  # too many under way, here or on the node


class Stats:
    """Running totals, and what has changed since the last report to the sidecar."""

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
        """Many counts at once: `{(family, name): count}`; `seconds`: a time by tier, or STORE, for the histograms."""
        with self._lock:
            for (family, name), count in counts.items():
                self._totals[family][name] += count
            for name, taken in (seconds or {}).items():
                self._seconds.setdefault(name, Histogram()).observe(taken)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """All totals: `{"hits": {tier: n}, "bytes": {tier: n}, "misses": {reason: n}, ...}`."""
        with self._lock:
            return {family: dict(counter) for family, counter in self._totals.items()}

    def take_report(self) -> dict[str, Any]:
        """What to tell the sidecar: growth since the last call; empty if there is none."""
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
                told = self._reported_seconds.get(name, [0] * len(packed))
                if packed != told:
                    times[name] = [n - before for n, before in zip(packed, told, strict=True)]
                    self._reported_seconds[name] = packed
            if times:
                report["seconds"] = times
            return report
