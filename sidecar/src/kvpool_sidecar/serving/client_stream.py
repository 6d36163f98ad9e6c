"""One peer connection whose responses are forwarded to a client, over a stream socket that the client has dialed.

No descriptor is handed over: a socket of this process in a pod's hands would reach this pod's network.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, PoolUnavailableError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.peers.tcp import set_send_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.peers.splice import PipePool

__all__ = ["ClientStream"]

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0  # longest silence of the peer, and longest pause of the client in reading
_BUFFER_BYTES = 4 << 20


class ClientStream:
    """Forwards exactly the requested blocks. The session's thread requests, the stream's thread forwards.

    The thread that forwards owns both descriptors from `run` on, so no other thread can close them under a transfer.
    """

    def __init__(self, link: PeerConnection, on_end: Callable[[], None]) -> None:
        self._link = link
        self._on_end = on_end
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._client: socket.socket | None = None
        self._pending = 0  # requested blocks that are not forwarded yet
        self._closed = self._ended = False

    @property
    def alive(self) -> bool:
        """False once the peer or the client has closed its end."""
        with self._lock:
            return not self._closed and self._link.alive and (self._client is None or not _hung_up(self._client))

    @property
    def is_dialed(self) -> bool:
        """True once a client has dialed."""
        with self._lock:
            return self._client is not None

    @property
    def is_silent(self) -> bool:
        """True if the peer has sent no byte for 50 ms since the last request."""
        with self._lock:
            return self._link.is_silent

    def request(self, wanted: Sequence[tuple[bytes, int]]) -> None:
        """Request blocks by key and payload length. PoolUnavailableError if the stream has ended or would block."""
        with self._lock:
            if self._closed:
                raise PoolUnavailableError("the peer's stream has ended")
            packet = self._link.pack_requests(wire.Op.OPEN, [key for key, _ in wanted])
            if self._link.is_full_duplex:
                self._link.transmit(packet)
                packet = b""
            self._pending += len(wanted)
            self._work.put((packet, [HEADER_BYTES + length for _, length in wanted]))

    def run(self, client: socket.socket, pipes: PipePool) -> None:
        """Forward to `client`, which this stream takes over, until `close` or an error, in the stream's thread."""
        with self._lock:
            is_refused = self._closed or self._client is not None
            if not is_refused:
                self._client = client
        if is_refused:
            client.close()
            return
        try:
            client.settimeout(None)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            set_send_timeout(client, _TIMEOUT_S)
            self._link.prepare_forwarding(_TIMEOUT_S)
            while (work := self._work.get()) is not None:
                packet, sizes = work
                if packet:
                    self._link.transmit(packet)
                for size in sizes:
                    self._link.forward_response(client, size, pipes, _TIMEOUT_S)
                    with self._lock:
                        self._pending -= 1
        except (KVPoolError, OSError) as e:
            log.debug("a peer's stream ended: %s", e)  # the client sees the end of its stream
        finally:
            with self._lock:
                self._closed = True
                self._end()
                client.close()

    def close(self) -> None:
        """End the stream; the thread that forwards closes the descriptors."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.put(None)
            if self._client is None:
                self._end()
            else:
                self._link.shutdown()
                _shutdown(self._client)

    def close_if_unused(self) -> None:
        """Close the stream if it is idle and the peer or the client has closed its end."""
        with self._lock:
            is_idle = self._client is not None and not self._pending
        if is_idle and not self.alive:
            self.close()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._link.close()
            self._on_end()


def _hung_up(client: socket.socket) -> bool:
    if client.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(client, select.POLLRDHUP)
    return bool(poller.poll(0))


def _shutdown(client: socket.socket) -> None:
    try:
        client.shutdown(socket.SHUT_RDWR)
    except OSError as e:
        log.debug("a client had closed its stream: %s", e.strerror)
