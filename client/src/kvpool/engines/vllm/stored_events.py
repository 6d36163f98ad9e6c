"""Blocks that reached the pool, for subscribers of vLLM's own KV events. Needs vLLM."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality, OffloadingEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StoredEvents"]

_MAX_EVENTS = 4096  # not yet taken by vLLM, which takes them at every step


class StoredEvents:
    """Bounded; empty unless enabled. Evictions are published by the pool's sidecars. Thread-safe."""

    def __init__(self, medium: Any, locality: Any, *, is_enabled: bool) -> None:
        self._medium = medium
        self._locality = locality or Locality.REMOTE
        self._is_enabled = is_enabled
        self._lock = threading.Lock()
        self._events: list[Any] = []

    def add(self, offload_keys: list[bytes]) -> None:
        """Record blocks that were stored."""
        if not self._is_enabled or not offload_keys:
            return
        event = OffloadingEvent(keys=offload_keys, medium=self._medium, removed=False, locality=self._locality)
        with self._lock:
            if len(self._events) < _MAX_EVENTS:
                self._events.append(event)

    def take(self) -> Iterable[Any]:
        """Return the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events
