"""Sends a session's hint to the other nodes that have its blocks, according to the index."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool_sidecar.peers.hint import request_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.hint import Hint
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.replication.peer_copy import PeerAccess

__all__ = ["FAMILY", "HintForwarder"]

log = logging.getLogger(__name__)

FAMILY = "hints_forwarded"
_MAX_PEERS = 8
_LOCATE_S = 0.5
_DIAL_S = 1.0
_REPLY_S = 1.0
_REFUSED_S = 600.0  # a node that closes the connection may be of an older release


class HintForwarder:
    """For one thread. One query to the index for each hint, and one request to each of at most 8 nodes."""

    def __init__(self, peers: PeerAccess, stats: Stats) -> None:
        self._peers = peers
        self._stats = stats
        self._links: dict[NodeInfo, PeerConnection] = {}
        self._refused: dict[str, float] = {}

    def forward(self, hint: Hint, keys: Sequence[bytes]) -> None:
        """Send the hint to the live nodes that have the middle or the end of the prompt. Errors are counted only."""
        sample = list(dict.fromkeys((keys[len(keys) // 2], keys[-1]))) if keys else []
        if not sample:
            return
        found = self._peers.resolver.replicas(sample, _LOCATE_S)
        names = set().union(*found) if found else set()
        now = time.monotonic()
        nodes = [node for node in self._peers.resolver.live_nodes() if node.node in names]
        for peer in [node for node in nodes if self._refused.get(node.node, 0.0) <= now][:_MAX_PEERS]:
            self._send(peer, hint)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _send(self, peer: NodeInfo, hint: Hint) -> None:
        link = self._links.pop(peer, None)
        try:
            if link is None or not link.alive:
                link = self._peers.dial(peer, _DIAL_S)
            blocks = request_hint(link, hint, time.monotonic() + _REPLY_S)
        except (KVPoolError, OSError) as e:
            if link is not None:
                link.close()
            self._refused[peer.node] = time.monotonic() + _REFUSED_S
            self._stats.add(FAMILY, "failed")
            log.info("node %s took no hint: %s", peer.node, e)
            return
        self._stats.add(FAMILY, "applied" if blocks else "unknown")
        if len(self._links) >= _MAX_PEERS:
            self._links.pop(next(iter(self._links))).close()
        self._links[peer] = link
