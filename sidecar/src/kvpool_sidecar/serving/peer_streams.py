"""Peer connections that belong to one client connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool_sidecar.serving.stream_exchange import TooManyStreamsError

if TYPE_CHECKING:
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerDialer
    from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher
    from kvpool_sidecar.peers.rdma.slots import Slot
    from kvpool_sidecar.serving.client_stream import ClientStream
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.serving.stream_exchange import StreamExchange

__all__ = ["NumberedStream", "PeerHealth", "PeerStreams"]

_MAX_NUMBER = 0xFFFF
_MAX_KEPT = 64  # streams of one client connection; beyond, the least recently used one is closed


class PeerHealth(Protocol):
    """Receives reports about peers that do not respond."""

    def mark_down(self, peer: NodeInfo) -> None: ...


class NumberedStream(NamedTuple):
    """A stream and its number on the client connection. `token` is empty unless the client must dial it."""

    number: int
    stream: ClientStream
    token: bytes = b""


class PeerStreams:
    """Numbered streams and RDMA slots of one client connection. Not thread-safe.

    `exchange` is None for a client that cannot dial streams: it gets none.
    """

    def __init__(
        self,
        pod: Pod | None,
        dial: PeerDialer,
        fetcher: RdmaFetcher | None = None,
        health: PeerHealth | None = None,
    ) -> None:
        self._pod = pod
        self._dial = dial
        self._fetcher = fetcher
        self._health = health
        self.exchange: StreamExchange | None = None
        self._slots: list[list[Slot]] = [[], []]  # of the previous request and of the current one
        self._streams: dict[tuple[NodeInfo, int], NumberedStream] = {}  # least recently used first
        self._in_use: set[int] = set()  # numbers in the current reply
        self._last_number = 0

    @property
    def available(self) -> bool:
        """True if the client can dial streams."""
        return self.exchange is not None and self._pod is not None and self._pod.has_stream_socket

    def get(self, peer: NodeInfo, timeout_s: float, stream_index: int = 0) -> NumberedStream:
        """Return the stream; each `stream_index` has its own connection.

        TooManyStreamsError if no further one may be opened, another KVPoolError if the peer cannot be reached.
        """
        place = (peer, stream_index)
        known = self._streams.pop(place, None)
        if known is not None:
            self._streams[place] = known  # now the most recently used one
            if known.stream.alive:
                self._in_use.add(known.number)
                return known._replace(token=b"")
            self.drop(known.number)
        if self.exchange is None or self._pod is None:
            raise TooManyStreamsError("this client cannot dial streams")
        self._make_room()
        token, stream = self.exchange.open(self._pod, lambda: self._dial(peer, timeout_s))
        opened = self._streams[place] = NumberedStream(self._next_number(), stream, token)
        self._in_use.add(opened.number)
        return opened

    def drop(self, number: int) -> None:
        """Close one stream."""
        for place, known in list(self._streams.items()):
            if known.number == number:
                del self._streams[place]
                if known.stream.is_silent and self._health is not None:
                    self._health.mark_down(place[0])
                known.stream.close()

    def hold(self, slot: Slot) -> None:
        """Keep an RDMA slot while the client reads from it."""
        self._slots[-1].append(slot)

    def release(self) -> None:
        """Begin a request: the client has read the slots of the request before the previous one, and all streams."""
        self._in_use.clear()
        for slot in self._slots.pop(0):
            if self._fetcher is not None:
                self._fetcher.release(slot)
        self._slots.append([])

    def close(self) -> None:
        """Close all streams and release all slots."""
        for known in list(self._streams.values()):
            self.drop(known.number)
        for _ in range(len(self._slots)):
            self.release()

    def _make_room(self) -> None:
        if len(self._streams) >= _MAX_KEPT:
            idle = [known.number for known in self._streams.values() if known.number not in self._in_use]
            if not idle:
                raise TooManyStreamsError("this client connection has too many streams")
            self.drop(idle[0])

    def _next_number(self) -> int:
        used = {known.number for known in self._streams.values()}
        while True:
            self._last_number = self._last_number % _MAX_NUMBER + 1
            if self._last_number not in used:
                return self._last_number
