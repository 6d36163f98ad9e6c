"""Peer connections that belong to one client connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpool.errors import RefusedError

if TYPE_CHECKING:
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection, PeerDialer
    from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher
    from kvpool_sidecar.peers.rdma.slots import Slot

__all__ = ["PeerHealth", "PeerStreams"]

_MAX_STREAMS = 0xFFFF


class PeerHealth(Protocol):
    """Receives reports about peers that do not respond."""

    def mark_down(self, peer: NodeInfo) -> None: ...


class PeerStreams:
    """Numbered peer connections and RDMA slots of one client connection. Not thread-safe."""

    def __init__(self, dial: PeerDialer, fetcher: RdmaFetcher | None = None, health: PeerHealth | None = None) -> None:
        self._dial = dial
        self._fetcher = fetcher
        self._health = health
        self._slots: list[list[Slot]] = [[], []]  # of the previous request and of the current one
        self._connections: dict[tuple[NodeInfo, int], tuple[int, PeerConnection]] = {}
        self._last_number = 0

    def get(self, peer: NodeInfo, timeout_s: float, stream_index: int = 0) -> tuple[int, PeerConnection, bool]:
        """Return number, connection and whether it is new; each `stream_index` has its own connection.

        KVPoolError if the peer cannot be reached.
        """
        number, connection = self._connections.get((peer, stream_index), (0, None))
        if connection is not None and connection.alive:
            return number, connection, False
        if connection is not None:
            self.drop(number)
        if self._last_number >= _MAX_STREAMS:
            raise RefusedError("this client connection has used all of its stream numbers")
        connection = self._dial(peer, timeout_s)
        self._last_number += 1
        self._connections[peer, stream_index] = (self._last_number, connection)
        return self._last_number, connection, True

    def drop(self, number: int) -> None:
        """Close one connection; its number is not reused."""
        for place, (known, connection) in list(self._connections.items()):
            if known == number:
                del self._connections[place]
                if connection.is_silent and self._health is not None:
                    self._health.mark_down(place[0])
                connection.close()

    def hold(self, slot: Slot) -> None:
        """Keep an RDMA slot while the client reads from it."""
        self._slots[-1].append(slot)

    def release(self) -> None:
        """Begin a request: the client has read the slots of the request before the previous one."""
        for slot in self._slots.pop(0):
            if self._fetcher is not None:
                self._fetcher.release(slot)
        self._slots.append([])

    def close(self) -> None:
        """Close all connections and release all slots."""
        for number, _ in list(self._connections.values()):
            self.drop(number)
        for _ in range(len(self._slots)):
            self.release()
