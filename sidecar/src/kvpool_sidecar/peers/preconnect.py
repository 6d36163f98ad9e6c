"""Connections to peers that are dialled before somebody waits for them.

A connection serves one client connection and is never used again for another, so there is no pool of used ones. What
can be had ahead is the dial: for each peer that was asked of late a few proven connections lie ready, and whoever takes
one has the next dialled in the background. So a request waits for a dial once, when its node first asks a peer.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection

__all__ = ["Preconnector"]

log = logging.getLogger(__name__)

MAX_PEERS = 64  # with spares; the one that was asked longest ago loses its own
_KEEP_S = 60.0  # the peer ends a connection on which nothing is asked for 120 s
_DIAL_S = 2.0


class Preconnector:
    """Call it like the `dial` that it is given: `(peer, timeout_s) -> PeerConnection`. Thread-safe."""

    def __init__(
        self,
        dial: Callable[[NodeInfo, float], PeerConnection],
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dial = dial
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._ready: collections.OrderedDict[NodeInfo, collections.deque[tuple[float, PeerConnection]]] = (
            collections.OrderedDict()
        )
        self._wanted: queue.SimpleQueue[NodeInfo | None] = queue.SimpleQueue()
        self._scheduled: set[NodeInfo] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __call__(self, peer: NodeInfo, timeout_s: float) -> PeerConnection:
        """A proven connection that nobody has used. KVPoolError if there is none within `timeout_s`."""
        link = self._pop_ready(peer)
        if link is None:
            link = self._dial(peer, timeout_s)
        self._schedule(peer)
        return link

    def ready(self, peer: NodeInfo) -> int:
        """How many lie ready."""
        with self._lock:
            return len(self._ready.get(peer, ()))

    def close(self) -> None:
        """Close all; from now on every call dials."""
        with self._lock:
            self._closed = True
            doomed = [link for links in self._ready.values() for _, link in links]
            self._ready.clear()
        for link in doomed:
            link.close()
        self._wanted.put(None)

    def _pop_ready(self, peer: NodeInfo) -> PeerConnection | None:
        while True:
            with self._lock:
                links = self._ready.get(peer)
                if not links:
                    return None
                dialled, link = links.popleft()
            if link.alive and self._clock() - dialled < _KEEP_S:
                return link
            link.close()

    def _schedule(self, peer: NodeInfo) -> None:
        with self._lock:
            if self._closed or self._count <= 0 or peer in self._scheduled:
                return
            self._scheduled.add(peer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._preconnect, name="peer-dial", daemon=True)
                self._thread.start()
        self._wanted.put(peer)

    def _preconnect(self) -> None:
        while (peer := self._wanted.get()) is not None:
            with self._lock:
                self._scheduled.discard(peer)
            try:
                while not self._closed and self.ready(peer) < self._count:
                    self._add_ready(peer, self._dial(peer, _DIAL_S))
            except (KVPoolError, OSError) as e:
                log.debug("peer %s: %s", peer.node, e)

    def _add_ready(self, peer: NodeInfo, link: PeerConnection) -> None:
        now = self._clock()
        doomed = []
        with self._lock:
            if self._closed:
                doomed.append(link)
            else:
                self._ready.setdefault(peer, collections.deque()).append((now, link))
                self._ready.move_to_end(peer)
                while len(self._ready) > MAX_PEERS:
                    _, links = self._ready.popitem(last=False)
                    doomed += [old for _, old in links]
            for links in self._ready.values():
                while links and now - links[0][0] >= _KEEP_S:
                    doomed.append(links.popleft()[1])
        for old in doomed:
            old.close()
