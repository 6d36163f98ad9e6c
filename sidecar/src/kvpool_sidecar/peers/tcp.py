"""Shared by both ends of a peer connection: socket options, and mutual authentication with the pool's secret.

s -> c: PEER_MAGIC, nonce_s. c -> s: kind, ticket, nonce_c, client proof. s -> c: server proof. Then requests with a MAC
each. The proven secret is a ticket's key. A connection with TLS begins with TLS instead, after the greeting.
kvpool.protocol.peer_wire has the layouts.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import time
from typing import NamedTuple

from kvpool.errors import DeadlineExceededError, PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import peer_wire

__all__ = [
    "NO_TICKET",
    "PROOF_BYTES",
    "PeerRequest",
    "await_greeting",
    "bytes_received",
    "configure",
    "congestion_control",
    "connect",
    "listen",
    "prove_as_client",
    "prove_as_server",
    "receive",
    "receive_into",
    "receive_peer_request",
    "set_receive_timeout",
    "set_send_timeout",
]

log = logging.getLogger(__name__)

PROOF_BYTES = 32
NO_TICKET = bytes(peer_wire.PEER_TICKET_BYTES)
_USER_TIMEOUT_MS = 15_000
_RECEIVED_AT = 128  # offset of tcpi_bytes_received
_TLS_HANDSHAKE = 0x16  # first byte of a TLS connection


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Open a listening socket on one numeric address. OSError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def configure(sock: socket.socket, algorithm: str) -> None:
    """Disable Nagle's algorithm, detect a dead peer within 15 s, and set the requested congestion control."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    if algorithm:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
        except OSError as e:
            log.warning("congestion control %s: %s; the node's default is used", algorithm, e.strerror)


def congestion_control(sock: socket.socket) -> str:
    """Return the congestion control that is in effect."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def bytes_received(sock: socket.socket) -> int:
    """Return the bytes received on this connection, read or not (struct tcp_info); 0 if unknown."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return 0
    return int.from_bytes(info[_RECEIVED_AT:], "little")


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Let the kernel abort a blocked send or sendfile, which a blocking socket in Python cannot."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """Let the kernel abort a blocked receive or splice; BlockingIOError then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))


def reset_at_close(sock: socket.socket) -> None:
    """Let `close` reset the connection immediately and drop unsent data."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes by `deadline` (monotonic). DeadlineExceededError, ProtocolError at an early end."""
    data = bytearray(size)
    receive_into(sock, memoryview(data), deadline)
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill `view`, like `receive`."""
    got = 0
    while got < len(view):
        got += receive_some(sock, view[got:], deadline)


def receive_some(sock: socket.socket, view: memoryview, deadline: float) -> int:
    """Read at least one byte into `view`; the number of bytes. Raises like `receive`."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise DeadlineExceededError("the peer does not respond")
    sock.settimeout(remaining)
    try:
        n = sock.recv_into(view)
    except TimeoutError:
        raise DeadlineExceededError("the peer does not respond") from None
    if n == 0:
        raise ProtocolError("the peer closed the connection")
    return n


def connect(host: str, port: int, deadline: float, congestion_control: str = "") -> socket.socket:
    """Connect to a peer's port. PoolUnavailableError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        configure(sock, congestion_control)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect((host, port))
    except OSError as e:
        sock.close()
        raise PoolUnavailableError(f"peer: {e.strerror or e}", where=f"{host}:{port}") from None
    except BaseException:
        sock.close()
        raise
    return sock


def await_greeting(sock: socket.socket, deadline: float) -> bytes:
    """Read the serving side's nonce, having sent nothing. ProtocolError for another protocol or version of it."""
    hello = receive(sock, len(peer_wire.PEER_MAGIC) + peer_wire.PEER_NONCE_BYTES, deadline)
    if not hello.startswith(peer_wire.PEER_MAGIC):
        raise ProtocolError("not a KVPool sidecar of this version")
    return hello[len(peer_wire.PEER_MAGIC) :]


def prove_as_client(sock: socket.socket, secret: bytes, deadline: float, ticket: bytes = NO_TICKET) -> bytes:
    """Run the client side of the proof; the session key. RefusedError if the other side does not hold the secret."""
    nonce_s, nonce_c = await_greeting(sock, deadline), secrets.token_bytes(peer_wire.PEER_NONCE_BYTES)
    proof = peer_wire.peer_client_proof(secret, nonce_s, nonce_c)
    sock.sendall(peer_wire.PEER_CLIENT.pack(peer_wire.PeerKind.DATA, ticket, nonce_c, proof))
    proof = receive(sock, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, peer_wire.peer_server_proof(secret, nonce_s, nonce_c)):
        raise RefusedError("the peer does not hold this pool's secret")
    return peer_wire.peer_session_key(secret, nonce_s, nonce_c)


class PeerRequest(NamedTuple):
    """Request of the client side, not authenticated yet."""

    kind: int
    ticket: bytes
    nonce_s: bytes
    nonce_c: bytes
    proof: bytes


def receive_peer_request(sock: socket.socket, deadline: float, first_s: float) -> PeerRequest | None:
    """Run the serving side up to the client's request; None if the client begins TLS, of which nothing is read.

    The client's first byte is due within `first_s` seconds.
    """
    nonce_s = secrets.token_bytes(peer_wire.PEER_NONCE_BYTES)
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.sendall(peer_wire.PEER_MAGIC + nonce_s)
    if _first_byte(sock, min(deadline, time.monotonic() + first_s)) == _TLS_HANDSHAKE:
        return None
    kind, ticket, nonce_c, proof = peer_wire.PEER_CLIENT.unpack(receive(sock, peer_wire.PEER_CLIENT.size, deadline))
    return PeerRequest(kind, ticket, nonce_s, nonce_c, proof)


def _first_byte(sock: socket.socket, deadline: float) -> int:
    """Wait for the first byte and leave it in the stream."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        first = sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        raise DeadlineExceededError("the peer does not respond") from None
    if not first:
        raise ProtocolError("the peer closed the connection")
    return first[0]


def prove_as_server(sock: socket.socket, secret: bytes, request: PeerRequest) -> bytes:
    """Return the session key of a data connection. RefusedError if the other side does not hold the secret."""
    if not hmac.compare_digest(request.proof, peer_wire.peer_client_proof(secret, request.nonce_s, request.nonce_c)):
        raise RefusedError("the client does not hold this pool's secret")
    sock.sendall(peer_wire.peer_server_proof(secret, request.nonce_s, request.nonce_c))
    return peer_wire.peer_session_key(secret, request.nonce_s, request.nonce_c)
