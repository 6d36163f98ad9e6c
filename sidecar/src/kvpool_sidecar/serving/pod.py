"""One pod of this node as the server sees it, and what it may use at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_sidecar.tenancy.identity import Identity, Tenant

__all__ = ["MAX_CONNECTIONS", "Pod"]

MAX_CONNECTIONS = 32  # eight ranks of an engine, each with the four of a client


class Pod:
    """Thread-safe counters. `write_room` is the most bytes that its unfinished writes may take.

    `readable`: the other tenants whose blocks it may read.
    """

    def __init__(self, identity: Identity, tenant: Tenant, write_room: int, readable: tuple[Tenant, ...] = ()) -> None:
        self.identity = identity
        self.tenant = tenant
        self.readable = readable
        self._lock = threading.Lock()
        self._write_room = self._total_room = write_room
        self._connections = 0

    @property
    def connections(self) -> int:
        with self._lock:
            return self._connections

    def enter(self) -> bool:
        """One more connection; False if it has as many as it may."""
        with self._lock:
            if self._connections >= MAX_CONNECTIONS:
                return False
            self._connections += 1
            return True

    def leave(self) -> None:
        """One connection less."""
        with self._lock:
            self._connections -= 1

    def limit_room(self, write_room: int) -> None:
        """So many bytes from now on, those of unfinished writes included."""
        with self._lock:
            self._write_room += write_room - self._total_room
            self._total_room = write_room

    def take_room(self, size: int) -> bool:
        """Promise `size` bytes to a write; False if that is too much."""
        with self._lock:
            if size > self._write_room:
                return False
            self._write_room -= size
            return True

    def give_room(self, size: int) -> None:
        """The write is over."""
        with self._lock:
            self._write_room += size
