"""A store that fails on purpose, around a real one: errors at the n-th call, or calls that hang until released."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvpool_sidecar.storage.base import Block, Store, TransactionTarget, WrapperStore, WriteTransaction

if TYPE_CHECKING:
    from kvpool.protocol.block import BlockHeader

__all__ = ["FaultyStore"]


class FaultyStore(WrapperStore):
    """For tests. `fail("open", 2, error)` makes the second `open` from now raise; `hang("open")` makes all wait."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self._errors: dict[tuple[str, int], Exception] = {}
        self._gates: dict[str, threading.Event] = {}

    def fail(self, operation: str, nth: int, error: Exception) -> None:
        """`operation`: has, open, create, seal, publish, quarantine, remove. `nth` counts from now, from 1."""
        self._errors[operation, self.calls[operation] + nth] = error

    def hang(self, operation: str) -> threading.Event:
        """Calls wait from now on; set the event to let them go."""
        return self._gates.setdefault(operation, threading.Event())

    def trip(self, operation: str) -> None:
        self.calls[operation] += 1
        if (gate := self._gates.get(operation)) is not None:
            gate.wait()
        if (error := self._errors.pop((operation, self.calls[operation]), None)) is not None:
            raise error

    # derived operations use the failing primitives below
    verify, peek, header, purge = Store.verify, Store.peek, Store.header, Store.purge

    def contains(self, key: bytes) -> bool:
        self.trip("has")
        return self.inner.contains(key)

    def open(self, key: bytes) -> Block | None:
        self.trip("open")
        return self.inner.open(key)

    def quarantine(self, key: bytes) -> bool:
        self.trip("quarantine")
        return self.inner.quarantine(key)

    def delete(self, key: bytes) -> bool:
        self.trip("remove")
        return self.inner.delete(key)

    def begin_write(self, key: bytes, payload_len: int) -> WriteTransaction:
        self.trip("create")
        transaction = self.inner.begin_write(key, payload_len)
        transaction.target = _FaultyTarget(self, transaction.target)
        return transaction


class _FaultyTarget(TransactionTarget):
    def __init__(self, store: FaultyStore, inner: TransactionTarget) -> None:
        self.tombstones = inner.tombstones
        self._store = store
        self._inner = inner

    def seal(self, transaction: WriteTransaction) -> None:
        self._store.trip("seal")
        self._inner.seal(transaction)

    def fill_checksum(self, transaction: WriteTransaction, header: BlockHeader) -> BlockHeader:
        return self._inner.fill_checksum(transaction, header)

    def publish(self, transaction: WriteTransaction, header: BlockHeader) -> bool:
        self._store.trip("publish")
        return self._inner.publish(transaction, header)

    def release(self, transaction: WriteTransaction) -> None:
        self._inner.release(transaction)
