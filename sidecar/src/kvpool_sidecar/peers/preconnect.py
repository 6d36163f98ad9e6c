"""Connects to peers in advance, so that requests do not wait for a connection.

A connection serves one client connection and is never reused for another, so there is no pool of used ones. Only the
dial can happen in advance: for each recently used peer a few authenticated connections are kept ready, and each one
that is taken is replaced in the background. A request waits for a dial only when its node first contacts a peer.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection, PeerDialer

__all__ = ["Preconnector"]

log = logging.getLogger(__name__)

MAX_PEERS = 64  # with ready connections; the least recently used peer loses its own
_MAX_IDLE_S = 60.0  # the peer ends a connection without requests after 120 s
_DIAL_S = 2.0

_Ready = collections.deque[tuple[float, "PeerConnection"]]


class Preconnector:
    """A PeerDialer in front of another. Thread-safe. Keeps up to `count` connections ready for each peer."""

    def __init__(self, dial: PeerDialer, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._dial = dial
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._ready: BoundedCache[NodeInfo, _Ready] = BoundedCache(MAX_PEERS)
        self._scheduled: set[NodeInfo] = set()
        self._closed = False
        self._worker = BackgroundWorker("peer-preconnect", self._preconnect)

    def __call__(self, peer: NodeInfo, timeout_s: float) -> PeerConnection:
        """Return an authenticated connection that was never used. KVPoolError if there is none within `timeout_s`."""
        link = self._pop_ready(peer)
        if link is None:
            link = self._dial(peer, timeout_s)
        self._schedule(peer)
        return link

    def ready(self, peer: NodeInfo) -> int:
        """Number of ready connections."""
        with self._lock:
            return len(self._ready.peek(peer) or ())

    def close(self) -> None:
        """Close all ready connections; later calls dial."""
        with self._lock:
            self._closed = True
            closing = [link for links in self._ready.values() for _, link in links]
            self._ready.clear()
        for link in closing:
            link.close()
        self._worker.stop(0.0)

    def _pop_ready(self, peer: NodeInfo) -> PeerConnection | None:
        while True:
            with self._lock:
                links = self._ready.peek(peer)
                if not links:
                    return None
                dialed, link = links.popleft()
            if link.alive and self._clock() - dialed < _MAX_IDLE_S:
                return link
            link.close()

    def _schedule(self, peer: NodeInfo) -> None:
        with self._lock:
            if self._closed or self._count <= 0 or peer in self._scheduled:
                return
            self._scheduled.add(peer)
        self._worker.start()
        self._worker.submit(peer)

    def _preconnect(self, peer: NodeInfo) -> None:
        with self._lock:
            self._scheduled.discard(peer)
        try:
            while not self._closed and self.ready(peer) < self._count:
                self._add_ready(peer, self._dial(peer, _DIAL_S))
        except (KVPoolError, OSError) as e:
            log.debug("peer %s: %s", peer.node, e)

    def _add_ready(self, peer: NodeInfo, link: PeerConnection) -> None:
        now = self._clock()
        closing = []
        with self._lock:
            if self._closed:
                closing.append(link)
            else:
                links = self._ready.peek(peer) or collections.deque()
                links.append((now, link))
                for _, evicted in self._ready.put(peer, links):
                    closing += [old for _, old in evicted]
            for links in self._ready.values():
                while links and now - links[0][0] >= _MAX_IDLE_S:
                    closing.append(links.popleft()[1])
        for old in closing:
            old.close()
