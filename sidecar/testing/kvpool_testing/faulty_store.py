"""A store that fails on purpose, around a real one: errors at the n-th call, or calls that hang until released."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvpool_sidecar.storage.base import Block, Store, Usage, WriteTransaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.protocol.block import BlockHeader

__all__ = ["FaultyStore"]


class FaultyStore(Store):
    """For tests. `fail("open", 2, error)` makes the second `open` from now raise; `hang("open")` makes all wait."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: Counter[str] = Counter()
        self._errors: dict[tuple[str, int], Exception] = {}
        self._gates: dict[str, threading.Event] = {}

    def fail(self, operation: str, nth: int, error: Exception) -> None:
        """`operation`: has, open, create, seal, publish, quarantine, remove. `nth` counts from now, from 1."""
        self._errors[operation, self.calls[operation] + nth] = error

    def hang(self, operation: str) -> threading.Event:
        """Calls wait from now on; set the event to let them go."""
        return self._gates.setdefault(operation, threading.Event())

    def _trip(self, operation: str) -> None:
        self.calls[operation] += 1
        if (gate := self._gates.get(operation)) is not None:
            gate.wait()
        if (error := self._errors.pop((operation, self.calls[operation]), None)) is not None:
            raise error

    def contains(self, key: bytes) -> bool:
        self._trip("has")
        return self.inner.contains(key)

    def open(self, key: bytes) -> Block | None:
        self._trip("open")
        return self.inner.open(key)

    def quarantine(self, key: bytes) -> bool:
        self._trip("quarantine")
        return self.inner.quarantine(key)

    def delete(self, key: bytes) -> bool:
        self._trip("remove")
        return self.inner.delete(key)

    def usage(self) -> Usage:
        return self.inner.usage()

    def keys(self) -> Iterator[tuple[bytes, int]]:
        return self.inner.keys()

    def maintain(self) -> None:
        self.inner.maintain()

    def close(self) -> None:
        self.inner.close()

    def _create(self, key: bytes, payload_len: int) -> WriteTransaction:
        self._trip("create")
        return self.inner._create(key, payload_len)

    def _seal(self, pending: WriteTransaction) -> None:
        self._trip("seal")
        self.inner._seal(pending)

    def _fill(self, pending: WriteTransaction, header: BlockHeader) -> BlockHeader:
        return self.inner._fill(pending, header)

    def _publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        self._trip("publish")
        return self.inner._publish(pending, header)

    def _release(self, pending: WriteTransaction) -> None:
        self.inner._release(pending)
