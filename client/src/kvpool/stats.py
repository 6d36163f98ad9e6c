"""What a client has seen: counters by tier, by reason and by outcome. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

__all__ = ["Reason", "Stats"]


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
            name: Counter() for name in ("hits", "bytes", "misses", "lookups", "stores", "stored_bytes")
        }
        self._reported: dict[str, Counter[str]] = {name: Counter() for name in ("hits", "bytes", "misses")}

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Add `count` to one counter of `family` (hits, bytes, misses, lookups, stores, stored_bytes)."""
        if count:
            with self._lock:
                self._totals[family][name] += count

    def add_all(self, counts: Counter[tuple[str, str]]) -> None:
        """Many counts at once: `{(family, name): count}`."""
        with self._lock:
            for (family, name), count in counts.items():
                self._totals[family][name] += count

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
            return report
