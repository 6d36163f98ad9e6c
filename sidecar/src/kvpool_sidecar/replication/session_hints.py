"""Applies session hints of clients, routers and peers: to the eviction order, to other nodes, and to prefetching.

One thread with a short queue, so that hints take no time of requests; hints that do not fit, or come too fast, are
dropped and counted. Block keys are derived with the caller's tenant, so a hint about another tenant's block is a hint
about nothing. docs/reference/session-hints.md.
"""

from __future__ import annotations

import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.protocol.hint import HintKind
from kvpool_sidecar.eviction.session_marks import SessionHint
from kvpool_sidecar.peers import hint as peer_hint
from kvpool_sidecar.replication.session_map import SessionMap
from kvpool_sidecar.replication.session_pauses import SessionPauses
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.config import HintsConfig
    from kvpool.protocol.hint import Hint
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.replication.hint_forwarder import HintForwarder
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["FAMILY", "HintOutcome", "SessionHints"]

FAMILY = "hints"
_MAX_QUEUED = 256
_PER_S = 100.0  # hints of one tenant
_BURST = 200.0
_MAX_TENANTS = 1024
_FORWARDED = (HintKind.ENDED, HintKind.KEEP, HintKind.TTL, HintKind.FORGET)


class HintOutcome(StrEnum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # some of the blocks took it: the tenant's share is used up
    NO_BLOCKS = "no-blocks"  # none of its blocks is here, or all are shared with other sessions
    UNKNOWN_SESSION = "unknown-session"
    LIMITED = "limited"  # too many hints of this tenant, or too many wait
    OFF = "off"


class Applied(NamedTuple):
    """Outcome of a hint, and how many blocks of this node took it."""

    outcome: HintOutcome
    blocks: int = 0


class ResumeReader(Protocol):
    """Reads a session's blocks ahead on this node (kvpool_sidecar.replication.resume)."""

    def resume(self, tenant: bytes, keys: Sequence[bytes], seconds: float) -> None: ...


class _Queued(NamedTuple):
    tenant: Tenant
    hint: Hint
    is_applied: bool = False  # on this node


class _Bucket:
    def __init__(self, now: float) -> None:
        self.left, self.at = _BURST, now

    def take(self, now: float) -> bool:
        self.left = min(_BURST, self.left + (now - self.at) * _PER_S)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class SessionHints:
    """Thread-safe. `settings` are read for each hint."""

    def __init__(
        self,
        settings: Callable[[], HintsConfig],
        local: LocalStore,
        stats: Stats,
        *,
        forwarder: HintForwarder | None = None,
        resume: ResumeReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._local = local
        self._stats = stats
        self._forwarder = forwarder
        self._resume = resume
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions = SessionMap()
        self._pauses = SessionPauses()
        self._buckets: BoundedCache[bytes, _Bucket] = BoundedCache(_MAX_TENANTS)
        self._worker = BackgroundWorker[_Queued]("session-hints", self._handle, max_queued=_MAX_QUEUED)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread; hints that wait are dropped."""
        self._worker.stop()
        if self._forwarder is not None:
            self._forwarder.close()

    @property
    def enabled(self) -> bool:
        """True if the pool accepts hints."""
        return self._settings().enabled

    def submit(self, tenant: Tenant, hint: Hint) -> bool:
        """Queue a hint; False if it is dropped. Returns immediately."""
        if not self.enabled:
            self._count(hint.kind, HintOutcome.OFF)
            return False
        if not self._admits(tenant.tag) or not self._worker.submit(_Queued(tenant, hint)):
            self._count(hint.kind, HintOutcome.LIMITED)
            return False
        return True

    def apply(self, tenant: Tenant, hint: Hint) -> Applied:
        """Apply a hint to this node now, and queue it for the others. For callers that wait for the outcome."""
        if not self.enabled:
            return self._count(hint.kind, HintOutcome.OFF)
        if not self._admits(tenant.tag):
            return self._count(hint.kind, HintOutcome.LIMITED)
        keys = self._keys_of(tenant, hint)
        applied = self._apply(tenant.tag, hint, keys)
        if self._forwarder is not None and hint.kind in _FORWARDED and keys:
            self._worker.submit(_Queued(tenant, hint, is_applied=True))
        return applied

    def release(self, tenant: bytes, session: bytes) -> tuple[int, bool]:
        """Apply `ended` to a session by its tags, for the operator.

        Return the blocks of this node that took it, and whether this node knows the session.
        """
        with self._lock:
            keys = self._sessions.find(tenant, session)
        took = self._mark(tenant, SessionHint(HintKind.ENDED, session, 0.0, self._clock()), keys) if self.enabled else 0
        return took, bool(keys)

    def from_peer(self, request: bytes, _flags: int) -> bytes:
        """Apply a hint that another node forwards; return the response."""
        hint = peer_hint.unpack(request)
        blocks = 0
        if hint is not None and self.enabled and hint.kind in _FORWARDED:
            with self._lock:
                found = {tag: self._sessions.find(tag, hint.session) for tag in self._sessions.tenants_of(hint.session)}
            blocks = sum(self._apply(tag, hint, keys).blocks for tag, keys in found.items())
        return peer_hint.pack_blocks(blocks)

    def status(self) -> dict[str, Any]:
        """Return sessions known, the share of expectations that came true, and the residency time."""
        with self._lock:
            sessions, blocks = len(self._sessions), self._sessions.blocks
        marks = self._local.session_marks()
        decided = sum(one.weight for one in marks)
        rate = sum(one.rate for one in marks)
        capacity = self._local.usage().capacity_bytes
        return {
            "enabled": self.enabled,
            "sessions": sessions,
            "session_blocks": blocks,
            "expected_bytes": sum(one.expected_bytes for one in marks),
            "truth": round(sum(one.truth * one.weight for one in marks) / decided, 3) if decided else 0.0,
            "decided": round(decided),
            "residency_seconds": round(capacity / rate) if rate >= 1 else 0,
            "results": self._stats.whole(FAMILY),
        }

    def _admits(self, tenant: bytes) -> bool:
        now = self._clock()
        with self._lock:
            bucket = self._buckets.peek(tenant)
            if bucket is None:
                bucket = _Bucket(now)
                self._buckets.put(tenant, bucket)
            return bucket.take(now)

    def _handle(self, item: _Queued) -> None:
        tenant, hint = item.tenant, item.hint
        keys = self._keys_of(tenant, hint)
        if not item.is_applied:
            self._apply(tenant.tag, hint, keys)
        if self._forwarder is not None and hint.kind in _FORWARDED and keys:
            self._forwarder.forward(hint, keys)

    def _keys_of(self, tenant: Tenant, hint: Hint) -> list[bytes]:
        """Return the session's block keys: those of the hint, which are recorded, else those that are known.

        An end may come with a short request of its own, so it holds for the known blocks as well.
        """
        keys = [tenant.block_key(block_id) for block_id in hint.block_ids]
        with self._lock:
            if not keys or hint.kind is HintKind.ENDED:
                return list(dict.fromkeys([*self._sessions.find(tenant.tag, hint.session), *keys]))
            self._sessions.record(tenant.tag, hint.session, keys)
            return keys

    def _apply(self, tenant: bytes, hint: Hint, keys: list[bytes]) -> Applied:
        if not keys:
            return self._count(hint.kind, HintOutcome.UNKNOWN_SESSION)
        if hint.kind is HintKind.RESUME:
            if self._resume is not None:
                self._resume.resume(tenant, keys, min(hint.seconds, self._settings().max_keep_s))
            return self._count(hint.kind, HintOutcome.ACCEPTED, len(keys))
        took = self._mark(tenant, self._learned(tenant, hint), keys)
        if hint.kind is HintKind.FORGET:
            with self._lock:
                self._sessions.forget(tenant, hint.session)
        if not took:
            return self._count(hint.kind, HintOutcome.NO_BLOCKS)
        clipped = hint.kind is HintKind.KEEP and took < len(keys)
        return self._count(hint.kind, HintOutcome.CLIPPED if clipped else HintOutcome.ACCEPTED, took)

    def _learned(self, tenant: bytes, hint: Hint) -> SessionHint:
        """Return the hint for the tables, with the tenant's usual pause where the session gives none."""
        now = self._clock()
        kind, seconds = hint.kind, float(hint.seconds)
        with self._lock:
            self._pauses.end(tenant, hint.session, now)
            if kind is HintKind.KEEP:
                seconds = seconds or self._pauses.usual(tenant)
                self._pauses.begin(hint.session, now)
        if kind is HintKind.KEEP and not seconds:
            kind = HintKind.TURN
        return SessionHint(kind, hint.session, min(seconds, self._settings().max_keep_s), now)

    def _mark(self, tenant: bytes, hint: SessionHint, keys: Sequence[bytes]) -> int:
        return self._local.hint(hint, keys, tenant) if keys else 0

    def _count(self, kind: HintKind, outcome: HintOutcome, blocks: int = 0) -> Applied:
        self._stats.add(FAMILY, f"{kind.label}-{outcome}")
        return Applied(outcome, blocks)
