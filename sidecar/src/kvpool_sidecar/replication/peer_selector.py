"""Selects the peers that receive the blocks of a drained node: those with the most headroom first."""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.peers import migration
from kvpool_sidecar.peers.migration import ReceiveResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection, PeerDialer

__all__ = ["Migration", "PeerSelector"]

log = logging.getLogger(__name__)

RECEIVE_S = 30.0
_MAX_PEERS = 8
_POLL_INTERVAL = 64  # blocks after which the peers' headroom is queried again
_HEADROOM_S = 2.0


class Migration(NamedTuple):
    """A block that needs a copy on another node or tier."""

    key: bytes
    payload_len: int
    idle_s: float

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.payload_len


class PeerSelector:
    """The peers that may receive blocks, for one round. Not thread-safe."""

    def __init__(self, own: str, members: Callable[[], Sequence[NodeInfo]], dial: PeerDialer) -> None:
        self._own = own
        self._members = members
        self._dial = dial
        self._connections: dict[NodeInfo, PeerConnection] = {}
        self._headroom: dict[NodeInfo, migration.Headroom] = {}
        self._placed: int | None = None
        self.problem = ""

    def close(self) -> None:
        for link in self._connections.values():
            link.close()
        self._connections.clear()

    def place(self, move: Migration) -> ReceiveResult | None:
        """Let the peer with the most headroom fetch the block; None if no peer does."""
        if self._placed is None or self._placed >= _POLL_INTERVAL:
            self._poll_headroom()
        for peer, evict in _choices(self._headroom, move):
            result = self._request_receive(peer, move, evict=evict)
            if result in (ReceiveResult.STORED, ReceiveResult.HAVE):
                self._placed = (self._placed or 0) + 1
                headroom = self._headroom[peer]
                self._headroom[peer] = headroom._replace(spare_bytes=max(0, headroom.spare_bytes - move.size))
                return result
            if result == ReceiveResult.ABSENT:
                self.problem = "a peer did not find the block: the index may not contain it yet"
                return result
            if result == ReceiveResult.FULL:
                self._headroom[peer] = self._headroom[peer]._replace(spare_bytes=0, coldest_idle_s=0.0)
            elif result != ReceiveResult.BUSY:
                self._headroom.pop(peer, None)
        self.problem = self.problem or (
            "no peer has enough headroom" if self._headroom else "no other node remains in the pool"
        )
        return None

    def _poll_headroom(self) -> None:
        self._placed = 0
        self.problem = ""
        peers = [node for node in self._members() if node.node != self._own and not node.leaving]
        chosen = secrets.SystemRandom().sample(peers, min(_MAX_PEERS, len(peers)))
        chosen += [peer for peer in self._connections if peer in peers and peer not in chosen]
        self._headroom.clear()
        for peer in chosen[: 2 * _MAX_PEERS]:
            try:
                headroom = migration.request_headroom(self._connection(peer), time.monotonic() + _HEADROOM_S)
            except (KVPoolError, OSError) as e:
                self._disconnect(peer, e)
            else:
                if not headroom.leaving:
                    self._headroom[peer] = headroom

    def _request_receive(self, peer: NodeInfo, move: Migration, *, evict: bool) -> ReceiveResult | None:
        try:
            return migration.request_receive(
                self._connection(peer), move.key, time.monotonic() + RECEIVE_S, evict=evict
            )
        except (KVPoolError, OSError) as e:
            self._disconnect(peer, e)
            return None

    def _connection(self, peer: NodeInfo) -> PeerConnection:
        link = self._connections.get(peer)
        if link is None:
            link = self._connections[peer] = self._dial(peer, _HEADROOM_S)
        return link

    def _disconnect(self, peer: NodeInfo, error: Exception) -> None:
        self.problem = f"node {peer.node}: {error}"
        log.info("migrating blocks to node %s failed: %s", peer.node, error)
        if (link := self._connections.pop(peer, None)) is not None:
            link.close()


def _choices(headrooms: Mapping[NodeInfo, migration.Headroom], move: Migration) -> list[tuple[NodeInfo, bool]]:
    """Return the candidates in order, most headroom first, and whether each must evict colder blocks."""
    spacious = [peer for peer, headroom in headrooms.items() if headroom.spare_bytes >= move.size]
    others = [
        peer for peer, headroom in headrooms.items() if peer not in spacious and move.idle_s < headroom.coldest_idle_s
    ]
    spacious.sort(key=lambda peer: headrooms[peer].spare_bytes, reverse=True)
    others.sort(key=lambda peer: headrooms[peer].coldest_idle_s, reverse=True)
    return [(peer, False) for peer in spacious] + [(peer, True) for peer in others]
