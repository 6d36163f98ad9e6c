"""How sidecars of a pool prove themselves to each other, and what of their talk is encrypted.

`ControlOnly`: certificates of both on a TLS 1.3 control channel; it gives tickets, and a ticket opens a plain TCP
connection for data. `Always`: certificates of both and TLS on the data connections, too; tickets are not taken.
"""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Any

from kvpool.errors import PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.connection import dial
from kvpool_sidecar.peers.control import ControlChannels, connect_tls
from kvpool_sidecar.peers.tickets import TicketIssuer
from kvpool_sidecar.peers.tls_connection import TlsConnection

if TYPE_CHECKING:
    import socket

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.certificate import NodeIdentity
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.peers.tickets import Ticket

__all__ = ["PeerSecurity"]

_IDLE_S = 120.0  # of a control channel; the peer makes a new one when it needs tickets again


class PeerSecurity:
    """Both sides of one node. Thread-safe."""

    def __init__(self, identity: NodeIdentity, encryption: str = "ControlOnly", congestion_control: str = "") -> None:
        self.identity = identity
        self.encrypts_data = encryption == "Always"
        self.ticket_issuer = TicketIssuer()
        self._congestion_control = congestion_control
        self._control_channels = ControlChannels(identity)

    def dial(self, peer: NodeInfo, timeout_s: float) -> PeerConnection:
        """A data connection. PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError."""
        deadline = time.monotonic() + timeout_s
        if self.encrypts_data:
            tls = connect_tls(peer, self.identity, peer_wire.PeerKind.TLS_DATA, deadline, self._congestion_control)
            try:
                return TlsConnection(tls, deadline)
            except OSError as e:
                tls.close()
                reason = getattr(e, "reason", "") or e.strerror or type(e).__name__
                raise PoolUnavailableError(f"peer: {reason}", where=f"{peer.host}:{peer.port}") from None
        ticket = self._control_channels.ticket(peer, deadline)
        try:
            return self._dial_with_ticket(ticket, peer, deadline)
        except (ProtocolError, RefusedError):
            # a ticket of a process that another has taken the place of, at the same address: once more with its own
            self._control_channels.reset(peer, deadline)
            return self._dial_with_ticket(self._control_channels.ticket(peer, deadline), peer, deadline)

    def _dial_with_ticket(self, ticket: Ticket, peer: NodeInfo, deadline: float) -> PeerConnection:
        return dial(
            peer.host,
            peer.port,
            secret=ticket.key,
            ticket=ticket.name,
            timeout_s=max(0.001, deadline - time.monotonic()),
            congestion_control=self._congestion_control,
        )

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """The serving side's end of TLS on `sock`, which it takes over; the handshake is still to be done."""
        return self.identity.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def serve_tickets(self, tls: ssl.SSLSocket, host: str) -> None:
        """Answer on a control channel until the peer ends it, is silent for long, or its certificate runs out."""
        until = time.monotonic() + ssl.cert_time_to_seconds(str((tls.getpeercert() or {})["notAfter"])) - time.time()
        while True:
            request = tcp.receive(tls, peer_wire.PEER_TICKETS.size, min(until, time.monotonic() + _IDLE_S))
            magic, count = peer_wire.PEER_TICKETS.unpack(request)
            if magic != wire.MAGIC or not 0 < count <= peer_wire.MAX_TICKETS:
                return
            tls.sendall(b"".join(name + key for name, key in self.ticket_issuer.issue(host, count)))

    def status(self) -> dict[str, Any]:
        """For /status."""
        return {
            "encryption": "Always" if self.encrypts_data else "ControlOnly",
            "certificate_expiry": self.identity.expiry,
            "certificate_seconds_left": round(self.identity.seconds_left),
            "problem": self.identity.problem,
        }

    def close(self) -> None:
        """End the control channels."""
        self._control_channels.close()
        self.identity.stop()
