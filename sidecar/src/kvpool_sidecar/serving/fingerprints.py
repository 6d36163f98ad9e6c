"""Which models write here, from which pods: the fingerprints of clients, for /status. Thread-safe and bounded."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.wire import ClientHello

__all__ = ["Fingerprints"]

_REMEMBERED = 64
_SHOWN = 10
_PODS_REMEMBERED = 64
_PODS_SHOWN = 16


@dataclass
class _Seen:
    """One pod: its connections now, and when the last one ended (seconds since 1970)."""

    connections: int = 0
    at: float = 0.0


@dataclass
class _Kind:
    engine: str
    model: str
    fields: dict[str, str]
    bytes: int = 0
    pods: OrderedDict[str, _Seen] = field(default_factory=OrderedDict)

    @property
    def connected(self) -> int:
        return sum(seen.connections > 0 for seen in self.pods.values())


class Fingerprints:
    """The last ones seen, with the bytes stored under each since this process started. Pods by uid, without names."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._now = now
        self._known: OrderedDict[bytes, _Kind] = OrderedDict()

    def entered(self, hello: ClientHello, uid: str) -> None:
        """A client of that pod said HELLO; `left` must follow."""
        with self._lock:
            pods = self._kind(hello).pods
            seen = pods.setdefault(uid, _Seen())
            seen.connections += 1
            pods.move_to_end(uid)
            while len(pods) > _PODS_REMEMBERED:
                del pods[next((u for u, s in pods.items() if not s.connections), next(iter(pods)))]

    def left(self, hello: ClientHello, uid: str) -> None:
        """Its connection is gone."""
        with self._lock:
            kind = self._known.get(hello.fingerprint)
            seen = kind.pods.get(uid) if kind is not None else None
            if seen is not None:
                seen.connections = max(0, seen.connections - 1)
                seen.at = self._now()

    def stored(self, hello: ClientHello, size: int) -> None:
        """It stored `size` bytes."""
        with self._lock:
            self._kind(hello).bytes += size

    def known(self) -> list[tuple[bytes, str]]:
        """Fingerprint and model of each that is remembered."""
        with self._lock:
            return [(digest, kind.model) for digest, kind in self._known.items()]

    def latest(self) -> list[dict[str, Any]]:
        """At most ten, those in use first, then the latest."""
        with self._lock:
            found = [(digest, kind, kind.connected) for digest, kind in reversed(self._known.items())]
            found.sort(key=lambda entry: not entry[2])
            return [_shown(digest, kind, connected, self._now()) for digest, kind, connected in found[:_SHOWN]]

    def _kind(self, hello: ClientHello) -> _Kind:
        """The latest now. One that is in use is forgotten last."""
        kind = self._known.get(hello.fingerprint)
        if kind is None:
            kind = self._known[hello.fingerprint] = _Kind(hello.engine, hello.model, hello.fields)
        kind.engine, kind.model, kind.fields = hello.engine, hello.model, hello.fields or kind.fields
        self._known.move_to_end(hello.fingerprint)
        if len(self._known) > _REMEMBERED:
            others = [digest for digest in self._known if digest != hello.fingerprint]
            del self._known[next((d for d in others if not self._known[d].connected), others[0])]
        return kind


def _shown(digest: bytes, kind: _Kind, connected: int, now: float) -> dict[str, Any]:
    pods = sorted(kind.pods.items(), key=lambda item: (not item[1].connections, -item[1].at))
    return {
        "digest": digest.hex(),
        "engine": kind.engine,
        "model": kind.model,
        "bytes": kind.bytes,
        "fields": kind.fields,
        "connected": connected,
        "pods": [
            {"uid": uid, "connected": seen.connections > 0, "seen": int(now if seen.connections else seen.at)}
            for uid, seen in pods[:_PODS_SHOWN]
        ],
    }
