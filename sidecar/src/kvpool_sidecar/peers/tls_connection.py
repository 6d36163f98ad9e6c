"""Client side of a connection whose data is encrypted as well (`encryption: Always`).

A client cannot read TLS from a descriptor: it would need the keys, and with them the permission to send requests. So
the sidecar decrypts into the client's stream, like any peer's responses, which costs the encryption and one more copy.
TLS is not thread-safe: the thread that forwards the responses sends the requests, too.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from kvpool.errors import DeadlineExceededError, PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire
from kvpool_sidecar.peers import splice
from kvpool_sidecar.peers.connection import PeerConnection

if TYPE_CHECKING:
    import socket
    import ssl

__all__ = ["TlsConnection"]

_SEND_S = 5.0  # a peer that does not read its requests for longer is given up


class TlsConnection(PeerConnection):
    """Owns `tls`, on which nothing has been sent yet."""

    is_full_duplex = False

    def __init__(self, tls: ssl.SSLSocket, deadline: float) -> None:
        session_key = secrets.token_bytes(32)
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        tls.sendall(session_key)
        super().__init__(tls, session_key)
        self._buffer = memoryview(b"")

    def transmit(self, packet: bytes) -> None:
        """Send packed requests; waits up to 5 s. PoolUnavailableError if the peer does not take them."""
        self._last_request = (time.monotonic(), self.received())
        timeout = self._socket.gettimeout()
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(packet)
            self._socket.settimeout(timeout)
        except OSError as e:
            raise PoolUnavailableError(f"peer: {getattr(e, 'reason', '') or e.strerror or type(e).__name__}") from None

    def prepare_forwarding(self, timeout_s: float) -> None:
        """Bound each wait of `forward_response` for the peer."""
        self._socket.settimeout(timeout_s)
        self._buffer = memoryview(bytearray(splice.COPY_BYTES))

    def _receive_response(self) -> bytes:
        view = self._buffer[: peer_wire.PEER_RESPONSE.size]
        done = 0
        while done < len(view):
            done += self._receive_some(view[done:])
        return bytes(view)

    def _forward_body(self, target: socket.socket, size: int, pipes: splice.PipePool, deadline: float) -> None:
        while size:
            count = self._receive_some(self._buffer[: min(size, len(self._buffer))])
            target.sendall(self._buffer[:count])
            size -= count
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the client reads too slowly, or the peer sends too slowly")

    def _receive_some(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if count == 0:
            raise ProtocolError("the peer closed the connection")
        return count
