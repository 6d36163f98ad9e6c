"""Objects of one pool in a bucket: `<prefix>/blocks/ab/abcd...`, `<prefix>/quarantine/<slot>`, `<prefix>/POOL`."""

from __future__ import annotations

import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["PoolObjects"]

_FORMAT = 1
_MARKER = "POOL"
_MAX_MARKER = 4096
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")
_POOL_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUARANTINED = 8  # slots for quarantined blocks
_DELETE_THREADS = 16


class PoolObjects:
    """Names, marker and listing of a pool's objects. Thread-safe.

    The bucket is used at the first call, so one that does not respond yet costs nothing.
    """

    def __init__(self, bucket: Bucket, pool_uid: str, max_payload: int) -> None:
        if not _POOL_UID.fullmatch(pool_uid):
            raise ConfigError("the pool's id cannot be part of an object's name")
        self._bucket = bucket
        self._prefix = pool_uid
        self._max_payload = max_payload
        self._claimed = False

    def bucket(self) -> Bucket:
        """Return the bucket, once its marker shows blocks of this pool in a format that this build reads."""
        if self._claimed:
            return self._bucket
        name = f"{self._prefix}/{_MARKER}"
        size = self._bucket.size(name)
        fd = os.memfd_create("marker", os.MFD_CLOEXEC)
        try:
            if size is None:
                text = json.dumps({"format": _FORMAT, "pool_uid": self._prefix}).encode() + b"\n"
                os.write(fd, text)
                self._bucket.put(name, fd, len(text))
            elif 0 < size <= _MAX_MARKER:
                self._bucket.get_to_fd(name, fd, size)
                self._require_format(os.pread(fd, size, 0))
            else:
                raise ConfigError(f"{name} is not ours: give the pool its own prefix", where=self._bucket.url)
        finally:
            os.close(fd)
        self._claimed = True
        return self._bucket

    def name(self, block_key: bytes) -> str:
        """Return the name of a block's object."""
        name = block_key.hex()
        return f"{self._prefix}/blocks/{name[:2]}/{name}"

    def quarantine_name(self, block_key: bytes) -> str:
        """Return the quarantine slot of a block."""
        return f"{self._prefix}/quarantine/{block_key[0] % _QUARANTINED}"

    def folder(self, path: str) -> str:
        """Return the name of a folder of the pool: `blocks/ab`, `sweep`."""
        return f"{self._prefix}/{path}"

    def payload_len(self, size: int | None) -> int | None:
        """Return the payload length of an object of `size` bytes. None if it is absent or cannot be a block."""
        return size - HEADER_BYTES if size is not None and 0 < size - HEADER_BYTES <= self._max_payload else None

    def header(self, name: str, block_key: bytes | None) -> BlockHeader | None:
        """Read the header of an object; None if it is absent. CorruptBlockError."""
        fd = os.memfd_create("header", os.MFD_CLOEXEC)
        try:
            self.bucket().get_prefix(name, fd, HEADER_BYTES)
        except BaseException as e:
            os.close(fd)
            if isinstance(e, FileNotFoundError):
                return None
            raise
        return blockfile.header_of(fd, block_key)

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield key and payload length of each block."""
        for name, size in self.bucket().names(self.folder("blocks")):
            match, payload_len = _NAME.fullmatch(name), self.payload_len(size)
            if match is not None and payload_len is not None:
                yield bytes.fromhex(match[2]), payload_len

    def wipe(self) -> int:
        """Delete all objects of this pool, then its marker. Return the number of deleted objects."""
        bucket, removed = self._bucket, 0
        for folder in (*(self.folder(part) for part in ("blocks", "quarantine", "sweep")), self._prefix):
            with ThreadPoolExecutor(_DELETE_THREADS) as pool:
                names = (f"{folder}/{name}" for name, _ in bucket.names(folder))
                while batch := list(itertools.islice(names, 1000)):
                    removed += sum(pool.map(bucket.delete, batch))
        self._claimed = False
        return removed

    def _require_format(self, text: bytes) -> None:
        try:
            value = json.loads(text)
            known = value["format"] == _FORMAT and value["pool_uid"] == self._prefix
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError("blocks there have a format that this build does not read", where=self._bucket.url)
