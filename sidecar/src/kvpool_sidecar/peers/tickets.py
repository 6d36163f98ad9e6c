"""Tickets: permission to open one data connection, issued over a control channel that both certificates authenticate.

A ticket is a random name and a random key. The name is sent in clear text, the key is never sent: both sides prove it
with the nonces of both (kvpool_sidecar.peers.tcp), and derive the key of the connection's request MACs from it. A
ticket is valid once, for a minute, and for the address that requested it.
"""

from __future__ import annotations

import collections
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import peer_wire

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LIFE_S", "USE_S", "Ticket", "TicketIssuer"]

LIFE_S = 60.0
USE_S = 40.0  # its holder does not use it later than this
MAX_TICKETS = 4096
MAX_PER_HOST = 64


class Ticket(NamedTuple):
    """A ticket, and for its holder the address and port of the listener that redeems it."""

    name: bytes
    key: bytes
    host: str = ""
    port: int = 0


class _Issued(NamedTuple):
    key: bytes
    host: str
    until: float


class TicketIssuer:
    """Issues and redeems tickets on the serving node. Thread-safe, bounded: oldest tickets of a host go first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: collections.OrderedDict[bytes, _Issued] = collections.OrderedDict()

    def issue(self, host: str, count: int) -> list[Ticket]:
        """Issue tickets for connections from `host`."""
        tickets = [
            Ticket(secrets.token_bytes(peer_wire.PEER_TICKET_BYTES), secrets.token_bytes(32))
            for _ in range(min(count, peer_wire.MAX_TICKETS))
        ]
        now = self._clock()
        with self._lock:
            for name, entry in list(self._issued.items()):
                if entry.until > now:
                    break
                del self._issued[name]
            own = [name for name, entry in self._issued.items() if entry.host == host]
            for name in own[: max(0, len(own) + len(tickets) - MAX_PER_HOST)]:
                del self._issued[name]
            for ticket in tickets:
                self._issued[ticket.name] = _Issued(ticket.key, host, now + LIFE_S)
            while len(self._issued) > MAX_TICKETS:
                self._issued.popitem(last=False)
        return tickets

    def redeem(self, name: bytes, host: str) -> bytes | None:
        """Consume a ticket; its key, or None if it is unknown, expired, or another host's."""
        with self._lock:
            entry = self._issued.pop(name, None)
        if entry is None or entry.until <= self._clock() or entry.host != host:
            return None
        return entry.key
