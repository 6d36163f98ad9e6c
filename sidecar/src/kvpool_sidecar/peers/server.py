"""Serves this node's blocks to its peers: a thread per connection, sendfile, nothing before authentication.

Peers authenticate with a certificate, or with a ticket that was issued for one; without `security`, with the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, KVPoolError, ProtocolError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool.transport import page_cache
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.rdma.server import PeerRdma
from kvpool_sidecar.peers.unproven import UnprovenConnections
from kvpool_sidecar.resilience.fair_queue import PEER_BYTES, FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.peers.rdma.staging import Staging
    from kvpool_sidecar.peers.security import PeerSecurity
    from kvpool_sidecar.storage.base import Block, Store

__all__ = ["PeerServer", "PeerServerOptions", "Source", "send_file"]

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
_HANDSHAKE_S = 5.0
_FIRST_BYTES_S = 1.0
_IDLE_S = 120.0
_SEND_S = 10.0
_CHUNK_BYTES = 1 << 20
_FILL_BYTES = 4 << 20  # of a cold file that are brought into the page cache before they are sent
_MAX_OPEN = 16
_GRANT_BYTES = 4 << 20  # small blocks share a grant
_thread = threading.local()
_Tenant = tuple[str, int]  # address of the requesting node, and its lane for one of its tenants
_MAX_QUEUED_S = 1.0  # longest wait of a request in the queue


@dataclass(frozen=True)
class PeerServerOptions:
    """`security` authenticates peers by certificate or ticket; without it the bare `secret` does.

    `queue` admits the bytes sent to peers; `staging` serves reads by RDMA; `roster` returns the pool's addresses.
    """

    secret: bytes = b""
    security: PeerSecurity | None = None
    congestion_control: str = ""
    queue: FairQueue | None = None
    staging: Staging | None = None
    roster: Callable[[], Container[str]] = tuple


class PeerServer:
    """Binds immediately (OSError if the address is taken), serves from `start` to `stop`.

    `on_absent(key)` is called for blocks that a peer requested and this node does not have.
    """

    def __init__(
        self,
        host: str,
        port: int,
        store: Store,
        stats: Stats,
        options: PeerServerOptions,
        *,
        on_absent: Callable[[bytes], None] = lambda _key: None,
    ) -> None:
        self._listener = tcp.listen(host, port)
        self._host = host
        self.port: int = self._listener.getsockname()[1]
        self._secret = options.secret
        self._security = options.security
        self._store = store
        self._stats = stats
        self._congestion_control = options.congestion_control
        self._on_absent = on_absent
        self._queue = options.queue if options.queue is not None else FairQueue(PEER_BYTES)
        self._staging = options.staging
        self._handlers: dict[int, Callable[[bytes, int], bytes]] = {wire.Op.HOTTEST: lambda _request, _flags: b""}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unproven = UnprovenConnections(options.roster)
        self._stopped = threading.Event()
        tcp.configure(self._listener, options.congestion_control)
        self.congestion_control = tcp.congestion_control(self._listener)

    def register(self, op: int, handler: Callable[[bytes, int], bytes]) -> None:
        """Serve `op` by `handler(request of 32 bytes, flags)`, which returns the response body. Before `start` only."""
        self._handlers[op] = handler

    def start(self) -> None:
        """Accept connections."""
        threading.Thread(target=self._accept, name="peer-accept", daemon=True).start()

    def stop(self) -> None:
        """Close the listener and every connection."""
        self._stopped.set()
        with self._lock:
            doomed = [self._listener, *self._connections]
        for sock in doomed:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of the listener, as the index gets them."""
        return self._host, self.port

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as e:
                if self._stopped.is_set():
                    return
                log.warning("a peer connection cannot be accepted: %s", e.strerror)
                time.sleep(0.1)
                continue
            if self._admit(sock, address[0]):
                threading.Thread(target=self._serve, args=(sock, address[0]), name="peer", daemon=True).start()
            else:
                self._stats.add("refused", "peer-connections")
                sock.close()

    def _admit(self, sock: socket.socket, host: str) -> bool:
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                return False
            admission = self._unproven.enter(sock, host)
            if admission.admitted:
                self._connections.add(sock)
        if admission.evicted is not None:
            self._stats.add("refused", "peer-connections")
            with contextlib.suppress(OSError):
                socket.socket.shutdown(admission.evicted, socket.SHUT_RDWR)  # its thread sees the end and closes it
        return admission.admitted

    def _serve(self, sock: socket.socket, host: str) -> None:
        unauthenticated = True
        try:
            tcp.configure(sock, self._congestion_control)
            tcp.set_send_timeout(sock, _SEND_S)
            deadline = time.monotonic() + _HANDSHAKE_S
            request = tcp.receive_peer_request(sock, deadline, _FIRST_BYTES_S)
            if request is not None:
                session_key = tcp.prove_as_server(sock, self._ticket_secret(request, host), request)
            else:
                sock = self._start_tls(sock)
                session_key = self._handshake(sock, deadline)
            unauthenticated = False
            self._unproven.leave(sock)
            if self._security is not None and isinstance(sock, ssl.SSLSocket) and not session_key:
                self._security.serve_tickets(sock, host, self.address)
            else:
                self._serve_requests(sock, host, session_key, PeerRdma(self._staging, self._stats))
        except (KVPoolError, OSError) as e:
            if unauthenticated and self._unproven.leave(sock):
                bad_certificate = isinstance(e, ssl.SSLCertVerificationError)
                self._stats.add("refused", "peer-certificate" if bad_certificate else "peer-proof")
                log.warning("peer %s: %s", host, e)
            else:
                log.debug("peer %s: %s", host, e)
                if isinstance(e, OSError):  # a peer that does not read would not read the end either
                    tcp.reset_at_close(sock)
        except Exception:
            log.exception("peer %s", host)
        finally:
            with self._lock:
                self._connections.discard(sock)
            self._unproven.leave(sock)
            sock.close()

    def _ticket_secret(self, request: tcp.PeerRequest, host: str) -> bytes:
        """Return the secret that authenticates a plain data connection."""
        if request.kind != peer_wire.PeerKind.DATA:
            raise ProtocolError(f"unexpected connection kind {request.kind}")
        if self._security is None:
            return self._secret
        key = None if self._security.encrypts_data else self._security.ticket_issuer.redeem(request.ticket, host)
        if key is None:
            raise RefusedError("the ticket is unknown, expired or used")
        return key

    def _start_tls(self, sock: socket.socket) -> ssl.SSLSocket:
        if self._security is None:
            raise ProtocolError("unexpected TLS connection")
        with self._lock:
            self._connections.discard(sock)
            tls = self._security.accept(sock)
            self._connections.add(tls)
            self._unproven.replace(sock, tls)
        return tls

    def _handshake(self, tls: socket.socket, deadline: float) -> bytes:
        """Authenticate the peer; the session key of a data connection, or nothing for a control channel."""
        assert isinstance(tls, ssl.SSLSocket)  # noqa: S101
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        tls.do_handshake()
        if self._security is not None and self._security.identity.is_operator(tls.getpeercert()):
            raise RefusedError("the operator may not read blocks")
        (kind,) = peer_wire.PEER_TLS.unpack(tcp.receive(tls, peer_wire.PEER_TLS.size, deadline))
        if kind not in (peer_wire.PeerKind.CONTROL, peer_wire.PeerKind.TLS_DATA):
            raise ProtocolError(f"unexpected connection kind {kind}")
        return tcp.receive(tls, 32, deadline) if kind == peer_wire.PeerKind.TLS_DATA else b""

    def _serve_requests(self, sock: socket.socket, host: str, session_key: bytes, rdma: PeerRdma) -> None:
        sequence, tenant = 0, (host, 0)
        requests = _Requests(sock)
        while not self._stopped.is_set():
            wanted: list[bytes] = []  # consecutive block requests
            for request in requests.receive(time.monotonic() + _IDLE_S):
                magic, op, flags, lane, number, key, mac = peer_wire.PEER_REQUEST.unpack(request)
                expected = peer_wire.peer_request_mac(session_key, request)
                genuine = number == sequence and hmac.compare_digest(mac, expected)
                if magic != wire.MAGIC or op not in (wire.Op.OPEN, *self._handlers, *rdma.OPERATIONS) or not genuine:
                    self._stats.add("refused", "peer-request")
                    return
                sequence += 1
                tenant = (host, lane)  # a tenant's unread streams keep no other one of its node waiting
                if op == wire.Op.OPEN and not flags & wire.Flag.VERIFY:
                    wanted.append(key)
                    continue
                self._send_blocks(sock, tenant, wanted)
                wanted = []
                if op == wire.Op.OPEN:
                    self._store.verify(key)
                    self._send_blocks(sock, tenant, [key])
                elif op in self._handlers:
                    self._send_response(sock, self._handlers[op](key, flags))
                elif answer := rdma.response(op, key):
                    sock.sendall(answer)
            self._send_blocks(sock, tenant, wanted)

    def _send_response(self, sock: socket.socket, body: bytes) -> None:
        status = peer_wire.PeerStatus.OK if body else peer_wire.PeerStatus.MISS
        sock.sendall(peer_wire.PEER_RESPONSE.pack(wire.MAGIC, status, 0, 0, len(body)) + body)

    def _send_blocks(self, sock: socket.socket, tenant: _Tenant, keys: Sequence[bytes]) -> None:
        """Send these blocks in order, in batches under one grant each."""
        for start in range(0, len(keys), _MAX_OPEN):
            some = keys[start : start + _MAX_OPEN]
            found = list(zip(some, self._store.open_many(some), strict=True))
            try:
                while found:
                    self._send_batch(sock, tenant, found)
            finally:
                for _, block in found:
                    if block is not None:
                        os.close(block.fd)

    def _send_batch(self, sock: socket.socket, tenant: _Tenant, found: list[tuple[bytes, Block | None]]) -> None:
        """Remove the blocks of one grant from the front of `found` and send them."""
        count, size = _batch(found)
        grant = self._queue.acquire(tenant, size, time.monotonic() + _MAX_QUEUED_S) if size else None
        send = _send_encrypted if isinstance(sock, ssl.SSLSocket) else send_file
        served = served_bytes = 0
        is_warm = False  # the last block was in the page cache, and the next one is probably, too
        try:
            for _ in range(count):
                key, block = found[0]
                if block is None:
                    self._stats.add("peer_served", "miss")
                    self._on_absent(key)  # the index is stale, otherwise no peer would request it
                if block is None or grant is None:
                    sock.sendall(peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.MISS, 0, 0, 0))
                else:
                    length = HEADER_BYTES + block.payload_len
                    response = peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.OK, 0, 0, length)
                    is_warm = is_warm or page_cache.ends_in_memory(block.fd, length)
                    if not send(sock, response, Source(block.fd, length, is_cold=not is_warm)):
                        # a response in progress cannot report an error
                        raise CorruptBlockError("the block shrank while it was sent", block_key=key.hex())
                    served += 1
                    served_bytes += length
                found.pop(0)
                if block is not None:
                    os.close(block.fd)
        finally:
            if grant is not None:
                self._queue.release(grant)
            elif size:
                self._stats.add("refused", "busy-peers")
            if served:
                self._stats.add("peer_served", "blocks", served)
                self._stats.add("peer_served", "bytes", served_bytes)


