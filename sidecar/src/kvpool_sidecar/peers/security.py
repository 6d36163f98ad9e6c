"""Authentication between the sidecars of a pool, and encryption of their connections.

`ControlOnly`: certificates of both on a TLS 1.3 control channel, which issues tickets and names the address of the data
listener; a ticket opens a plain TCP connection for data to that address. `Always`: certificates of both and TLS on the
data connections as well; tickets are rejected.
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

_IDLE_S = 120.0  # of a control channel; the peer opens a new one when it needs tickets again


class PeerSecurity:
    """Client and server side of one node. Thread-safe."""

    def __init__(self, identity: NodeIdentity, encryption: str = "ControlOnly", congestion_control: str = "") -> None:
        self.identity = identity
        self.encrypts_data = encryption == "Always"
        self.ticket_issuer = TicketIssuer()
        self._congestion_control = congestion_control
        self._control_channels = ControlChannels(identity)

    def dial(self, peer: NodeInfo, timeout_s: float) -> PeerConnection:
        """Open a data connection. PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError."""
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
            # the ticket is of a process that was replaced at the same address: retry with a ticket of the new one
            self._control_channels.reset(peer, deadline)
            return self._dial_with_ticket(self._control_channels.ticket(peer, deadline), peer, deadline)

    def _dial_with_ticket(self, ticket: Ticket, peer: NodeInfo, deadline: float) -> PeerConnection:
        return dial(
            ticket.host,
            ticket.port,
            secret=ticket.key,
            ticket=ticket.name,
            timeout_s=max(0.001, deadline - time.monotonic()),
            congestion_control=self._congestion_control,
        )

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap `sock`, which it takes over, in the serving side of TLS; the caller does the handshake."""
        return self.identity.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def serve_tickets(self, tls: ssl.SSLSocket, host: str, own: tuple[str, int]) -> None:
        """Issue tickets on a control channel until the peer closes it, is idle for 120 s, or is no longer certified.

        Each answer names `own`, the address and port of the data listener, which the index cannot prove.
        """
        address = peer_wire.pack_peer_address(*own)
        until = time.monotonic() + ssl.cert_time_to_seconds(str((tls.getpeercert() or {})["notAfter"])) - time.time()
        while True:
            request = tcp.receive(tls, peer_wire.PEER_TICKETS.size, min(until, time.monotonic() + _IDLE_S))
            magic, count = peer_wire.PEER_TICKETS.unpack(request)
            if magic != wire.MAGIC or not 0 < count <= peer_wire.MAX_TICKETS:
                return
            tickets = self.ticket_issuer.issue(host, count)
            tls.sendall(address + b"".join(ticket.name + ticket.key for ticket in tickets))

    def status(self) -> dict[str, Any]:
        """For /status."""
        return {
            "encryption": "Always" if self.encrypts_data else "ControlOnly",
            "certificate_expiry": self.identity.expiry,
            "certificate_seconds_left": round(self.identity.seconds_left),
            "problem": self.identity.problem,
        }

    def close(self) -> None:
        """Close the control channels and stop renewing the certificate."""
        self._control_channels.close()
        self.identity.stop()
