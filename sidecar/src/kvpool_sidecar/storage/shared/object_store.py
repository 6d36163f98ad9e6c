"""The shared tier in an object store: blocks as objects `<prefix>/<pool's id>/blocks/ab/abcd...`.

A client receives a descriptor, so a block is first promoted to this node: to a file of the local tier, which retains it
(the next read is local, the local tier's eviction decides for how long), or, without space there, to sealed memory that
is freed with its reader. Header and checksum are verified before the block is visible. Every call may take as long as
the network, so callers use `kvpool_sidecar.storage.shared.tier`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.block import CODEC_NONE, HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted, SharedBlockOpened
from kvpool_sidecar.storage.base import Block, Store, TransactionTarget, Usage, WriteTransaction
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.object_names import PoolObjects
from kvpool_sidecar.storage.shared.object_space import ObjectSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["ObjectStore", "ObjectStoreSettings"]

log = logging.getLogger(__name__)

_WAIT_S = 20.0


@dataclass(frozen=True)
class ObjectStoreSettings:
    """Settings of an ObjectStore.

    Parameters
    ----------
    pool_uid
        Prefix of the pool's objects.
    max_payload
        Bytes of the largest payload.
    staging
        Directory for unnamed files during uploads; empty: memory.
    capacity_bytes
        Writes stop at this usage; 0 for no limit.
    recount_s
        Interval at which `maintain` counts the usage; infinite: `set_usage` reports it.
    is_encrypted
        Blocks are handed out as they are stored: `EncryptedStore` reads them.
    in_flight_bytes
        Limit of the bytes in transfer; one block of the largest size always fits.
    """

    pool_uid: str
    max_payload: int
    staging: str = ""
    capacity_bytes: int = 0
    recount_s: float = 3600.0
    is_encrypted: bool = False
    in_flight_bytes: int = 1 << 30


class ObjectStore(Store, TransactionTarget):
    """See Store. The bucket is used at the first call, so one that does not respond yet costs nothing.

    `local` is the store that a block is promoted to, with an event BlockPromoted; None: only to memory.
    """

    name = "shared"

    def __init__(
        self,
        bucket: Bucket,
        settings: ObjectStoreSettings,
        *,
        local: Store | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        self._bucket = bucket
        self._objects = PoolObjects(bucket, settings.pool_uid, settings.max_payload)
        self._settings = settings
        self._local = local
        self.events = events or BlockEvents()
        in_flight_limit = max(settings.in_flight_bytes, HEADER_BYTES + settings.max_payload)
        self._space = ObjectSpace(settings.capacity_bytes, in_flight_limit, self.name)
        self._memory = MemoryStore(in_flight_limit)
        self._lock = threading.Lock()
        self._promotions: dict[bytes, threading.Event] = {}
        self._counted_at = -settings.recount_s

    def contains(self, block_key: bytes) -> bool:
        return self._objects.payload_len(self._objects.bucket().size(self._objects.name(block_key))) is not None

    def open(self, block_key: bytes) -> Block | None:
        """Promote and verify the block, and open it. None also if it was corrupt, which quarantines it."""
        bucket = self._objects.bucket()
        self.events.emit(SharedBlockOpened(block_key, 0.0))  # object stores do not report the last use here
        while True:
            with self._lock:
                promotion = self._promotions.get(block_key)
                if promotion is None:
                    self._promotions[block_key] = threading.Event()
                    break
            promotion.wait(_WAIT_S)  # another call promotes it already
            if self._local is not None and (found := self._local.open(block_key)) is not None:
                return found
        try:
            for trial in (1, 2):
                try:
                    return self._promote(bucket, block_key)
                except FileNotFoundError:
                    return None
                except CorruptBlockError as e:
                    log.warning("a block of the shared tier is corrupt (trial %d of 2): %s", trial, e)
            self.quarantine(block_key)
            return None
        finally:
            with self._lock:
                self._promotions.pop(block_key).set()

    def verify(self, block_key: bytes) -> bool:
        bucket, name = self._objects.bucket(), self._objects.name(block_key)
        payload_len = self._objects.payload_len(bucket.size(name))
        if payload_len is None:
            return False
        with self._space.transfer(HEADER_BYTES + payload_len):
            for trial in (1, 2):  # damage in transit must not quarantine the block
                fd = self._unnamed()
                try:
                    bucket.get_to_fd(name, fd, HEADER_BYTES + payload_len)
                    _require_readable(fd, block_key)
                    blockfile.verify(fd, block_key, payload_len)
                    return True
                except FileNotFoundError:
                    return False
                except CorruptBlockError as e:
                    log.warning("a block of the shared tier is corrupt (trial %d of 2): %s", trial, e)
                finally:
                    os.close(fd)
        self.quarantine(block_key)
        return False

    def header(self, block_key: bytes) -> BlockHeader | None:
        return self._objects.header(self._objects.name(block_key), block_key)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        bucket, folder = self.folder("quarantine")
        removed = 0
        for name, _ in list(bucket.names(folder)):
            header = None
            with contextlib.suppress(OSError, CorruptBlockError):
                header = self._objects.header(f"{folder}/{name}", None)
            if doomed(header):
                removed += bucket.delete(f"{folder}/{name}")
        return removed

    def quarantine(self, block_key: bytes) -> bool:
        bucket, name = self._objects.bucket(), self._objects.name(block_key)
        with contextlib.suppress(OSError):  # removal matters more than inspection
            bucket.copy(name, self._objects.quarantine_name(block_key))
        return bucket.delete(name)

    def delete(self, block_key: bytes) -> bool:
        return self._objects.bucket().delete(self._objects.name(block_key))

    def usage(self) -> Usage:
        return self._space.usage

    def keys(self) -> Iterator[tuple[bytes, int]]:
        return self._objects.blocks()

    def maintain(self) -> None:
        """Count the usage every `recount_s`, if there is a capacity."""
        now = time.monotonic()
        if not self._space.is_limited or now - self._counted_at <= self._settings.recount_s:
            return
        self._counted_at = now
        used = count = 0
        for _, payload_len in self.keys():
            used += HEADER_BYTES + payload_len
            count += 1
        self._space.set_usage(used, count)

    @property
    def now(self) -> float:
        return time.time()

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored by this object."""
        return self._space.stored

    def set_capacity(self, capacity_bytes: int) -> None:
        """Set another capacity; shared GC removes the excess."""
        self._space.set_capacity(capacity_bytes)

    def set_usage(self, used_bytes: int, blocks: int) -> None:
        """Set the usage of all sidecars together."""
        self._space.set_usage(used_bytes, blocks)

    def set_clock_offset(self, ahead_s: float) -> None:
        """Ignore the offset: nothing here uses the store's clock."""

    def touch(self, block_key: bytes, _every_s: float) -> bool:
        """Have the store set the block's last use to now. False if it cannot, or the block is absent."""
        return self._objects.bucket().touch(self._objects.name(block_key))

    def folder(self, path: str) -> tuple[Bucket, str]:
        """Return the bucket, verified to be this pool's, and the name of a folder there: `blocks/ab`, `sweep`."""
        return self._objects.bucket(), self._objects.folder(path)

    def object_name(self, block_key: bytes) -> str:
        """Return the block's name in the bucket."""
        return self._objects.name(block_key)

    def wipe(self) -> int:
        """Delete all objects of this pool, then its marker. Return the number of deleted objects."""
        return self._objects.wipe()

    def close(self) -> None:
        self._memory.close()
        self._bucket.close()

    # -- reading

    def _promote(self, bucket: Bucket, block_key: bytes) -> Block | None:
        """CorruptBlockError if it is not the block; FileNotFoundError, OSError."""
        payload_len = self._objects.payload_len(bucket.size(self._objects.name(block_key)))
        if payload_len is None:
            return None
        if self._settings.is_encrypted:
            return self._fetch(bucket, block_key, payload_len)
        if self._local is not None:
            with contextlib.suppress(TierFullError, RefusedError):
                return self._promote_to(self._local, bucket, block_key, payload_len, stays=True)
        with self._space.transfer(HEADER_BYTES + payload_len):
            try:
                return self._promote_to(self._memory, bucket, block_key, payload_len, stays=False)
            finally:
                self._memory.delete(block_key)

    def _fetch(self, bucket: Bucket, block_key: bytes, payload_len: int) -> Block:
        with self._space.transfer(HEADER_BYTES + payload_len):
            fd = self._unnamed()
            try:
                bucket.get_to_fd(self._objects.name(block_key), fd, HEADER_BYTES + payload_len)
            except BaseException:
                os.close(fd)
                raise
            return Block(fd, payload_len)

    def _promote_to(
        self, store: Store, bucket: Bucket, block_key: bytes, payload_len: int, *, stays: bool
    ) -> Block | None:
        pending = store.begin(block_key, payload_len)
        if pending is None:
            return store.open(block_key)
        try:
            bucket.get_to_fd(self._objects.name(block_key), pending.writer, pending.file_bytes)
            _require_readable(pending.reader, block_key)
            blockfile.verify(pending.reader, block_key, payload_len)
        except BaseException:
            pending.abort()
            raise
        pending.commit()
        if stays:
            self.events.emit(BlockPromoted(block_key, payload_len))
        return store.open(block_key)

    # -- writing

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        total = HEADER_BYTES + payload_len
        self._space.reserve_write(total, block_key, fits=payload_len <= self._settings.max_payload)
        writer = reader = -1
        try:
            writer = self._unnamed()
            os.ftruncate(writer, total)
            reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
            return WriteTransaction(self, block_key, payload_len, writer, reader, reserved=total)
        except OSError as e:
            for fd in (writer, reader):
                if fd >= 0:
                    os.close(fd)
            self._space.release_write(total)
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TierFullError("no space to stage a block", block_key=block_key.hex(), where=self.name) from None
            raise

    def seal(self, pending: WriteTransaction) -> None:
        """Only this process writes here, and it has closed its descriptor."""

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        if header.codec == CODEC_NONE:  # never upload a block damaged in staging
            blockfile.verify(pending.reader, header.block_key, pending.payload_len)
        objects = self._objects
        if not objects.bucket().put(objects.name(pending.block_key), pending.reader, pending.file_bytes):
            return False
        self._space.record_stored(pending.file_bytes)
        return True

    def release(self, pending: WriteTransaction) -> None:
        super().release(pending)
        self._space.release_write(pending.reserved)

    def _unnamed(self) -> int:
        """Create an unnamed file that only this process reads and writes."""
        if self._settings.staging:
            with contextlib.suppress(OSError):
                return os.open(self._settings.staging, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return os.memfd_create("kvpool-staging", os.MFD_CLOEXEC)


def _require_readable(fd: int, block_key: bytes) -> None:
    """FileNotFoundError for an encrypted block: it is not corrupt, only not for this pool's present settings."""
    if blockfile.codec_of(fd) != CODEC_NONE:
        raise FileNotFoundError(errno.ENOENT, "the block is encrypted", block_key.hex())
