"""Which models write here: the fingerprints that clients named, for /status. Thread-safe and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.wire import ClientHello

__all__ = ["Fingerprints"]

_REMEMBERED = 64
_SHOWN = 10


class Fingerprints:
    """The last ones seen, with the bytes stored under each since this process started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[str, str, int]] = OrderedDict()

    def seen(self, hello: ClientHello) -> None:
        """A client said HELLO."""
        self.stored(hello, 0)

    def stored(self, hello: ClientHello, size: int) -> None:
        """It stored `size` bytes."""
        with self._lock:
            _, _, before = self._known.get(hello.fingerprint, ("", "", 0))
            self._known[hello.fingerprint] = (hello.engine, hello.model, before + size)
            self._known.move_to_end(hello.fingerprint)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def known(self) -> list[tuple[bytes, str]]:
        """Fingerprint and model of each that is remembered."""
        with self._lock:
            return [(digest, model) for digest, (_, model, _) in self._known.items()]

    def latest(self) -> list[dict[str, Any]]:
        """At most ten, the latest first."""
        with self._lock:
            items = list(self._known.items())[: -_SHOWN - 1 : -1]
        return [
            {"digest": digest.hex(), "engine": engine, "model": model, "bytes": size}
            for digest, (engine, model, size) in items
        ]
