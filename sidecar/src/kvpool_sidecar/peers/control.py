"""The control channel of the asking side: one TLS connection to each peer, over which tickets come, a few at a time."""

from __future__ import annotations

import collections
import contextlib
import ssl
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, PoolUnavailableError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.tickets import USE_S, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.certificate import NodeIdentity

__all__ = ["ControlChannels", "connect_tls"]

MAX_PEERS = 1024
_BATCH = 8
_ENTRY = peer_wire.PEER_TICKET_BYTES + 32


def connect_tls(
    peer: NodeInfo, identity: NodeIdentity, kind: peer_wire.PeerKind, deadline: float, congestion_control: str = ""
) -> ssl.SSLSocket:
    """A TLS connection to the very node that the index named.

    PoolUnavailableError, DeadlineExceededError, ProtocolError, or RefusedError for a certificate that is not good.
    """
    sock = tcp.connect(peer.host, peer.port, deadline, congestion_control)
    try:
        tcp.send_connection_kind(sock, kind, deadline)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return identity.client.wrap_socket(sock, server_hostname=identity.name_of(peer.node))
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
    """Thread-safe. One for a sidecar."""

    def __init__(self, identity: NodeIdentity, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: collections.OrderedDict[NodeInfo, _ControlChannel] = collections.OrderedDict()

    def ticket(self, peer: NodeInfo, deadline: float) -> Ticket:
        """One that has not been used. KVPoolError if the peer gives none by `deadline`."""
        control = self._channel(peer)
        if not control.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PoolUnavailableError("peer: its control channel is busy", where=peer.host)
        try:
            while control.tickets:
                taken, ticket = control.tickets.popleft()
                if self._clock() - taken < USE_S:
                    return ticket
            if control.tls is not None:
                with contextlib.suppress(KVPoolError, OSError):  # it may have ended since: once more with a new one
                    return self._request_tickets(control, peer, deadline)
            control.close()
            try:
                return self._request_tickets(control, peer, deadline)
            except BaseException:
                control.close()
                raise
        finally:
            control.lock.release()

    def reset(self, peer: NodeInfo, deadline: float) -> None:
        """The tickets of this peer are of no use: the next one is asked for on a new channel."""
        control = self._channel(peer)
        if control.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                control.close()
            finally:
                control.lock.release()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            controls = list(self._channels.values())
            self._channels.clear()
        for control in controls:
            with control.lock:
                control.close()

    def _channel(self, peer: NodeInfo) -> _ControlChannel:
        doomed = None
        with self._lock:
            control = self._channels.setdefault(peer, _ControlChannel())
            self._channels.move_to_end(peer)
            if len(self._channels) > MAX_PEERS:
                _, doomed = self._channels.popitem(last=False)
        if doomed is not None:
            doomed.close()
        return control

    def _request_tickets(self, control: _ControlChannel, peer: NodeInfo, deadline: float) -> Ticket:
        if control.tls is None:
            control.tls = connect_tls(peer, self._identity, peer_wire.PeerKind.CONTROL, deadline)
        tls = control.tls
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            tls.sendall(peer_wire.PEER_TICKETS.pack(wire.MAGIC, _BATCH))
            answer = tcp.receive(tls, _BATCH * _ENTRY, deadline)
        except (ssl.SSLError, ConnectionError) as e:
            reason = str(getattr(e, "reason", "") or type(e).__name__)
            kind = RefusedError if "CERTIFICATE" in reason else PoolUnavailableError
            raise kind(f"peer: {reason}", where=peer.host) from None
        now = self._clock()
        for at in range(0, len(answer), _ENTRY):
            split = at + peer_wire.PEER_TICKET_BYTES
            name, key = answer[at:split], answer[split : at + _ENTRY]
            control.tickets.append((now, Ticket(name, key)))
        return control.tickets.popleft()[1]
