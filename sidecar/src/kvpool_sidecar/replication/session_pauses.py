"""How long a tenant's sessions pause, learned from their hints. Pure; the owner locks.

A session that waits for a tool often does not know for how long. A fixed guess is worse than none, so nothing is
expected until enough pauses of the same tenant were seen; then it is their median.
"""

from __future__ import annotations

import statistics
from collections import deque

from kvpool_sidecar.resilience.bounded_cache import BoundedCache

__all__ = ["SessionPauses"]

_SESSIONS = 4096
_TENANTS = 1024
_SEEN = 64  # latest pauses of a tenant
_ENOUGH = 8


class SessionPauses:
    """Not thread-safe. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._waiting: BoundedCache[bytes, float] = BoundedCache(_SESSIONS)
        self._pauses: BoundedCache[bytes, deque[float]] = BoundedCache(_TENANTS)

    def begin(self, session: bytes, now: float) -> None:
        """Record that a session pauses."""
        self._waiting.put(session, now)

    def end(self, tenant: bytes, session: bytes, now: float) -> None:
        """Record that a session was named again; without a pause before it nothing is learned."""
        began = self._waiting.peek(session)
        if began is None:
            return
        self._waiting.pop(session)
        pauses = self._pauses.peek(tenant)
        if pauses is None:
            pauses = deque(maxlen=_SEEN)
            self._pauses.put(tenant, pauses)
        pauses.append(now - began)

    def usual(self, tenant: bytes) -> float:
        """Return the tenant's median pause in seconds; 0 if too few were seen."""
        pauses = self._pauses.peek(tenant)
        return statistics.median(pauses) if pauses is not None and len(pauses) >= _ENOUGH else 0.0
