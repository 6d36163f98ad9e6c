"""Client side of a peer connection: connect, authenticate, request. The holder of the socket reads the responses."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING, Protocol

from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.index.base import NodeInfo

__all__ = ["PeerConnection", "PeerDialer", "dial"]

_NO_MAC = bytes(peer_wire.PEER_MAC_BYTES)
_SILENT_S = 0.05  # a live peer has sent something by then


class PeerDialer(Protocol):
    """Opens an authenticated connection to a peer within a timeout in seconds. Raises KVPoolError or OSError."""

    def __call__(self, peer: NodeInfo, timeout_s: float, /) -> PeerConnection: ...


class PeerConnection:
    """One authenticated connection. Not thread-safe: it belongs to one client connection."""

    def __init__(self, sock: socket.socket, session_key: bytes) -> None:
        self._socket = sock
        self._session_key = session_key
        self._sequence = 0
        self._last_request: tuple[float, int] | None = None  # its time, and the bytes received by then

    def fileno(self) -> int:
        """Descriptor that is passed to the client, which reads from it and must not change its blocking mode."""
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        """False once the peer has closed its end. Reads nothing from the stream."""
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
        packet = self._pack_requests(op, keys, flags)
        try:
            sent = self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as e:
            raise PoolUnavailableError(f"peer: {e.strerror}") from None
        if sent != len(packet):
            raise PoolUnavailableError("the peer does not read its requests")

    def _pack_requests(self, op: wire.Op, keys: Sequence[bytes], flags: wire.Flag) -> bytes:
        self._last_request = (time.monotonic(), self.received())
        packet = bytearray()
        for key in keys:
            unsigned = peer_wire.PEER_REQUEST.pack(wire.MAGIC, op, flags, 0, self._sequence, key, _NO_MAC)
            mac = peer_wire.peer_request_mac(self._session_key, unsigned)
            packet += unsigned[: -len(mac)] + mac
            self._sequence += 1
        return bytes(packet)

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

    def close(self) -> None:
        """End the connection for this process and for the client that shares the socket."""
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
    """Connect to a peer and authenticate mutually with the secret (of a ticket) within `timeout_s`.

    Raises PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError.
    """
    deadline = time.monotonic() + timeout_s
    sock = tcp.connect(host, port, deadline, congestion_control)
    try:
        session_key = tcp.prove_as_client(sock, secret, deadline, ticket)
        sock.settimeout(None)  # the file description is shared with the client, which needs it blocking
    except BaseException:
        sock.close()
        raise
    return PeerConnection(sock, session_key)
