"""Tickets: leave to open one data connection, given over a control channel that both certificates have proven.

A ticket is a random name and a random key. The name is shown in the clear, the key never; both sides prove it with
nonces of both (kvpool_sidecar.peers.tcp) and make the key of the connection's request MACs out of it. It is good
once, for a minute, and for the address that asked for it.
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
USE_S = 40.0  # who holds a ticket uses it no later
MAX_TICKETS = 4096
MAX_PER_HOST = 64


class Ticket(NamedTuple):
    name: bytes
    key: bytes


class _Issued(NamedTuple):
    key: bytes
    host: str
    until: float


class TicketIssuer:
    """Of the serving node. Thread-safe, bounded: the oldest tickets of a host make room for its new ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: collections.OrderedDict[bytes, _Issued] = collections.OrderedDict()

    def issue(self, host: str, count: int) -> list[Ticket]:
        """Tickets for connections from `host`."""
        made = [
            Ticket(secrets.token_bytes(peer_wire.PEER_TICKET_BYTES), secrets.token_bytes(32))
            for _ in range(min(count, peer_wire.MAX_TICKETS))
        ]
        now = self._clock()
        with self._lock:
            for name, entry in list(self._issued.items()):
                if entry.until > now:
                    break
                del self._issued[name]
            mine = [name for name, entry in self._issued.items() if entry.host == host]
            for name in mine[: max(0, len(mine) + len(made) - MAX_PER_HOST)]:
                del self._issued[name]
            for ticket in made:
                self._issued[ticket.name] = _Issued(ticket.key, host, now + LIFE_S)
            while len(self._issued) > MAX_TICKETS:
                self._issued.popitem(last=False)
        return made

    def redeem(self, name: bytes, host: str) -> bytes | None:
        """The key of a ticket that is good; it is used up, whatever comes of it."""
        with self._lock:
            entry = self._issued.pop(name, None)
        if entry is None or entry.until <= self._clock() or entry.host != host:
            return None
        return entry.key
