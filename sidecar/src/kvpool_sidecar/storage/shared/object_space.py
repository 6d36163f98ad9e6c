"""Byte accounting of the object store: the capacity of the tier and the transfers in flight."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError
from kvpool_sidecar.storage.base import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ObjectSpace"]


class ObjectSpace:
    """Bytes stored, reserved by writes and in transfer. Thread-safe.

    `capacity_bytes`: limit of stored and reserved bytes, 0 for none. `in_flight_limit`: limit of bytes in transfer.
    """

    def __init__(self, capacity_bytes: int, in_flight_limit: int, tier: str) -> None:
        self._capacity = capacity_bytes
        self._limit = in_flight_limit
        self._tier = tier
        self._lock = threading.Lock()
        self._in_flight = 0
        self._used = 0
        self._promised = 0
        self._count = 0
        self._stored = (0, 0)

    @property
    def usage(self) -> Usage:
        """Capacity, bytes in use and number of blocks."""
        with self._lock:
            return Usage(self._capacity, self._used, self._count)

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored by this object."""
        with self._lock:
            return self._stored

    @property
    def promised_bytes(self) -> int:
        """Bytes reserved by writes that have not ended."""
        return self._promised

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in transfer."""
        return self._in_flight

    @property
    def is_limited(self) -> bool:
        """Whether there is a capacity."""
        return bool(self._capacity)

    def set_capacity(self, capacity_bytes: int) -> None:
        """Set another capacity."""
        with self._lock:
            self._capacity = capacity_bytes

    def set_usage(self, used_bytes: int, blocks: int) -> None:
        """Set the usage of all sidecars together."""
        with self._lock:
            self._used, self._count = used_bytes, blocks

    def reserve_write(self, total: int, block_key: bytes, *, fits: bool) -> None:
        """Reserve `total` bytes for a write. TierFullError at the capacity, at the transfer limit, or unless `fits`."""
        with self._lock:
            over = self._capacity and self._used + self._promised + total > self._capacity
            if over or not fits:
                raise TierFullError("the shared tier is at its capacity", block_key=block_key.hex(), where=self._tier)
            self._begin_transfer(total)
            self._promised += total

    def release_write(self, total: int) -> None:
        """Return the reservation of a write."""
        with self._lock:
            self._promised -= total
            self._in_flight -= total

    def record_stored(self, total: int) -> None:
        """Count a block that was published."""
        with self._lock:
            self._used += total
            self._count += 1
            self._stored = (self._stored[0] + total, self._stored[1] + 1)

    @contextlib.contextmanager
    def transfer(self, total: int) -> Iterator[None]:
        """Count `total` bytes as in transfer. TierFullError at the limit."""
        with self._lock:
            self._begin_transfer(total)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= total

    def _begin_transfer(self, total: int) -> None:
        """The lock is held."""
        if self._in_flight + total > self._limit:
            raise TierFullError("too many blocks are on their way from or to the object store", where=self._tier)
        self._in_flight += total
