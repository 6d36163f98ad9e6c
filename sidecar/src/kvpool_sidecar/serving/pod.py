"""One pod of this node with its tenant and its limits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_sidecar.tenancy.identity import Identity, Tenant

__all__ = ["MAX_CONNECTIONS", "MAX_STREAMS", "Pod"]

MAX_CONNECTIONS = 32  # eight ranks of an engine, each with the four of a client
MAX_STREAMS = 256  # connections to the stream socket: some for each connection and peer


class Pod:
    """Identity, tenant and limits of a pod. Thread-safe.

    `write_limit`: maximum bytes of the pod's unfinished writes. `readable`: other tenants whose blocks it may read.
    `has_stream_socket`: its clients can dial streams.
    """

    def __init__(self, identity: Identity, tenant: Tenant, write_limit: int, readable: tuple[Tenant, ...] = ()) -> None:
        self.identity = identity
        self.tenant = tenant
        self.readable = readable
        self._lock = threading.Lock()
        self._available = self._limit = write_limit
        self._connections = self._streams = 0
        self.has_stream_socket = False

    @property
    def connections(self) -> int:
        with self._lock:
            return self._connections

    def enter(self) -> bool:
        """Count a new connection; return False at the limit."""
        with self._lock:
            if self._connections >= MAX_CONNECTIONS:
                return False
            self._connections += 1
            return True

    def leave(self) -> None:
        """Count a closed connection."""
        with self._lock:
            self._connections -= 1

    def enter_stream(self) -> bool:
        """Count a new connection to the stream socket; return False at the limit."""
        with self._lock:
            if self._streams >= MAX_STREAMS:
                return False
            self._streams += 1
            return True

    def leave_stream(self) -> None:
        """Count a closed connection to the stream socket."""
        with self._lock:
            self._streams -= 1

    def set_limit(self, write_limit: int) -> None:
        """Change the limit; bytes of unfinished writes count against it."""
        with self._lock:
            self._available += write_limit - self._limit
            self._limit = write_limit

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes for a write; return False if they exceed the limit."""
        with self._lock:
            if size > self._available:
                return False
            self._available -= size
            return True

    def release(self, size: int) -> None:
        """Return the bytes of a finished write."""
        with self._lock:
            self._available += size
