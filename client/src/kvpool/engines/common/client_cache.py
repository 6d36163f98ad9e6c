"""One client for each fingerprint that a process turns out to need, made in the background when first asked for.

A process that serves several engines learns what their blocks mean from its first questions. Reading a model's files
for its fingerprint may take seconds: whoever asks meanwhile waits until its own deadline and no longer.
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
_CONNECT_S = 2.0  # a sidecar that is there is connected by then, even on a busy node

K = TypeVar("K", bound="Hashable")


class ClientCache(Generic[K]):
    """At most `limit` clients by `K`; `make(key)` runs on a thread of its own. Thread-safe; nothing raises."""

    def __init__(self, make: Callable[[K], Client], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._condition = threading.Condition()
        self._clients: dict[K, Client | None] = {}  # None: being made, or could not be
        self._making: set[K] = set()
        self._workers = WorkerPool(1, "kvpool-open")
        self._closed = False

    def get(self, key: K, deadline: float) -> Client | None:
        """The client, connected if that was possible by `deadline` (time.monotonic()); None: there is none (yet)."""
        with self._condition:
            fresh = key not in self._clients
            if fresh:
                if self._closed or len(self._clients) >= self._limit:
                    return None
                self._clients[key] = None
                self._making.add(key)
                if len(self._clients) == self._limit:
                    _log.warning("kvpool: %d kinds of blocks in one process: no more are served", self._limit)
                self._workers.submit(lambda: self._open(key))
            if key in self._making:
                left = max(0.0, deadline - time.monotonic())
                self._condition.wait_for(lambda: key not in self._making, left)
            client = self._clients[key]
            fresh = fresh and client is not None
        if fresh and client is not None:
            client.wait_connected(max(0.0, min(_CONNECT_S, deadline - time.monotonic())))
        return client

    def all(self) -> list[Client]:
        """Those that have been made."""
        with self._condition:
            return [client for client in self._clients.values() if client is not None]

    def close(self) -> None:
        """Close every client; no more are made."""
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
            _log.exception("kvpool: the pool is off for some of this engine's blocks")
        with self._condition:
            if self._closed and client is not None:
                client.close()
            self._clients[key] = client
            self._making.discard(key)
            self._condition.notify_all()
