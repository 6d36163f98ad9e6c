"""A local tier's directory, opened and found fit: ours alone, of this pool, on a file system with leases."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time

from kvpool.errors import ConfigError
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

__all__ = ["TierDirectory"]

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 10.0
_CANARY_BYTES = 4096
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


class TierDirectory:
    """Descriptors of the directory's parts. ConfigError says what is wrong and what to do.

    `read_path`: the same directory through a read-only mount; what readers get is opened there, so that not even root
    in their pod can make it writable again.
    """

    def __init__(self, name: str, path: str, pool_uid: str, *, read_path: str | None, use_tmpfile: bool) -> None:
        self.name = name
        self.path = path
        self._use_tmpfile = use_tmpfile
        self._fds: list[int] = []
        try:
            root = self._open_own()
            self.pool_id = names.claim_directory(root, pool_uid, path)
            self._lock(root)
            self.blocks = self._keep(safefs.open_beneath(root, names.BLOCKS, os.O_RDONLY | os.O_DIRECTORY))
            self.quarantined = self._keep(safefs.open_beneath(root, names.QUARANTINE, os.O_RDONLY | os.O_DIRECTORY))
            self.tmp = self._keep(safefs.open_beneath(root, names.TMP, os.O_RDONLY | os.O_DIRECTORY))
            self.read_blocks = self._open_for_readers(read_path)
            self._probe_leases()
        except BaseException:
            self.close()
            raise

    def create_temporary(self) -> tuple[int, str]:
        """Create a file to write; with a temporary name where the file system has no unnamed files."""
        flags = os.O_WRONLY | os.O_CLOEXEC
        if self._use_tmpfile:
            try:
                return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self.tmp), ""
            except OSError as e:
                if e.errno not in _NO_TMPFILE:
                    raise
                self._use_tmpfile = False
                log.info("tier %s: the file system has no unnamed files; using temporary names", self.name)
        name = os.urandom(16).hex()
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self.tmp), name

    def link(self, fd: int, name: str, path: str) -> bool:
        """Give the file `fd` (or the temporary `name`) its name below `blocks`. False if the name is taken."""
        source = name or f"/proc/self/fd/{fd}"
        # given a directory descriptor Python calls linkat(AT_SYMLINK_FOLLOW); without, it would link the /proc entry
        source_dir = self.tmp if name else self.blocks
        with contextlib.suppress(FileNotFoundError):
            return self._link(source, path, source_dir, follow=not name)
        safefs.make_directories(self.blocks, path.rpartition("/")[0])
        return self._link(source, path, source_dir, follow=not name)

    def probe(self) -> None:
        """Write a small file, sync it, read it back and remove it. OSError if the drive fails.

        A full drive is healthy: its blocks can be read.
        """
        wanted = os.urandom(_CANARY_BYTES)
        name = f"canary-{os.urandom(8).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.tmp)
            try:
                got = _write_and_read(fd, wanted)
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=self.tmp)
        except OSError as e:
            if e.errno in _FULL:
                return
            raise
        if got != wanted:
            raise OSError(errno.EIO, "other bytes came back than were written")

    def close(self) -> None:
        """Close all descriptors; the lock goes with them."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _link(self, source: str, path: str, source_dir: int, *, follow: bool) -> bool:
        try:
            os.link(source, path, src_dir_fd=source_dir, dst_dir_fd=self.blocks, follow_symlinks=follow)
        except FileExistsError:
            return False
        return True

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _open_own(self) -> int:
        try:
            os.makedirs(self.path, 0o700, exist_ok=True)
            root = self._keep(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as e:
            raise ConfigError(f"local tier {self.name}: {e.strerror}", where=self.path) from None
        info = os.fstat(root)
        if info.st_uid != os.geteuid():
            raise ConfigError(
                f"local tier {self.name} belongs to user {info.st_uid}, not to {os.geteuid()}: "
                "run `kvpool-sidecar init-node`",
                where=self.path,
            )
        if info.st_mode & 0o022:
            raise ConfigError(f"local tier {self.name}: others may write there: chmod 0700", where=self.path)
        return root

    def _lock(self, root: int) -> None:
        """One sidecar per directory; the last one may still be on its way out."""
        fd = self._keep(safefs.open_beneath(root, names.POOL_ID, os.O_RDONLY))
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another sidecar uses local tier {self.name}", where=self.path) from None
            time.sleep(0.1)

    def _open_for_readers(self, read_path: str | None) -> int:
        if read_path is None:
            return self.blocks
        fd = self._keep(names.open_read_only(self.blocks, read_path, self.path))
        if not os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            log.warning("tier %s: %s is not mounted read-only", self.name, read_path)
        return fd

    def _probe_leases(self) -> None:
        """Check that the file system supports leases, which detect open writers."""
        fd, name = self.create_temporary()
        try:
            reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
            if name:
                os.unlink(name, dir_fd=self.tmp)
        try:
            fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as e:
            raise ConfigError(
                f"the file system of local tier {self.name} has no leases ({e.strerror}): use ext4 or xfs",
                where=self.path,
            ) from None
        finally:
            os.close(reader)


def _write_and_read(fd: int, data: bytes) -> bytes:
    os.pwrite(fd, data, 0)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(fd, len(data), 0)
