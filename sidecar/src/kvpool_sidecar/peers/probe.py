"""Probes peers: a new data connection over the path of blocks, and a response read from it. One peer at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvpool.errors import DeadlineExceededError, KVPoolError, ProtocolError, RefusedError
from kvpool_sidecar.peers import hottest
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.peer_reachability import PeerReachability
    from kvpool_sidecar.peers.connection import PeerDialer

__all__ = ["PeerProber", "probe"]

_POLL_S: Final = 0.5
_ROWS: Final = 256  # of the response: more than one segment where the peer knows its hottest blocks


def probe(peer: NodeInfo, dial: PeerDialer, timeout_s: float) -> str:
    """Read from the peer within `timeout_s`: empty if that worked, else timeout, refused, protocol or unreachable."""
    deadline = time.monotonic() + timeout_s
    try:
        link = dial(peer, timeout_s)
        try:
            hottest.request_hot_list(link, _ROWS, deadline)
        finally:
            link.close()
    except (DeadlineExceededError, TimeoutError):
        return "timeout"
    except RefusedError:
        return "refused"
    except ProtocolError:
        return "protocol"
    except (KVPoolError, OSError):  # a handshake that ran out of time is one of them
        return "timeout" if time.monotonic() >= deadline else "unreachable"
    return ""


class PeerProber:
    """Probes each of `peers()` about once a minute, and a peer that failed before its pause ends."""

    def __init__(
        self,
        peers: Callable[[], Sequence[NodeInfo]],
        dial: PeerDialer,
        reachability: PeerReachability,
        stats: Stats,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._dial = dial
        self._reachability = reachability
        self._stats = stats
        self._timeout_s = timeout_s
        self._task = PeriodicTask("peer-probe", self._step, _POLL_S)

    def start(self) -> None:
        self._task.start()

    def stop(self) -> None:
        self._task.stop()

    def _step(self) -> float:
        """Probe the peer whose probe is due; return the pause before the next step."""
        peers = self._peers()
        peer, wait_s = self._reachability.next_probe(peers)
        if peer is None or wait_s > 0:
            return min(max(wait_s, 0.0), _POLL_S)
        self._reachability.hold(peer, self._timeout_s * 2)
        problem = probe(peer, self._dial, self._timeout_s)
        self._stats.add("peer_probes", problem or "ok")
        if problem:
            self._reachability.mark_down(peer, problem, probed=True)
        else:
            self._reachability.mark_up(peer, len(peers))
        return 0.0
