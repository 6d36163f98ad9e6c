"""The shared tier in one directory that every node mounts. Several sidecars write the tree concurrently.

A block is copied to a temporary name and then linked (renamed where links are not supported), so readers see it whole
or not at all. No state is held in memory; every operation queries the file system. Any call may hang with the mount, so
callers use `kvpool_sidecar.storage.shared.tier`. Eviction and usage are the task of `kvpool_sidecar.shared_gc`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockEvents, SharedBlockOpened
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.base import Block, Store, TransactionTarget, Usage, WriteTransaction
from kvpool_sidecar.storage.scan import purge
from kvpool_sidecar.storage.shared.directories import READ, SharedDirectories
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.protocol.block import BlockHeader

__all__ = ["FilesystemStore"]

log = logging.getLogger(__name__)

_TRIALS = 3
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class FilesystemStore(Store, TransactionTarget):
    """See Store. The directory is opened at first use, so a mount that is not ready yet costs nothing.

    `capacity_bytes`: 0 for no limit; else writes stop there, by the usage that `set_usage` reported plus what this
    process stored since. Each open emits SharedBlockOpened with the previous access time by the mount's clock.
    """

    name = "shared"

    def __init__(
        self,
        path: str,
        *,
        pool_uid: str,
        capacity_bytes: int = 0,
        read_path: str | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        self._dirs = SharedDirectories(path, pool_uid, read_path)
        self._capacity = capacity_bytes
        self.events = events or BlockEvents()
        self._ahead_s = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._used = 0
        self._promised = 0
        self._count = 0
        self._stored = (0, 0)

    def contains(self, block_key: bytes) -> bool:
        return self._dirs.retry_if_stale(
            lambda: self._contains(self._dirs.fd(names.BLOCKS), names.block_path(block_key))
        )

    def open(self, block_key: bytes) -> Block | None:
        found = self.peek(block_key)
        if found is not None:
            self.events.emit(SharedBlockOpened(block_key, os.fstat(found.fd).st_mtime))
        return found

    def peek(self, block_key: bytes) -> Block | None:
        fd = self._dirs.retry_if_stale(lambda: self._open(self._dirs.fd(READ), names.block_path(block_key)))
        if fd is None:
            return None
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size <= HEADER_BYTES:
            os.close(fd)
            return None
        return Block(fd, info.st_size - HEADER_BYTES)

    def purge_quarantine(self, doomed: Callable[[BlockHeader | None], bool]) -> int:
        return purge(self._dirs.fd(names.QUARANTINE), doomed)

    def quarantine(self, block_key: bytes) -> bool:
        blocks, quarantine = self._dirs.fd(names.BLOCKS), self._dirs.fd(names.QUARANTINE)
        try:
            os.rename(names.block_path(block_key), block_key.hex(), src_dir_fd=blocks, dst_dir_fd=quarantine)
        except FileNotFoundError:
            return False
        log.warning("block %s of the shared tier is corrupt: quarantined", block_key.hex()[:16])
        return True

    def delete(self, block_key: bytes) -> bool:
        blocks = self._dirs.fd(names.BLOCKS)
        try:
            os.unlink(names.block_path(block_key), dir_fd=blocks)
        except FileNotFoundError:
            return False
        return True

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._capacity, self._used, self._count)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        blocks = self._dirs.fd(names.BLOCKS)
        for outer in sorted(os.listdir(blocks)):
            for inner in self._list(blocks, outer):
                folder = f"{outer}/{inner}"
                for name in self._list(blocks, folder):
                    key = names.parse_block_key(name, outer, inner)
                    if key is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        info = os.stat(f"{folder}/{name}", dir_fd=blocks, follow_symlinks=False)
                        yield key, info.st_size - HEADER_BYTES

    @property
    def now(self) -> float:
        """The mount's time in Unix seconds, by the offset of `set_clock_offset`."""
        return time.monotonic() + self._ahead_s

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes and blocks stored by this object."""
        with self._lock:
            return self._stored

    def set_capacity(self, capacity_bytes: int) -> None:
        """Set another capacity; shared GC removes the excess."""
        with self._lock:
            self._capacity = capacity_bytes

    def set_usage(self, used_bytes: int, blocks: int) -> None:
        """Set the usage of all sidecars together."""
        with self._lock:
            self._used, self._count = used_bytes, blocks

    def set_clock_offset(self, ahead_s: float) -> None:
        """Set by how many seconds the mount's clock is ahead of the monotonic clock."""
        self._ahead_s = ahead_s

    def touch(self, block_key: bytes, every_s: float) -> bool:
        """Update the access time of a block. False if it is younger than `every_s`, or the block is absent."""
        blocks, path = self._dirs.fd(names.BLOCKS), names.block_path(block_key)
        try:
            if self.now - os.stat(path, dir_fd=blocks, follow_symlinks=False).st_mtime < every_s:
                return False
            os.utime(path, dir_fd=blocks, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        self._dirs.close()

    @staticmethod
    def _contains(dir_fd: int, path: str) -> bool:
        try:
            info = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size > HEADER_BYTES

    @staticmethod
    def _open(dir_fd: int, path: str) -> int | None:
        try:
            return safefs.open_beneath(dir_fd, path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        total = HEADER_BYTES + payload_len
        tmp = self._dirs.fd(names.TMP)
        with self._lock:
            if self._capacity and self._used + self._promised + total > self._capacity:
                raise TierFullError("the shared tier is at its capacity", block_key=block_key.hex(), where=self.name)
            self._promised += total
        try:
            return self._new_pending(tmp, block_key, payload_len)
        except BaseException:
            with self._lock:
                self._promised -= total
            raise

    def _new_pending(self, tmp: int, block_key: bytes, payload_len: int) -> WriteTransaction:
        total = HEADER_BYTES + payload_len
        name = os.urandom(16).hex()
        writer = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=tmp)
        try:
            os.ftruncate(writer, total)
            reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmp)
        except OSError as e:
            os.close(writer)
            os.unlink(name, dir_fd=tmp)
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TierFullError("no space left", block_key=block_key.hex(), where=self.name) from None
            raise
        return WriteTransaction(self, block_key, payload_len, writer, reader, reserved=total, name=name)

    def seal(self, pending: WriteTransaction) -> None:
        """Only this process writes here, and it has closed its descriptor: network file systems have no leases."""
        os.fsync(pending.reader)

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        tmp, blocks = self._dirs.fd(names.TMP), self._dirs.fd(names.BLOCKS)
        path = names.block_path(pending.block_key)
        with contextlib.suppress(OSError):
            os.chmod(pending.reader, 0o400)
        for trial in range(_TRIALS):
            safefs.make_directories(blocks, path.rpartition("/")[0])
            try:
                if not _name(tmp, pending.name, blocks, path):
                    return False
                break
            except FileNotFoundError:  # a sweep may have removed the directory that was empty until now
                if trial == _TRIALS - 1:
                    raise
        with self._lock:
            self._used += pending.file_bytes
            self._count += 1
            self._stored = (self._stored[0] + pending.file_bytes, self._stored[1] + 1)
        return True

    def release(self, pending: WriteTransaction) -> None:
        super().release(pending)
        with self._lock:
            self._promised -= pending.reserved
        with contextlib.suppress(OSError):
            os.unlink(pending.name, dir_fd=self._dirs.fd(names.TMP))

    def _list(self, dir_fd: int, path: str) -> list[str]:
        try:
            fd = safefs.open_beneath(dir_fd, path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)


def _name(tmp: int, temporary: str, blocks: int, path: str) -> bool:
    """Give the file its name. False if that is taken."""
    try:
        os.link(temporary, path, src_dir_fd=tmp, dst_dir_fd=blocks, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path, src_dir_fd=tmp, dst_dir_fd=blocks)
    return True
