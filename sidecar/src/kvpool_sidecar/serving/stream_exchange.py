"""Connects the clients' stream sockets to the peer connections that were opened for them.

The reply to OPEN carries a token for each new stream. The client dials the pod's stream socket and sends the token.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import RefusedError
from kvpool.protocol import peer_wire
from kvpool_sidecar.peers.splice import PipePool
from kvpool_sidecar.resilience.worker import PeriodicTask
from kvpool_sidecar.serving.client_stream import ClientStream

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.serving.pod import Pod

__all__ = ["MAX_STREAMS", "StreamExchange", "TooManyStreamsError"]

log = logging.getLogger(__name__)

MAX_STREAMS = 1024  # of a node; a tenant has at most three quarters of them
_TENANT_SHARE = 0.75
_DIAL_S = 5.0  # a stream that is not dialed for longer is closed
_TOKEN_S = 2.0  # a connection that sends no token for longer is closed
_CHECK_INTERVAL_S = 1.0


class TooManyStreamsError(RefusedError):
    """No further stream may be opened; the peer is not at fault."""


class _Offer(NamedTuple):
    stream: ClientStream
    pod_uid: str
    until: float


class StreamExchange:
    """Thread-safe. Bounds the streams of a node and of each tenant, and closes those that are not dialed."""

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._lock = threading.Lock()
        self._pipes = PipePool()
        self._offers: dict[bytes, _Offer] = {}
        self._streams: set[ClientStream] = set()
        self._count = 0
        self._counts: collections.Counter[bytes] = collections.Counter()
        self._task = PeriodicTask("stream-offers", self.expire, _CHECK_INTERVAL_S)

    def start(self) -> None:
        """Start closing streams that are not dialed."""
        self._task.start()

    def stop(self) -> None:
        """Close all streams."""
        self._task.stop()
        with self._lock:
            streams = list(self._streams)
            self._offers.clear()
        for stream in streams:
            stream.close()
        self._pipes.close()

    @property
    def streams(self) -> int:
        """Number of open streams, dialed or not."""
        with self._lock:
            return self._count

    def open(self, pod: Pod, dial: Callable[[], PeerConnection]) -> tuple[bytes, ClientStream]:
        """Return a token and a stream over the connection that `dial` opens.

        TooManyStreamsError if the tenant or the node has no place left; or an error of `dial`.
        """
        tag = pod.tenant.tag
        self._take_place(tag)
        try:
            link = dial()
        except BaseException:
            self._leave_place(tag)
            raise
        link.lane = int.from_bytes(tag[:2], "little")
        token = secrets.token_bytes(peer_wire.STREAM_TOKEN_BYTES)

        def forget() -> None:
            self._leave_place(tag)
            with self._lock:
                self._streams.discard(stream)
                self._offers.pop(token, None)

        stream = ClientStream(link, forget)
        with self._lock:
            self._streams.add(stream)
            self._offers[token] = _Offer(stream, pod.identity.uid, self._clock() + _DIAL_S)
        return token, stream

    def serve(self, client: socket.socket, pod: Pod) -> None:
        """Serve a connection to the pod's stream socket until its stream ends. Takes `client` over; waits."""
        stream = None
        try:
            with contextlib.suppress(OSError):
                token = _receive_token(client)
                stream = self._claim(token, pod)
            if stream is None:
                self._stats.add("refused", "stream-token")
            else:
                stream.run(client, self._pipes)
        finally:
            client.close()

    def expire(self) -> None:
        """Close the streams that were not dialed in time, and idle ones that have lost an end."""
        now = self._clock()
        with self._lock:
            late = [token for token, offer in self._offers.items() if offer.until <= now]
            offers = [self._offers.pop(token) for token in late]
            streams = list(self._streams)
        for offer in offers:
            self._stats.add("refused", "stream-not-dialed")
            offer.stream.close()
        for stream in streams:
            stream.close_if_unused()

    def _claim(self, token: bytes, pod: Pod) -> ClientStream | None:
        with self._lock:
            offer = self._offers.get(token)
            if offer is None or offer.pod_uid != pod.identity.uid:
                return None
            del self._offers[token]
            return offer.stream

    def _take_place(self, tag: bytes) -> None:
        with self._lock:
            if self._count >= MAX_STREAMS or self._counts[tag] >= MAX_STREAMS * _TENANT_SHARE:
                raise TooManyStreamsError("too many streams of peers are open")
            self._count += 1
            self._counts[tag] += 1

    def _leave_place(self, tag: bytes) -> None:
        with self._lock:
            self._count -= 1
            self._counts[tag] -= 1
            if not self._counts[tag]:
                del self._counts[tag]


def _receive_token(client: socket.socket) -> bytes:
    """Read a token by a deadline; shorter at the end of the stream. TimeoutError."""
    deadline = time.monotonic() + _TOKEN_S
    token = b""
    while len(token) < peer_wire.STREAM_TOKEN_BYTES:
        client.settimeout(max(0.001, deadline - time.monotonic()))
        more = client.recv(peer_wire.STREAM_TOKEN_BYTES - len(token))
        if not more:
            break
        token += more
    return token
