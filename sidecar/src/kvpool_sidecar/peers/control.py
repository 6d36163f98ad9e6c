"""Client side of the control channels: one TLS connection to each peer, which issues a few tickets at a time."""

from __future__ import annotations

import collections
import contextlib
import logging
import ssl
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, PoolUnavailableError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.tickets import USE_S, Ticket
from kvpool_sidecar.resilience.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.certificate import NodeIdentity

__all__ = ["ControlChannels", "connect_tls"]

log = logging.getLogger(__name__)

MAX_PEERS = 1024
_BATCH = 8
_WARN_AGAIN_S = 3600.0
_ENTRY = peer_wire.PEER_TICKET_BYTES + 32


def connect_tls(
    peer: NodeInfo, identity: NodeIdentity, kind: peer_wire.PeerKind, deadline: float, congestion_control: str = ""
) -> ssl.SSLSocket:
    """Open a TLS connection to exactly the node that the index names. It gets nothing but TLS before its proof.

    Raises PoolUnavailableError, DeadlineExceededError, ProtocolError, or RefusedError for an invalid certificate.
    """
    sock = tcp.connect(peer.host, peer.port, deadline, congestion_control)
    try:
        tcp.await_greeting(sock, deadline)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        tls = identity.client.wrap_socket(sock, server_hostname=identity.name_of(peer.node))
        sock = tls
        tls.sendall(peer_wire.PEER_TLS.pack(kind))
        return tls
    except ssl.SSLCertVerificationError as e:
        sock.close()
        raise RefusedError(f"peer: {e.verify_message}", where=f"{peer.host}:{peer.port}") from None
    except OSError as e:
        sock.close()
        reason = getattr(e, "reason", "") or e.strerror or type(e).__name__
        raise PoolUnavailableError(f"peer: {reason}", where=f"{peer.host}:{peer.port}") from None
    except BaseException:
        sock.close()
        raise


class _ControlChannel:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tls: ssl.SSLSocket | None = None
        self.tickets: collections.deque[tuple[float, Ticket]] = collections.deque()

    def close(self) -> None:
        tls, self.tls = self.tls, None
        self.tickets.clear()
        if tls is not None:
            tls.close()


class ControlChannels:
    """The control channels of a sidecar to its peers. Thread-safe."""

    def __init__(self, identity: NodeIdentity, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: BoundedCache[NodeInfo, _ControlChannel] = BoundedCache(MAX_PEERS)
        self._warned: BoundedCache[str, bool] = BoundedCache(MAX_PEERS, _WARN_AGAIN_S, clock)

    def ticket(self, peer: NodeInfo, deadline: float) -> Ticket:
        """Return an unused ticket. KVPoolError if the peer issues none by `deadline`."""
        channel = self._channel(peer)
        if not channel.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PoolUnavailableError("peer: its control channel is busy", where=peer.host)
        try:
            while channel.tickets:
                taken, ticket = channel.tickets.popleft()
                if self._clock() - taken < USE_S:
                    return ticket
            if channel.tls is not None:
                with contextlib.suppress(KVPoolError, OSError):  # the channel may have ended: retry on a new one
                    return self._request_tickets(channel, peer, deadline)
            channel.close()
            try:
                return self._request_tickets(channel, peer, deadline)
            except BaseException:
                channel.close()
                raise
        finally:
            channel.lock.release()

    def reset(self, peer: NodeInfo, deadline: float) -> None:
        """Drop the peer's tickets, which it no longer accepts; the next ticket is requested on a new channel."""
        channel = self._channel(peer)
        if channel.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                channel.close()
            finally:
                channel.lock.release()

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            channels = self._channels.values()
            self._channels.clear()
        for channel in channels:
            with channel.lock:
                channel.close()

    def _channel(self, peer: NodeInfo) -> _ControlChannel:
        with self._lock:
            channel = self._channels.peek(peer) or _ControlChannel()
            evicted = self._channels.put(peer, channel)
        for _, old in evicted:
            old.close()
        return channel

    def _request_tickets(self, channel: _ControlChannel, peer: NodeInfo, deadline: float) -> Ticket:
        if channel.tls is None:
            channel.tls = connect_tls(peer, self._identity, peer_wire.PeerKind.CONTROL, deadline)
        tls = channel.tls
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            tls.sendall(peer_wire.PEER_TICKETS.pack(wire.MAGIC, _BATCH))
            address = tcp.receive(tls, peer_wire.PEER_ADDRESS.size, deadline)
            answer = tcp.receive(tls, _BATCH * _ENTRY, deadline)
        except (ssl.SSLError, ConnectionError) as e:
            reason = str(getattr(e, "reason", "") or type(e).__name__)
            kind = RefusedError if "CERTIFICATE" in reason else PoolUnavailableError
            raise kind(f"peer: {reason}", where=peer.host) from None
        host, port = peer_wire.unpack_peer_address(address)
        self._require_address(peer, host, port)
        now = self._clock()
        for at in range(0, len(answer), _ENTRY):
            split = at + peer_wire.PEER_TICKET_BYTES
            name, key = answer[at:split], answer[split : at + _ENTRY]
            channel.tickets.append((now, Ticket(name, key, host, port)))
        return channel.tickets.popleft()[1]

    def _require_address(self, peer: NodeInfo, host: str, port: int) -> None:
        """RefusedError unless the peer itself confirms the address of the index: else something relays between them."""
        if (host, port) == (peer.host, peer.port):
            return
        with self._lock:
            was_warned = self._warned.get(peer.node) is not None
            if not was_warned:
                self._warned.put(peer.node, True)
        if not was_warned:
            log.warning(
                "refused peer %s: the index names %s:%d, its certificate's holder serves %s:%d; check who writes to "
                "the index",
                peer.node,
                peer.host,
                peer.port,
                host,
                port,
            )
        raise RefusedError("peer: its address is not the one in the index", where=f"{peer.host}:{peer.port}")
