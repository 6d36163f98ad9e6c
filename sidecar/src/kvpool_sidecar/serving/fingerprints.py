"""Fingerprints of the clients, with models and pods, and engines without the pool. Thread-safe and bounded."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool_sidecar.resilience.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.wire import ClientHello

__all__ = ["Fingerprints"]

Tag = bytes

_MAX_ENTRIES = 64
_MAX_REPORTED = 10
_MAX_PODS = 64
_MAX_TENANTS = 64
_MAX_PODS_REPORTED = 16
_MAX_CONNECTED = 512
_MAX_PROBLEMS = 64
_NO_ENGINE = bytes(32)  # of a client that only reports why its engine runs without the pool


@dataclass
class _PodUse:
    """Open connections of a pod, and the end of its last one in Unix time."""

    connections: int = 0
    at: float = 0.0


@dataclass
class _Entry:
    engine: str
    model: str
    fields: dict[str, str]
    bytes: int = 0
    is_shared: bool = False
    is_tested: bool = True
    tenants: set[Tag] = field(default_factory=set)  # of those that stored blocks
    pods: OrderedDict[str, _PodUse] = field(default_factory=OrderedDict)

    @property
    def connected(self) -> int:
        return sum(use.connections > 0 for use in self.pods.values())


class Fingerprints:
    """The latest fingerprints, each with the bytes stored since the process started. Pods by uid, without names."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._now = now
        self._known: OrderedDict[bytes, _Entry] = OrderedDict()
        self._problems: BoundedCache[str, str] = BoundedCache(_MAX_PROBLEMS)

    def entered(self, hello: ClientHello, uid: str) -> None:
        """Record a connection of a pod's client; `left` must follow."""
        if hello.fingerprint == _NO_ENGINE:
            return
        with self._lock:
            self._problems.pop(uid)
            pods = self._touch(hello).pods
            use = pods.setdefault(uid, _PodUse())
            use.connections += 1
            pods.move_to_end(uid)
            while len(pods) > _MAX_PODS:
                del pods[next((u for u, s in pods.items() if not s.connections), next(iter(pods)))]

    def left(self, hello: ClientHello, uid: str) -> None:
        """Record the end of a connection."""
        with self._lock:
            entry = self._known.get(hello.fingerprint)
            use = entry.pods.get(uid) if entry is not None else None
            if use is not None:
                use.connections = max(0, use.connections - 1)
                use.at = self._now()

    def stored(self, hello: ClientHello, size: int, tenant: bytes = b"") -> None:
        """Count `size` bytes that a tenant stored."""
        with self._lock:
            entry = self._touch(hello)
            entry.bytes += size
            if len(entry.tenants) < _MAX_TENANTS:
                entry.tenants.add(tenant)

    def found(self, hello: ClientHello) -> None:
        """Record that a block of this fingerprint was found."""
        with self._lock:
            self._touch(hello).is_shared = True

    def has_only_others(self, hello: ClientHello, tenant: bytes) -> bool:
        """Return whether this tenant stored blocks of this model here, all of them under other fingerprints."""
        with self._lock:
            own = self._known.get(hello.fingerprint)
            if not hello.model or (own is not None and (own.bytes or own.is_shared)):
                return False
            others = [e for digest, e in self._known.items() if digest != hello.fingerprint]
            return any(e.model == hello.model and tenant in e.tenants for e in others)

    def known(self) -> list[tuple[bytes, str]]:
        """Return fingerprint and model of every entry."""
        with self._lock:
            return [(digest, entry.model) for digest, entry in self._known.items()]

    def report_problem(self, uid: str, problem: str) -> None:
        """Record why the engine of a pod runs without the pool, until it connects."""
        with self._lock:
            self._problems.put(uid, problem)

    def problems(self) -> list[dict[str, str]]:
        """Return at most 64 pods with what their plug-ins report. Untrusted text."""
        with self._lock:
            return [{"uid": uid, "problem": self._problems.peek(uid) or ""} for uid in list(self._problems)]

    def connected_pods(self) -> list[str]:
        """Return the uids of at most 512 pods with an open connection."""
        with self._lock:
            uids = {uid for entry in self._known.values() for uid, use in entry.pods.items() if use.connections > 0}
        return sorted(uids)[:_MAX_CONNECTED]

    def latest(self) -> list[dict[str, Any]]:
        """Return at most ten entries: those in use first, then the latest."""
        with self._lock:
            entries = [(digest, entry, entry.connected) for digest, entry in reversed(self._known.items())]
            entries.sort(key=lambda item: not item[2])
            return [
                _report(digest, entry, connected, self._now()) for digest, entry, connected in entries[:_MAX_REPORTED]
            ]

    def _touch(self, hello: ClientHello) -> _Entry:
        """Make the entry the latest. Entries in use are removed last."""
        entry = self._known.get(hello.fingerprint)
        if entry is None:
            entry = self._known[hello.fingerprint] = _Entry(hello.engine, hello.model, hello.fields)
        entry.engine, entry.model, entry.fields = hello.engine, hello.model, hello.fields or entry.fields
        entry.is_tested = hello.is_tested
        self._known.move_to_end(hello.fingerprint)
        if len(self._known) > _MAX_ENTRIES:
            others = [digest for digest in self._known if digest != hello.fingerprint]
            del self._known[next((d for d in others if not self._known[d].connected), others[0])]
        return entry


def _report(digest: bytes, entry: _Entry, connected: int, now: float) -> dict[str, Any]:
    pods = sorted(entry.pods.items(), key=lambda item: (not item[1].connections, -item[1].at))
    return {
        "digest": digest.hex(),
        "engine": entry.engine,
        "model": entry.model,
        "bytes": entry.bytes,
        "fields": entry.fields,
        "tested": entry.is_tested,
        "connected": connected,
        "pods": [
            {"uid": uid, "connected": use.connections > 0, "seen": int(now if use.connections else use.at)}
            for uid, use in pods[:_MAX_PODS_REPORTED]
        ],
    }
