"""The asking side of a peer connection: connect, prove, ask. Whoever gets the socket reads the answers."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PeerConnection", "dial"]


_SILENT_S = 0.05  # a peer that is alive has sent something by then


class PeerConnection:
    """One proven connection. Not thread-safe: it belongs to one client connection."""

    def __init__(self, sock: socket.socket, session_key: bytes) -> None:
        self._socket = sock
        self._session_key = session_key
        self._sequence = 0
        self._last_request: tuple[float, int] | None = None  # when last, and what had been received by then

    def fileno(self) -> int:
        """To be handed to the client, who reads from it and must not change its mode."""
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        """False once the peer has closed its end. Takes nothing out of the stream."""
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return not poller.poll(0)

    @property
    def is_silent(self) -> bool:
        """True if the peer was asked a while ago and has not sent a byte since."""
        if self._last_request is None or self._socket.fileno() < 0:
            return False
        at, received = self._last_request
        return time.monotonic() - at >= _SILENT_S and self.received() <= received

    def received(self) -> int:
        """Bytes that have come in."""
        return tcp.bytes_received(self._socket)

    def request(self, keys: Sequence[bytes], *, verify: bool = False) -> None:
        """Send requests; the answers come in the same order. PoolUnavailableError if they do not go out at once."""
        self.send_request(wire.Op.OPEN, keys, wire.Flag.VERIFY if verify else wire.Flag.NONE)

    def send_request(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag = wire.Flag.NONE) -> None:
        """Send one request of a kind for each of `keys` (32 bytes). PoolUnavailableError as for `ask`."""
        packet = self._pack_requests(op, keys, flags)
        try:
            sent = self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as e:
            raise PoolUnavailableError(f"peer: {e.strerror}") from None
        if sent != len(packet):
            raise PoolUnavailableError("peer takes no requests")

    def _pack_requests(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag) -> bytes:
        self._last_request = (time.monotonic(), self.received())
        packet = bytearray()
        for key in keys:
            mac = peer_wire.peer_request_mac(self._session_key, self._sequence, key)
            packet += peer_wire.PEER_REQUEST.pack(wire.MAGIC, op, flags, 0, self._sequence, key, mac)
            self._sequence += 1
        return bytes(packet)

    def response_size(self, deadline: float) -> int:
        """Bytes of the block file that come next, 0 for a miss; for who reads by itself."""
        magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(
            tcp.receive(self._socket, peer_wire.PEER_RESPONSE.size, deadline)
        )
        return int(size) if magic == wire.MAGIC and status == peer_wire.PeerStatus.OK else 0

    def response_body(self, limit: int, deadline: float) -> bytes | None:
        """The whole answer to RDMA or STAGE, None for anything but OK. ProtocolError if it is longer than `limit`."""
        size = self.response_size(deadline)
        if size > limit:
            raise ProtocolError("the peer says too much")
        return tcp.receive(self._socket, size, deadline) if size else None

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Fill `view` with what comes next; for who reads by itself. DeadlineExceededError, ProtocolError, OSError."""
        tcp.receive_into(self._socket, view, deadline)

    def close(self) -> None:
        """End the connection for both who hold it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial(
    host: str,
    port: int,
    *,
    secret: bytes,
    timeout_s: float,
    congestion_control: str = "",
    ticket: bytes = tcp.NO_TICKET,
) -> PeerConnection:
    """Connect to a peer and prove the secret (of a ticket) to each other, within `timeout_s`.

    Raises PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError.
    """
    deadline = time.monotonic() + timeout_s
    sock = tcp.connect(host, port, deadline, congestion_control)
    try:
        session_key = tcp.prove_as_client(sock, secret, deadline, ticket)
        sock.settimeout(None)  # the file description is shared with the client, who wants it blocking
    except BaseException:
        sock.close()
        raise
    return PeerConnection(sock, session_key)