class _Requests:
    """Requests of one connection, in the batches in which they arrive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = memoryview(bytearray(wire.MAX_BATCH * peer_wire.PEER_REQUEST.size))
        self._have = 0

    def receive(self, deadline: float) -> list[bytes]:
        """Read at least one request by `deadline` (monotonic); the socket is blocking then, as sendfile needs.

        Raises DeadlineExceededError, or ProtocolError if the peer has closed the connection.
        """
        size = peer_wire.PEER_REQUEST.size
        while self._have < size:
            self._have += tcp.receive_some(self._socket, self._buffer[self._have :], deadline)
        self._socket.settimeout(None)  # the kernel aborts a stuck send
        whole = self._have // size * size
        taken = [bytes(self._buffer[at : at + size]) for at in range(0, whole, size)]
        self._buffer[: self._have - whole] = bytes(self._buffer[whole : self._have])
        self._have -= whole
        return taken


def _batch(found: Sequence[tuple[bytes, Block | None]]) -> tuple[int, int]:
    """Return how many blocks from the front one grant covers, at least one, and their bytes."""
    size = 0
    for count, (_, block) in enumerate(found):
        more = 0 if block is None else HEADER_BYTES + block.payload_len
        if size and size + more > _GRANT_BYTES:
            return count, size
        size += more
    return len(found), size


class Source:
    """A block's file; a cold one enters the page cache in large folios, which sendfile and preadv would not give it."""

    def __init__(self, fd: int, size: int, *, is_cold: bool) -> None:
        self.fd = fd
        self.size = size
        self._filled = 0 if is_cold else size

    def available(self, at: int) -> int:
        """Return how many bytes from `at` on to send next, at least one; waits for the drive."""
        while self._filled <= at:
            page_cache.fill(self.fd, self._filled, min(_FILL_BYTES, self.size - self._filled))
            self._filled += _FILL_BYTES
        return min(self._filled, self.size) - at


def send_file(sock: socket.socket, response: bytes, source: Source) -> bool:
    """Send header and file; False if the file is shorter than expected."""
    sock.sendall(response, socket.MSG_MORE)
    sent = 0
    while sent < source.size:
        n = os.sendfile(sock.fileno(), source.fd, sent, source.available(sent))
        if n == 0:
            return False
        sent += n
    return True


def _send_encrypted(sock: socket.socket, response: bytes, source: Source) -> bool:
    """As `send_file`, through TLS and this thread's buffer."""
    buffer: memoryview | None = getattr(_thread, "buffer", None)
    if buffer is None:
        buffer = _thread.buffer = memoryview(bytearray(_CHUNK_BYTES))
    sock.sendall(response)
    sent = 0
    while sent < source.size:
        n = os.preadv(source.fd, [buffer[: min(source.available(sent), _CHUNK_BYTES)]], sent)
        if n == 0:
            return False
        sock.sendall(buffer[:n])
        sent += n
    return True
