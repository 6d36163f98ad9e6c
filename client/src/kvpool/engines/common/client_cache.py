"""Cache of clients, one per fingerprint, created in the background on first use.

A process that serves several engines learns their fingerprint inputs from the first requests. Reading a model's files
may take seconds: callers wait at most until their own deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpool.transport.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvpool.client import Client

__all__ = ["ClientCache"]

_log = logging.getLogger("kvpool")
_CONNECT_S = 2.0  # enough to connect to a running sidecar, even on a busy node

K = TypeVar("K", bound="Hashable")


class ClientCache(Generic[K]):
    """At most `limit` clients by `K`; `make(key)` runs on a separate thread. Thread-safe; no method raises."""

    def __init__(self, make: Callable[[K], Client], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._condition = threading.Condition()
        self._clients: dict[K, Client | None] = {}  # None: being created, or creation failed
        self._making: set[K] = set()
        self._workers = WorkerPool(1, "kvpool-open")
        self._closed = False

    def get(self, key: K, deadline: float) -> Client | None:
        """Return the client, connected if possible by `deadline` (time.monotonic()); None if there is none (yet)."""
        with self._condition:
            is_new = key not in self._clients
            if is_new:
                if self._closed or len(self._clients) >= self._limit:
                    return None
                self._clients[key] = None
                self._making.add(key)
                if len(self._clients) == self._limit:
                    _log.warning("kvpool: %d fingerprints in use: blocks of further ones are not cached", self._limit)
                self._workers.submit(lambda: self._open(key))
            if key in self._making:
                left = max(0.0, deadline - time.monotonic())
                self._condition.wait_for(lambda: key not in self._making, left)
            client = self._clients[key]
            is_new = is_new and client is not None
        if is_new and client is not None:
            client.wait_connected(max(0.0, min(_CONNECT_S, deadline - time.monotonic())))
        return client

    def all(self) -> list[Client]:
        """Return all clients."""
        with self._condition:
            return [client for client in self._clients.values() if client is not None]

    def close(self) -> None:
        """Close every client; no more are created."""
        with self._condition:
            self._closed = True
        for client in self.all():
            client.close()
        self._workers.close()

    def _open(self, key: K) -> None:
        client = None
        try:
            client = self._make(key)
        except Exception:
            _log.exception("kvpool: a client could not be created; some of this engine's blocks are not cached")
        with self._condition:
            if self._closed and client is not None:
                client.close()
            self._clients[key] = client
            self._making.discard(key)
            self._condition.notify_all()
