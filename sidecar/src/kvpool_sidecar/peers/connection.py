"""Client side of a peer connection: connect, authenticate, request, and read or forward the responses."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING, Protocol

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import splice, tcp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.index.base import NodeInfo

__all__ = ["PeerConnection", "PeerDialer", "dial"]

_SLOWEST = 4e6  # bytes per second of a response, below which it is ended
_NO_MAC = bytes(peer_wire.PEER_MAC_BYTES)
_SILENT_S = 0.05  # a live peer has sent something by then


class PeerDialer(Protocol):
    """Opens an authenticated connection to a peer within a timeout in seconds. Raises KVPoolError or OSError."""

    def __call__(self, peer: NodeInfo, timeout_s: float, /) -> PeerConnection: ...


class PeerConnection:
    """One authenticated connection. Not thread-safe, except `shutdown`: it belongs to one client connection.

    Requests may be sent while another thread forwards the answers, if `is_full_duplex`. `lane` groups the requests at
    the peer, which gives each group its turn: of one tenant, 0 for this node's own.
    """

    is_full_duplex = True

    def __init__(self, sock: socket.socket, session_key: bytes) -> None:
        self._socket = sock
        self._session_key = session_key
        self._sequence = 0
        self._last_request: tuple[float, int] | None = None  # its time, and the bytes received by then
        self.lane = 0

    @property
    def alive(self) -> bool:
        """False once the peer has closed its end. Reads nothing from the stream."""
        if self._socket.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return not poller.poll(0)

    @property
    def is_silent(self) -> bool:
        """True if the peer has sent no byte for 50 ms since the last request."""
        if self._last_request is None or self._socket.fileno() < 0:
            return False
        at, received = self._last_request
        return time.monotonic() - at >= _SILENT_S and self.received() <= received

    def received(self) -> int:
        """Bytes received."""
        return tcp.bytes_received(self._socket)

    def request(self, keys: Sequence[bytes], *, verify: bool = False) -> None:
        """Send OPEN requests; responses arrive in the same order. PoolUnavailableError if sending would block."""
        self.send_request(wire.Op.OPEN, keys, wire.Flag.VERIFY if verify else wire.Flag.NONE)

    def send_request(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag = wire.Flag.NONE) -> None:
        """Send one request of type `op` for each of `keys` (32 bytes). PoolUnavailableError as for `request`."""
        self.transmit(self.pack_requests(op, keys, flags))

    def pack_requests(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag = wire.Flag.NONE) -> bytes:
        """Return the next requests, with their numbers and MACs; they must be transmitted in this order."""
        packet = bytearray()
        for key in keys:
            unsigned = peer_wire.PEER_REQUEST.pack(wire.MAGIC, op, flags, self.lane, self._sequence, key, _NO_MAC)
            mac = peer_wire.peer_request_mac(self._session_key, unsigned)
            packet += unsigned[: -len(mac)] + mac
            self._sequence += 1
        return bytes(packet)

    def transmit(self, packet: bytes) -> None:
        """Send packed requests. PoolUnavailableError if that would block."""
        self._last_request = (time.monotonic(), self.received())
        try:
            sent = self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as e:
            raise PoolUnavailableError(f"peer: {e.strerror}") from None
        if sent != len(packet):
            raise PoolUnavailableError("the peer does not read its requests")

    def prepare_forwarding(self, timeout_s: float) -> None:
        """Bound each wait of `forward_response` for the peer; `response_size` cannot be used afterwards."""
        self._socket.settimeout(None)
        tcp.set_receive_timeout(self._socket, timeout_s)

    def forward_response(self, target: socket.socket, expected: int, pipes: splice.PipePool, timeout_s: float) -> None:
        """Forward the next response to `target`: PEER_RESPONSE, then a block file of `expected` bytes, or nothing.

        `timeout_s` bounds each wait, and with the slowest accepted rate the whole response. After a KVPoolError or
        OSError this connection and `target` must be closed: a response of another length is cut after PEER_RESPONSE.
        """
        response = self._receive_response()
        magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(response)
        if magic != wire.MAGIC:
            raise ProtocolError("not a peer's response")
        target.sendall(response)
        if size == 0 and status != peer_wire.PeerStatus.OK:
            return
        if size != expected or status != peer_wire.PeerStatus.OK:
            raise ProtocolError(f"a peer's response with status {status} and {size} bytes, expected {expected}")
        self._forward_body(target, size, pipes, time.monotonic() + timeout_s + size / _SLOWEST)

    def _receive_response(self) -> bytes:
        data = self._socket.recv(peer_wire.PEER_RESPONSE.size, socket.MSG_WAITALL)
        if len(data) < peer_wire.PEER_RESPONSE.size:
            raise ProtocolError("the peer closed the connection")
        return data

    def _forward_body(self, target: socket.socket, size: int, pipes: splice.PipePool, deadline: float) -> None:
        splice.forward(self._socket, target, size, pipes, deadline)

    def response_size(self, deadline: float) -> int:
        """Read a response header: bytes of the block file that follow, 0 for a miss."""
        magic, status, _, _, size = peer_wire.PEER_RESPONSE.unpack(
            tcp.receive(self._socket, peer_wire.PEER_RESPONSE.size, deadline)
        )
        return int(size) if magic == wire.MAGIC and status == peer_wire.PeerStatus.OK else 0

    def response_body(self, limit: int, deadline: float) -> bytes | None:
        """Read a whole small response; None unless its status is OK. ProtocolError if it is longer than `limit`."""
        size = self.response_size(deadline)
        if size > limit:
            raise ProtocolError("the peer's response is too long")
        return tcp.receive(self._socket, size, deadline) if size else None

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Fill `view` from the stream. DeadlineExceededError, ProtocolError or OSError."""
        tcp.receive_into(self._socket, view, deadline)

    def shutdown(self) -> None:
        """End the connection; a thread that uses it gets an error. Thread-safe until `close`."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS, too: it may be in use by a thread

    def close(self) -> None:
        """End the connection and close its descriptor."""
        self.shutdown()
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
    """Connect to a peer and authenticate mutually with the secret (of a ticket) within `timeout_s`.

    Raises PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError.
    """
    deadline = time.monotonic() + timeout_s
    sock = tcp.connect(host, port, deadline, congestion_control)
    try:
        session_key = tcp.prove_as_client(sock, secret, deadline, ticket)
    except BaseException:
        sock.close()
        raise
    return PeerConnection(sock, session_key)
