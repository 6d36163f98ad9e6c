"""Room for connections that have not proved yet that they come from a peer: strangers cannot keep peers out.

The oldest connection makes room for a new one. Addresses of the pool's nodes have room of their own, and no address has
all of it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container

__all__ = ["Admission", "UnprovenConnections"]

_PER_ROOM = 64  # connections of known addresses; the same number of all others
_KNOWN_PER_ADDRESS, _OTHERS_PER_ADDRESS = 32, 8
_MIN_AGE_S = 0.1  # a stranger's connection makes no room for another stranger's before it could have proved itself


class Admission(NamedTuple):
    """Whether a connection may stay, and the one that makes room for it."""

    admitted: bool
    evicted: socket.socket | None = None


class _Connection(NamedTuple):
    host: str
    known: bool
    since: float


class UnprovenConnections:
    """Connections that are not authenticated. Thread-safe. `roster` returns the addresses of the pool's nodes."""

    def __init__(self, roster: Callable[[], Container[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._roster = roster
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def enter(self, sock: socket.socket, host: str) -> Admission:
        """Admit a new connection if there is room. The caller ends `evicted`, which leaves immediately."""
        known = host in self._roster()
        now = self._clock()
        with self._lock:
            evicted = self._oldest_to_leave(host, known)
            if evicted is not None:
                if not known and now - self._open[evicted].since < _MIN_AGE_S:
                    return Admission(False)
                del self._open[evicted]
            self._open[sock] = _Connection(host, known, now)
        return Admission(True, evicted)

    def replace(self, sock: socket.socket, tls: socket.socket) -> None:
        """Record that `tls` took the connection `sock` over."""
        with self._lock:
            if (one := self._open.pop(sock, None)) is not None:
                self._open[tls] = one

    def leave(self, sock: socket.socket) -> bool:
        """Record that a connection was authenticated or has ended. False if it made room before."""
        with self._lock:
            return self._open.pop(sock, None) is not None

    def _oldest_to_leave(self, host: str, known: bool) -> socket.socket | None:
        room = [sock for sock, one in self._open.items() if one.known == known]
        same = [sock for sock in room if self._open[sock].host == host]
        if len(same) < (_KNOWN_PER_ADDRESS if known else _OTHERS_PER_ADDRESS):
            if len(room) < _PER_ROOM:
                return None
            same = room
        return min(same, key=lambda sock: self._open[sock].since)
