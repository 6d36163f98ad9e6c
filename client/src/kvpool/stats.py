"""Statistics of a client: counters by tier, by reason and by outcome. Thread-safe."""

from __future__ import annotations

import collections
import contextlib
import enum
import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ABSENT_REASONS",
    "BUCKETS_S",
    "DEPTHS",
    "STORE",
    "Histogram",
    "Reason",
    "Stats",
    "depth_label",
    "ratio_text",
]

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram buckets in seconds; one more bucket holds longer times."""
STORE = "store"
"""Name of the store histogram, alongside one load histogram per tier."""
DEPTHS = {"start": 1, "below-4": 4, "below-16": 16, "below-64": 64, "below-256": 256}
"""Ranges of the number of blocks that a lookup found before the prefix broke, with their exclusive upper bounds."""
_DEEP = "deep"
_MAX_RECORDED: Final = 256


def depth_label(blocks: int) -> str:
    """Return the range of DEPTHS for the number of blocks found before the first missing one; `deep` above all."""
    return next((label for label, bound in DEPTHS.items() if blocks < bound), _DEEP)


def ratio_text(part: int, whole: int) -> str:
    """Return `part / whole` from 0.00 to 1.00; 1.00 only if they are equal, and empty if `whole` is 0."""
    if whole <= 0:
        return ""
    return f"{min(part / whole, 0.99) if part < whole else 1.0:.2f}"


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
    ABSENT = "absent"  # not there; the sidecar gave no reason
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
    # given by the sidecar (kvpool.protocol.wire.MissCause)
    NEVER_STORED = "never-stored"  # no tier has it, and the node has no record of it
    EVICTED_CAPACITY = "evicted-capacity"  # this node evicted it because the tier was full
    EVICTED_SPACE = "evicted-space"  # this node evicted it because the file system was full
    EVICTED_QUOTA = "evicted-quota"  # this node evicted it because of the tenant's quota
    EXPIRED = "expired"  # it reached its maximum age on this node
    PURGED = "purged"  # a purge deleted it on this node
    QUARANTINED = "quarantined"  # it was corrupt and was moved to quarantine on this node
    FINGERPRINT_DIFFERS = "fingerprint-differs"  # the node has blocks of this model under other fingerprints only
    GRANT_UNUSED = "grant-unused"  # a tenant that grants reads has it; this client is too old to use grants
    PEER_UNREACHABLE = "peer-unreachable"  # only peers that cannot be reached have it
    INDEX_UNAVAILABLE = "index-unavailable"  # not on this node; the index does not respond
    SLOWER_THAN_COMPUTE = "slower-than-compute"  # loading it would take longer than computing it

    __str__ = str.__str__


ABSENT_REASONS = frozenset(
    {
        Reason.ABSENT,
        Reason.PEER_ABSENT,
        Reason.NEVER_STORED,
        Reason.EVICTED_CAPACITY,
        Reason.EVICTED_SPACE,
        Reason.EVICTED_QUOTA,
        Reason.EXPIRED,
        Reason.PURGED,
        Reason.QUARANTINED,
        Reason.FINGERPRINT_DIFFERS,
    }
)
"""Reasons that mean that the pool does not have the block."""
_REPORTED = ("hits", "bytes", "misses", "tokens", "lookup", "lookup_misses", "lookup_depth", "time")


class Stats:
    """Running totals, and their growth since the last report to the sidecar.

    `misses` are blocks that a load did not deliver. `lookup` has the figures of the hit rate: `requests` (lookups as
    the engine's user sees them), `complete` (those whose blocks were all found), `asked_blocks` and `found_blocks`;
    `lookup_misses` the blocks not found, by the reason of the first one, and `lookup_depth` the lookups that broke, by
    `depth_label`. `time` has what loads saved (`saved_us`) and cost (`lost_us`) compared with computing, and what the
    engine computed (`computed_tokens`, `computed_us`).

    Recording never waits: a reader of the totals adds up what was recorded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the totals
        self._recorded: collections.deque[tuple[Mapping[tuple[str, str], int], Mapping[str, float]]] = (
            collections.deque()
        )
        self._totals: dict[str, Counter[str]] = {name: Counter() for name in (*_REPORTED, "stores", "stored_bytes")}
        self._reported: dict[str, Counter[str]] = {name: Counter() for name in _REPORTED}
        self._seconds: dict[str, Histogram] = {}
        self._reported_seconds: dict[str, list[int]] = {}

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Add `count` to one counter of `family` (hits, bytes, misses, stores, stored_bytes, tokens)."""
        if count:
            self.add_all({(family, name): count})

    def add_all(self, counts: Mapping[tuple[str, str], int], seconds: Mapping[str, float] | None = None) -> None:
        """Add `{(family, name): count}`, and to the histograms one time by tier, or STORE, of `seconds`."""
        self._recorded.append((counts, seconds or {}))
        if len(self._recorded) >= _MAX_RECORDED and self._lock.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._lock.release()

    def add_lookup(self, asked: int, found: int, reason: Reason) -> None:
        """Count one lookup that asked for `asked` blocks and found `found`; `reason`: why the next one was missing."""
        if asked <= 0:
            return
        counts = {("lookup", "requests"): 1, ("lookup", "asked_blocks"): asked, ("lookup", "found_blocks"): found}
        if found >= asked:
            counts["lookup", "complete"] = 1
        else:
            counts["lookup_misses", str(reason or Reason.ABSENT)] = asked - found
            counts["lookup_depth", depth_label(found)] = 1
        self.add_all(counts)

    def _add_up(self) -> None:
        """Add what was recorded to the totals; under the lock."""
        with contextlib.suppress(IndexError):
            while True:
                counts, seconds = self._recorded.popleft()
                for (family, name), count in counts.items():
                    self._totals[family][name] += count
                for name, taken in seconds.items():
                    self._seconds.setdefault(name, Histogram()).observe(taken)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return all totals: `{"hits": {tier: n}, "bytes": {tier: n}, "misses": {reason: n}, ...}`."""
        with self._lock:
            self._add_up()
            return {family: {str(k): n for k, n in counter.items()} for family, counter in self._totals.items()}

    def take_report(self) -> dict[str, Any]:
        """Return the growth since the last call, for the sidecar; empty if there is none."""
        with self._lock:
            self._add_up()
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
