"""A bucket with rotating credentials: a changed Secret needs no restart."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpool.errors import ConfigError
from kvpool_sidecar.storage.buckets.base import Bucket, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["RotatingBucket"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_INTERVAL_S = 3.0


class RotatingBucket(Bucket, Generic[T]):
    """Replaces its bucket when the result of `read` changes; polls every `poll_interval_s`.

    ConfigError at construction if `read` or `make` raises it; later the old bucket stays in use.
    """

    def __init__(
        self,
        where: str,
        read: Callable[[], T],
        make: Callable[[T], Bucket],
        *,
        poll_interval_s: float = _POLL_INTERVAL_S,
    ) -> None:
        self.url = where
        self._read = read
        self._make = make
        self._poll_interval_s = poll_interval_s
        self._lock = threading.Lock()
        self._known = read()
        self._bucket = make(self._known)
        self._polled_at = time.monotonic()

    def size(self, name: str) -> int | None:
        return self._now().size(name)

    def get_to_fd(self, name: str, fd: int, size: int) -> None:
        self._now().get_to_fd(name, fd, size)

    def get_prefix(self, name: str, fd: int, size: int) -> None:
        self._now().get_prefix(name, fd, size)

    def put(self, name: str, fd: int, size: int) -> bool:
        return self._now().put(name, fd, size)

    def copy(self, name: str, to: str) -> None:
        self._now().copy(name, to)

    def delete(self, name: str) -> bool:
        return self._now().delete(name)

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        return self._now().list(folder)

    def touch(self, name: str) -> bool:
        return self._now().touch(name)

    def close(self) -> None:
        self._bucket.close()

    def _now(self) -> Bucket:
        with self._lock:
            if time.monotonic() - self._polled_at < self._poll_interval_s:
                return self._bucket
            self._polled_at = time.monotonic()
            try:
                read = self._read()
                if read != self._known:
                    self._known, self._bucket = read, self._make(read)  # the old bucket is closed after its last call
                    log.info("the credentials of %s have changed: used from now on", self.url)
            except (ConfigError, OSError) as e:
                log.warning("the new credentials of %s cannot be used: %s", self.url, e)
            return self._bucket
