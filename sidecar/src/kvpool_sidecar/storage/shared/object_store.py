"""The shared tier in an object store: blocks as objects `<prefix>/<pool's id>/blocks/ab/abcd...`.

A descriptor must be handed to the client, so a block that is wanted is first brought to this node: into a file of the
local tier, which keeps it (the next read is local, the local tier's eviction decides how long), or, where that has no
room, into sealed memory that goes with its reader. Either way its header and checksum are verified before anyone sees
it. Every call may take as long as the network, so callers go through `kvpool_sidecar.storage.shared.tier`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError, CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted, SharedBlockOpened
from kvpool_sidecar.storage.base import Block, Store, TransactionTarget, Usage, WriteTransaction
from kvpool_sidecar.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["ObjectStore"]

log = logging.getLogger(__name__)

_FORMAT = 1
_MARKER = "POOL"
_MAX_MARKER = 4096
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")
_POOL_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUARANTINED = 8  # slots for quarantined blocks
_WAIT_S = 20.0
_WIPERS = 16
_IN_HAND = 1 << 30


class ObjectStore(Store, TransactionTarget):
    """See Store. The bucket is used at the first call, so one that does not answer yet costs nothing.

    `local` is the store that a block is promoted to, with an event BlockPromoted; None: into memory only.
    `staging` is a directory for unnamed files during uploads; empty: memory. `capacity_bytes`: 0 for no limit; else
    writes stop there, by a count that `maintain` updates every `recount_s` (infinite: `set_usage` reports it).
    `in_hand_bytes` bounds the bytes in transfer.
    """

    name = "shared"

    def __init__(
        self,
        bucket: Bucket,
        *,
        pool_uid: str,
        max_payload: int,
        local: Store | None = None,
        events: BlockEvents | None = None,
        staging: str = "",
        capacity_bytes: int = 0,
        recount_s: float = 3600.0,
        in_hand_bytes: int = _IN_HAND,
    ) -> None:
        if not _POOL_UID.fullmatch(pool_uid):
            raise ConfigError("the pool's id cannot be part of an object's name")
        self._bucket = bucket
        self._prefix = pool_uid
        self._max_payload = max_payload
        self._local = local
        self.events = events or BlockEvents()
        self._staging = staging
        self._capacity = capacity_bytes
        self._recount_s = recount_s
        self._limit = max(in_hand_bytes, HEADER_BYTES + max_payload)
        self._memory = MemoryStore(self._limit)
        self._lock = threading.Lock()
        self._claimed = False
        self._coming: dict[bytes, threading.Event] = {}
        self._in_hand = 0
        self._used = 0
        self._promised = 0
        self._count = 0
        self._counted_at = -recount_s
        self._stored = (0, 0)

    def contains(self, key: bytes) -> bool:
        return self._payload_len(self._bucket_of_this_pool().size(self._name(key))) is not None

    def open(self, key: bytes) -> Block | None:
        """Promote and verify the block, and open it. None also if it was corrupt, which quarantines it."""
        bucket = self._bucket_of_this_pool()
        self.events.emit(SharedBlockOpened(key, 0.0))  # object stores do not report the last use here
        while True:
            with self._lock:
                coming = self._coming.get(key)
                if coming is None:
                    self._coming[key] = threading.Event()
                    break
            coming.wait(_WAIT_S)  # another call promotes it already
            if self._local is not None and (found := self._local.open(key)) is not None:
                return found
        try:
            for trial in (1, 2):
                try:
                    return self._promote(bucket, key)
                except FileNotFoundError:
                    return None
                except CorruptBlockError as e:
                    log.warning("a block of the shared tier is corrupt (trial %d of 2): %s", trial, e)
            self.quarantine(key)
            return None
        finally:
            with self._lock:
                self._coming.pop(key).set()

    def verify(self, key: bytes) -> bool:
        bucket = self._bucket_of_this_pool()
        size = bucket.size(self._name(key))
        payload_len = self._payload_len(size)
        if payload_len is None:
            return False
        with self._room(HEADER_BYTES + payload_len):
            for trial in (1, 2):  # what the network did to it is no reason to take it away
                fd = self._unnamed()
                try:
                    bucket.get_to_fd(self._name(key), fd, HEADER_BYTES + payload_len)
                    blockfile.verify(fd, key, payload_len)
                    return True
                except FileNotFoundError:
                    return False
                except CorruptBlockError as e:
                    log.warning("a block of the shared tier is corrupt (trial %d of 2): %s", trial, e)
                finally:
                    os.close(fd)
        self.quarantine(key)
        return False

    def header(self, key: bytes) -> BlockHeader | None:
        return self._header_of(self._name(key), key)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        bucket, folder = self.folder("quarantine")
        removed = 0
        for name, _ in list(bucket.names(folder)):
            header = None
            with contextlib.suppress(OSError, CorruptBlockError):
                header = self._header_of(f"{folder}/{name}", None)
            if doomed(header):
                removed += bucket.delete(f"{folder}/{name}")
        return removed

    def _header_of(self, name: str, key: bytes | None) -> BlockHeader | None:
        fd = os.memfd_create("header", os.MFD_CLOEXEC)
        try:
            self._bucket_of_this_pool().get_prefix(name, fd, HEADER_BYTES)
        except BaseException as e:
            os.close(fd)
            if isinstance(e, FileNotFoundError):
                return None
            raise
        return blockfile.header_of(fd, key)

    def quarantine(self, key: bytes) -> bool:
        bucket, name = self._bucket_of_this_pool(), self._name(key)
        with contextlib.suppress(OSError):  # removal matters more than inspection
            bucket.copy(name, f"{self._prefix}/quarantine/{key[0] % _QUARANTINED}")
        return bucket.delete(name)

    def delete(self, key: bytes) -> bool:
        return self._bucket_of_this_pool().delete(self._name(key))

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._capacity, self._used, self._count)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        bucket = self._bucket_of_this_pool()
        for name, size in bucket.names(f"{self._prefix}/blocks"):
            found, payload_len = _NAME.fullmatch(name), self._payload_len(size)
            if found is not None and payload_len is not None:
                yield bytes.fromhex(found[2]), payload_len

    def maintain(self) -> None:
        """Now and then, where there is a limit: count what is there."""
        now = time.monotonic()
        if not self._capacity or now - self._counted_at <= self._recount_s:
            return
        self._counted_at = now
        used = count = 0
        for _, payload_len in self.keys():
            used += HEADER_BYTES + payload_len
            count += 1
        with self._lock:
            self._used, self._count = used, count

    @property
    def now(self) -> float:
        return time.time()

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored since this object was made."""
        with self._lock:
            return self._stored

    def set_capacity(self, capacity_bytes: int) -> None:
        """Another capacity; what is there above it is swept."""
        with self._lock:
            self._capacity = capacity_bytes

    def set_usage(self, used_bytes: int, blocks: int) -> None:
        """So much lies there, all sidecars together."""
        with self._lock:
            self._used, self._count = used_bytes, blocks

    def set_clock_offset(self, ahead_s: float) -> None:
        """Nothing here counts by the store's clock."""

    def touch(self, key: bytes, _every_s: float) -> bool:
        """Have the store stamp the block as used now. False if it cannot, or has none."""
        return self._bucket_of_this_pool().touch(self._name(key))

    def folder(self, what: str) -> tuple[Bucket, str]:
        """The bucket, found to be of this pool, and a folder of the pool's there: `blocks/ab`, `sweep`."""
        return self._bucket_of_this_pool(), f"{self._prefix}/{what}"

    def object_name(self, key: bytes) -> str:
        """The block's name in the bucket."""
        return self._name(key)

    def wipe(self) -> int:
        """Remove all that this pool has there, and with it the pool's mark; how many objects went."""
        bucket, removed = self._bucket, 0
        for folder in (*(f"{self._prefix}/{part}" for part in ("blocks", "quarantine", "sweep")), self._prefix):
            with ThreadPoolExecutor(_WIPERS) as pool:
                found = (f"{folder}/{name}" for name, _ in bucket.names(folder))
                while some := list(itertools.islice(found, 1000)):
                    removed += sum(pool.map(bucket.delete, some))
        self._claimed = False
        return removed

    def close(self) -> None:
        self._memory.close()
        self._bucket.close()

    # -- reading

    def _promote(self, bucket: Bucket, key: bytes) -> Block | None:
        """CorruptBlockError if it is not the block; FileNotFoundError, OSError."""
        payload_len = self._payload_len(bucket.size(self._name(key)))
        if payload_len is None:
            return None
        if self._local is not None:
            with contextlib.suppress(TierFullError, RefusedError):
                return self._promote_to(self._local, bucket, key, payload_len, stays=True)
        with self._room(HEADER_BYTES + payload_len):
            try:
                return self._promote_to(self._memory, bucket, key, payload_len, stays=False)
            finally:
                self._memory.delete(key)

    def _promote_to(self, store: Store, bucket: Bucket, key: bytes, payload_len: int, *, stays: bool) -> Block | None:
        pending = store.begin(key, payload_len)
        if pending is None:
            return store.open(key)
        try:
            bucket.get_to_fd(self._name(key), pending.writer, pending.file_bytes)
            blockfile.verify(pending.reader, key, payload_len)
        except BaseException:
            pending.abort()
            raise
        pending.commit()
        if stays:
            self.events.emit(BlockPromoted(key, payload_len))
        return store.open(key)

    # -- writing

    def begin_write(self, key: bytes, payload_len: int) -> WriteTransaction:
        total = HEADER_BYTES + payload_len
        with self._lock:
            over = self._capacity and self._used + self._promised + total > self._capacity
            if over or payload_len > self._max_payload:
                raise TierFullError("the shared tier is at its capacity", key=key.hex(), where=self.name)
            self._take(total)
            self._promised += total
        writer = reader = -1
        try:
            writer = self._unnamed()
            os.ftruncate(writer, total)
            reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
            return WriteTransaction(self, key, payload_len, writer, reader, reserved=total)
        except OSError as e:
            for fd in (writer, reader):
                if fd >= 0:
                    os.close(fd)
            with self._lock:
                self._promised -= total
                self._in_hand -= total
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TierFullError("no space to stage a block", key=key.hex(), where=self.name) from None
            raise

    def seal(self, pending: WriteTransaction) -> None:
        """Only this process writes here, and it has closed its descriptor."""

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        blockfile.verify(pending.reader, header.key, pending.payload_len)  # a block that rotted here goes nowhere
        if not self._bucket_of_this_pool().put(self._name(pending.key), pending.reader, pending.file_bytes):
            return False
        with self._lock:
            self._used += pending.file_bytes
            self._count += 1
            self._stored = (self._stored[0] + pending.file_bytes, self._stored[1] + 1)
        return True

    def release(self, pending: WriteTransaction) -> None:
        super().release(pending)
        with self._lock:
            self._promised -= pending.reserved
            self._in_hand -= pending.reserved

    # -- names, sizes, room

    def _bucket_of_this_pool(self) -> Bucket:
        """The bucket, once it has been seen to answer and to hold blocks of a format that this build reads."""
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

    def _require_format(self, text: bytes) -> None:
        try:
            value = json.loads(text)
            known = value["format"] == _FORMAT and value["pool_uid"] == self._prefix
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError("blocks there have a format that this build does not read", where=self._bucket.url)

    def _name(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._prefix}/blocks/{name[:2]}/{name}"

    def _payload_len(self, size: int | None) -> int | None:
        """None also for an object that cannot be a block."""
        return size - HEADER_BYTES if size is not None and 0 < size - HEADER_BYTES <= self._max_payload else None

    @contextlib.contextmanager
    def _room(self, total: int) -> Iterator[None]:
        with self._lock:
            self._take(total)
        try:
            yield
        finally:
            with self._lock:
                self._in_hand -= total

    def _take(self, total: int) -> None:
        """`total` bytes are on their way; TierFullError if too much is. The lock is held."""
        if self._in_hand + total > self._limit:
            raise TierFullError("too many blocks are on their way from or to the object store", where=self.name)
        self._in_hand += total

    def _unnamed(self) -> int:
        """An unnamed file, read and written by this process alone."""
        if self._staging:
            with contextlib.suppress(OSError):
                return os.open(self._staging, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return os.memfd_create("kvpool-staging", os.MFD_CLOEXEC)
