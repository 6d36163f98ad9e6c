"""Checks of a local tier: owner of the directory, dedicated drive, space, file system features, and speed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool_sidecar.preflight import folios, speed
from kvpool_sidecar.preflight.finding import failed, fine, warned
from kvpool_sidecar.preflight.mounts import mount_of
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import filesystem
from kvpool_sidecar.system.users import is_server_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.config import LocalTier
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["check_drive", "device_of", "open_own", "scratch_file", "size"]

_MIN_FREE_BYTES = 256 << 20
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_SLOW = 1 / 3
"""Fraction of the expected bandwidth below which loads exceed their deadline, which allows three times as long."""


def check_drive(
    tier: LocalTier,
    pool_uid: str,
    *,
    expected_mb_s: int,
    max_block_bytes: int = 0,
    node_files: tuple[str, ...] = filesystem.NODE_FILES,
    measure: bool = True,
    max_s: float = speed.MAX_S,
) -> Iterator[Finding]:
    """Yield the findings of one tier; a directory that cannot be used ends the checks."""
    if (owner := _earlier_owner(tier.path)) is not None:
        yield warned(
            "Directory",
            f"not checked: the directory belongs to user {owner}, as which the pool's sidecars ran",
            "none: the next sidecar of this node changes the owner when it starts",
            tier=tier.name,
        )
        return
    try:
        fd = open_own(tier.path, pool_uid)
    except (ConfigError, OSError) as e:
        problem = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        yield failed(
            "Directory",
            f"the directory cannot be used: {problem}",
            "use a dedicated directory whose owner can be changed to the sidecars' user (`kvpool-sidecar init-node`)",
            tier=tier.name,
        )
        return
    try:
        yield from _filesystem(fd, tier, node_files)
        yield from _space(fd, tier, pool_uid, max_block_bytes)
        try:
            yield from _features(fd, tier, expected_mb_s, measure=measure, max_s=max_s)
        except OSError as e:
            yield failed(
                "Drive",
                f"the drive returns an error: {e.strerror or type(e).__name__}",
                "check the kernel log and the drive's health",
                tier=tier.name,
            )
    finally:
        os.close(fd)


def _earlier_owner(path: str) -> int | None:
    """Return the owner of a directory of sidecars that run as another user; None for any other directory."""
    with contextlib.suppress(OSError):
        owner = os.stat(path, follow_symlinks=False).st_uid
        return owner if owner != os.geteuid() and is_server_user(owner) else None
    return None


def open_own(path: str, pool_uid: str) -> int:
    """Open the directory; ConfigError with the problem, or OSError, if another user or pool owns it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_foreign(fd, pool_uid, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_foreign(fd: int, pool_uid: str, path: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise ConfigError(f"it belongs to user {info.st_uid}, not to {os.geteuid()}")
    if info.st_mode & 0o022:
        raise ConfigError("others may write to it")
    known = names.read_pool_id(fd, path)
    if known is not None and known.pool_uid != pool_uid:
        raise ConfigError(f"it belongs to pool {known.pool_uid}, not to {pool_uid}")
    if known is None and (foreign := names.foreign_entry(fd)):
        raise ConfigError(f"it holds {foreign[:64]!r}, which does not belong to the pool")


def device_of(path: str) -> int:
    """Return the device number of a directory; 0 if it is unknown."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0


def _filesystem(fd: int, tier: LocalTier, node_files: tuple[str, ...]) -> Iterator[Finding]:
    mount = mount_of(fd)
    on = f"{mount.fs_type} on {mount.source}" if mount is not None else "a file system of unknown type"
    if filesystem.is_shared(fd, node_files) and tier.dedicated_filesystem != "Ignore":
        problem = f"the directory is on the node's own file system ({on})"
        advice = "mount a drive there, or set dedicatedFilesystem to Ignore if this is intended"
        make = failed if tier.dedicated_filesystem == "Require" else warned
        yield make("RootFilesystem", problem, advice, tier=tier.name)
    elif mount is not None and mount.is_memory:
        yield warned("Filesystem", f"blocks would be stored in memory ({on})", "mount a drive there", tier=tier.name)
    elif mount is not None and mount.is_network:
        yield warned(
            "Filesystem", f"this is not a local drive ({on})", "use it as a shared tier instead", tier=tier.name
        )
    else:
        yield fine("Filesystem", on, tier=tier.name)


def _space(fd: int, tier: LocalTier, pool_uid: str, max_block_bytes: int) -> Iterator[Finding]:
    info = os.fstatvfs(fd)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    reserve = max(tier.reserve_free_bytes, total * tier.reserve_free_percent // 100)
    values = {"total_bytes": float(total), "free_bytes": float(free), "reserve_bytes": float(reserve)}
    is_new = names.read_pool_id(fd, tier.path) is None
    space = f"{size(free)} of {size(total)} are free, and {size(reserve)} are reserved"
    if is_new and free < reserve + max(_MIN_FREE_BYTES, max_block_bytes):
        yield failed(
            "Space", f"not enough free space: {space}", "free space, or use a larger drive", tier=tier.name, **values
        )
    elif total < tier.capacity_bytes + reserve or (is_new and free < tier.capacity_bytes + reserve):
        usable = max(0, (free if is_new else total) - reserve)
        yield warned(
            "Space",
            f"capacity is {size(tier.capacity_bytes)}, and blocks can use at most {size(usable)}: {space}",
            "set capacity to the available space",
            tier=tier.name,
            **values,
        )
    else:
        yield fine("Space", space, tier=tier.name, **values)


def _features(fd: int, tier: LocalTier, expected_mb_s: int, *, measure: bool, max_s: float) -> Iterator[Finding]:
    with scratch_file(fd) as (file, unnamed):
        if not unnamed:
            yield warned(
                "UnnamedFiles",
                "the file system does not support unnamed files (O_TMPFILE): a crash leaves temporary files",
                "use ext4 or xfs",
                tier=tier.name,
            )
        yield from _leases(file, tier)
        direct = speed.takes_direct_io(file)
        if not direct:
            yield warned(
                "DirectIO",
                "the file system does not support O_DIRECT: the measured speed may be that of memory",
                "use ext4 or xfs",
                tier=tier.name,
            )
        if measure and direct:
            yield _folios(file, tier)
        if measure:
            yield from _speed(fd, file, tier, expected_mb_s, direct=direct, max_s=max_s)


def _folios(file: int, tier: LocalTier) -> Finding:
    """Report whether reads from memory cost what they must. Information: the pool works without it."""
    found = folios.measure(file)
    values = {"page_cache_gain": found.gain}
    if found.are_large:
        text = f"large folios: they make reads from memory {found.gain:.1f} times cheaper in processor time"
    else:
        text = "no large folios: reads from memory cost more processor time (ext4 from Linux 6.16 or xfs has them)"
    return fine("LargeFolios", text, tier=tier.name, **values)


def _leases(file: int, tier: LocalTier) -> Iterator[Finding]:
    """Check file leases, which the server needs to detect open writers; without them it does not start.

    The scratch file has a writer, so a file system with leases returns EAGAIN.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        if e.errno != errno.EAGAIN:
            yield failed(
                "Leases", f"the file system does not support leases ({e.strerror})", "use ext4 or xfs", tier=tier.name
            )


def _speed(fd: int, file: int, tier: LocalTier, expected_mb_s: int, *, direct: bool, max_s: float) -> Iterator[Finding]:
    info = os.fstatvfs(fd)
    reserve = max(tier.reserve_free_bytes, info.f_blocks * info.f_frsize * tier.reserve_free_percent // 100)
    budget = (info.f_bavail * info.f_frsize - reserve) // 4  # avoid disk pressure on the node
    limit = min(speed.MAX_BYTES, max(speed.CHUNK, budget))
    result = speed.measure(file, direct=direct, max_bytes=limit, max_s=max_s)
    values = {"write_mb_s": result.write_mb_s, "read_mb_s": result.read_mb_s, "measured_bytes": float(result.written)}
    speeds = (
        f"writes {result.write_mb_s:.0f} MB/s, reads {result.read_mb_s:.0f} MB/s ({size(result.written)}, one stream)"
    )
    if result.written and result.read_mb_s < expected_mb_s * _SLOW:
        yield warned(
            "Speed",
            f"{speeds}: loads will time out; the deadline is three times that of {expected_mb_s} MB/s",
            "use a faster drive, or set failOpen.expectedBandwidth to the measured value",
            tier=tier.name,
            **values,
        )
    else:
        yield fine("Speed", speeds, tier=tier.name, **values)


@contextlib.contextmanager
def scratch_file(dir_fd: int) -> Iterator[tuple[int, bool]]:
    """Yield a private file that is removed with its descriptor, and whether it never had a name."""
    flags, unnamed = os.O_RDWR | os.O_CLOEXEC, True
    try:
        file = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=dir_fd)
    except OSError as e:
        if e.errno not in _NO_TMPFILE:
            raise
        unnamed = False
        name = f".{names.POOL_ID}.preflight-{secrets.token_hex(8)}"  # not taken for a foreign file
        file = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
        os.unlink(name, dir_fd=dir_fd)
    try:
        yield file, unnamed
    finally:
        os.close(file)


def size(count: float) -> str:
    """Format bytes: 512Mi, 1.8Ti."""
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if count < 1024 or unit == "Ti":
            break
        count /= 1024
    return f"{count:.4g}{unit}"
