"""Which peers can be read from: failures with growing pauses, and proofs by probes. No I/O."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.index.base import NodeInfo

__all__ = ["MAX_ROWS", "PROBE_INTERVAL_S", "PeerReachability"]

log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 60.0
MAX_ROWS: Final = 64
_FIRST_PROBE_S: Final = 5.0
_FIRST_PAUSE_S: Final = 2.0
_MAX_PAUSE_S: Final = 60.0
_S_PER_PEER: Final = 2.0  # with many peers, probes are this far apart
_BEFORE_END_S: Final = 1.0  # a probe finds out before the end of a pause, not an engine after it
_CONFIRMED: Final = 2  # failures in a row; a single one may be a sidecar that was replaced
_MAX_STATES: Final = 1 << 16


@dataclass
class _State:
    next_probe: float
    failures: int = 0
    down_until: float = 0.0
    reason: str = ""
    since: float = 0.0  # the first failure in a row
    verified: float | None = None


class PeerReachability:
    """Reachability of each peer, by its registered address. Thread-safe.

    The first failure pauses a peer for 2 s; each further failed probe doubles the pause, up to 60 s. A peer of a large
    pool is probed less often, so that all probes together stay below one in 2 s.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._jitter = jitter  # from 0 to 1
        self._lock = threading.Lock()
        self._states: dict[NodeInfo, _State] = {}

    def is_down(self, peer: NodeInfo, now: float) -> bool:
        """True while the peer is not used."""
        state = self._states.get(peer)
        return state is not None and state.down_until > now

    def mark_down(self, peer: NodeInfo, reason: str = "unreachable", *, probed: bool = False) -> None:
        """Record a failure. During a pause only a failed probe (`probed`) prolongs it."""
        now = self._clock()
        with self._lock:
            if len(self._states) >= _MAX_STATES and peer not in self._states:
                return
            state = self._states.setdefault(peer, _State(now))
            if state.down_until > now and not probed:
                return
            state.failures += 1
            state.reason = reason
            if state.failures == 1:
                state.since = now
            waiting = sum(one.failures > 0 for one in self._states.values())
            exponential = _FIRST_PAUSE_S * 2.0 ** min(state.failures - 1, 16)
            pause = max(min(exponential, _MAX_PAUSE_S), waiting * _S_PER_PEER)
            state.down_until = now + pause
            state.next_probe = state.down_until - _BEFORE_END_S
            is_change = state.failures == _CONFIRMED
        if is_change:
            where = (peer.node, peer.host, reason)
            log.warning("peer %s at %s cannot be read from (%s): its blocks are misses [KVP0402]", *where)

    def mark_up(self, peer: NodeInfo, peers: int = 1) -> None:
        """Record that a probe read from the peer, one of `peers`."""
        now = self._clock()
        interval = max(PROBE_INTERVAL_S, peers * _S_PER_PEER) * (0.8 + 0.4 * self._jitter())
        with self._lock:
            before = self._states.get(peer)
            self._states[peer] = _State(now + interval, verified=now)
        if before is not None and before.failures >= _CONFIRMED:
            log.warning("peer %s at %s can be read from again after %.0f s", peer.node, peer.host, now - before.since)

    def next_probe(self, peers: Sequence[NodeInfo]) -> tuple[NodeInfo | None, float]:
        """Return the peer whose probe is due first, and the seconds until then. Other peers are forgotten."""
        now = self._clock()
        alive = set(peers)
        with self._lock:
            self._states = {peer: state for peer, state in self._states.items() if peer in alive}
            for peer in peers[:_MAX_STATES]:
                self._states.setdefault(peer, _State(now + _FIRST_PROBE_S * self._jitter()))
            if not self._states:
                return None, PROBE_INTERVAL_S
            peer, state = min(self._states.items(), key=lambda item: item[1].next_probe)
            return peer, state.next_probe - now

    def hold(self, peer: NodeInfo, seconds: float) -> None:
        """Keep a peer that is paused so for at least `seconds`: it is being probed."""
        now = self._clock()
        with self._lock:
            state = self._states.get(peer)
            if state is not None and state.failures:
                state.down_until = max(state.down_until, now + seconds)

    def status(self) -> dict[str, Any]:
        """For /status: counts of peers, and at most MAX_ROWS rows, those of unreachable peers first."""
        now = self._clock()
        with self._lock:
            found = [(peer.node, self._row(peer, state, now)) for peer, state in self._states.items()]
        rows = [row for _, row in sorted(found, key=lambda one: (one[1]["state"] != "unreachable", one[0]))]
        counts = {
            kind: sum(row["state"] == kind for row in rows) for kind in ("reachable", "unreachable", "unverified")
        }
        return {"peers": len(rows), **counts, "rows": rows[:MAX_ROWS]}

    def _row(self, peer: NodeInfo, state: _State, now: float) -> dict[str, Any]:
        row: dict[str, Any] = {"node": peer.node, "address": f"{peer.host}:{peer.port}"}
        if state.failures >= _CONFIRMED:
            seconds = round(now - state.since)
            return row | {"state": "unreachable", "reason": state.reason, "seconds": seconds}
        if state.verified is None or state.failures:
            return row | {"state": "unverified"}
        return row | {"state": "reachable", "seconds": round(now - state.verified)}
