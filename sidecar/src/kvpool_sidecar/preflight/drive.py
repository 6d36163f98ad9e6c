"""A local tier: is its directory ours, has it a drive of its own, room, what a file system must have, and its speed?"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool_sidecar.preflight import speed
from kvpool_sidecar.preflight.finding import failed, fine, warned
from kvpool_sidecar.preflight.mounts import mount_of
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.config import LocalTier
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["device_of", "look_at_drive", "open_own", "scratch_file", "size"]

_LEAST_ROOM = 256 << 20
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_SLOW = 1 / 3
"""Part of the expected bandwidth below which loads miss their deadline, which is three times what it promises."""


def look_at_drive(
    tier: LocalTier,
    pool_uid: str,
    *,
    expected_mb_s: int,
    max_block_bytes: int = 0,
    node_files: tuple[str, ...] = filesystem.NODE_FILES,
    measure: bool = True,
    most_s: float = speed.MOST_S,
) -> Iterator[Finding]:
    """Findings of the tier, one after the other; where the directory cannot be used, nothing follows."""
    try:
        fd = open_own(tier.path, pool_uid)
    except (ConfigError, OSError) as e:
        told = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        yield failed(
            "Directory",
            f"the directory cannot be used: {told}",
            "give the pool a directory of its own that can be given to user 65532 (`kvpool-sidecar init-node`)",
            tier=tier.name,
        )
        return
    try:
        yield from _kind(fd, tier, node_files)
        yield from _room(fd, tier, pool_uid, max_block_bytes)
        try:
            yield from _features(fd, tier, expected_mb_s, measure=measure, most_s=most_s)
        except OSError as e:
            yield failed(
                "Drive",
                f"the drive returns an error: {e.strerror or type(e).__name__}",
                "look at the kernel's log and at the drive's health",
                tier=tier.name,
            )
    finally:
        os.close(fd)


def open_own(path: str, pool_uid: str) -> int:
    """The directory, which is ours alone and not of another pool. ConfigError says what is wrong, or OSError."""
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
        raise ConfigError("others may write there")
    known = names.read_pool_id(fd, path)
    if known is not None and known.pool_uid != pool_uid:
        raise ConfigError(f"it belongs to pool {known.pool_uid}, not to {pool_uid}")
    if known is None and (foreign := names.foreign_entry(fd)):
        raise ConfigError(f"it holds {foreign[:64]!r}, which is not ours")


def device_of(path: str) -> int:
    """Number of the device that a directory is on; 0 if it cannot be told."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0


def _kind(fd: int, tier: LocalTier, node_files: tuple[str, ...]) -> Iterator[Finding]:
    mount = mount_of(fd)
    on = f"{mount.fs_type} on {mount.source}" if mount is not None else "a file system of unknown type"
    if filesystem.is_shared(fd, node_files) and tier.dedicated_filesystem != "Ignore":
        told = f"the directory is on the node's own file system ({on})"
        advice = "mount a drive there, or set dedicatedFilesystem to Ignore if that is wanted"
        make = failed if tier.dedicated_filesystem == "Require" else warned
        yield make("RootFilesystem", told, advice, tier=tier.name)
    elif mount is not None and mount.is_memory:
        yield warned("Filesystem", f"blocks would be in memory ({on})", "mount a drive there", tier=tier.name)
    elif mount is not None and mount.is_network:
        yield warned(
            "Filesystem", f"this is no drive of this node ({on})", "make it a shared tier instead", tier=tier.name
        )
    else:
        yield fine("Filesystem", on, tier=tier.name)


def _room(fd: int, tier: LocalTier, pool_uid: str, max_block_bytes: int) -> Iterator[Finding]:
    info = os.fstatvfs(fd)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    reserve = max(tier.reserve_free_bytes, total * tier.reserve_free_percent // 100)
    values = {"total_bytes": float(total), "free_bytes": float(free), "reserve_bytes": float(reserve)}
    is_new = names.read_pool_id(fd, tier.path) is None
    told = f"{size(free)} of {size(total)} are free, and {size(reserve)} stay free"
    if is_new and free < reserve + max(_LEAST_ROOM, max_block_bytes):
        yield failed("Space", f"there is no room: {told}", "make room, or use a larger drive", tier=tier.name, **values)
    elif total < tier.capacity_bytes + reserve or (is_new and free < tier.capacity_bytes + reserve):
        usable = max(0, (free if is_new else total) - reserve)
        yield warned(
            "Space",
            f"capacity is {size(tier.capacity_bytes)}, and blocks can take {size(usable)} at most: {told}",
            "set capacity to what there is",
            tier=tier.name,
            **values,
        )
    else:
        yield fine("Space", told, tier=tier.name, **values)


def _features(fd: int, tier: LocalTier, expected_mb_s: int, *, measure: bool, most_s: float) -> Iterator[Finding]:
    with scratch_file(fd) as (file, unnamed):
        if not unnamed:
            yield warned(
                "UnnamedFiles",
                "the file system has no unnamed files (O_TMPFILE): a crash leaves files to clear away",
                "use ext4 or xfs",
                tier=tier.name,
            )
        yield from _leases(file, tier)
        direct = speed.takes_direct_io(file)
        if not direct:
            yield warned(
                "DirectIO",
                "the file system does not take O_DIRECT: what was measured may be the node's memory",
                "use ext4 or xfs",
                tier=tier.name,
            )
        if measure:
            yield from _speed(fd, file, tier, expected_mb_s, direct=direct, most_s=most_s)


def _leases(file: int, tier: LocalTier) -> Iterator[Finding]:
    """Without leases nothing tells whether a writer is still there, and the server refuses to start. The file has a
    writer, so a file system with leases says "try again"."""
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        if e.errno != errno.EAGAIN:
            yield failed("Leases", f"the file system has no leases ({e.strerror})", "use ext4 or xfs", tier=tier.name)


def _speed(
    fd: int, file: int, tier: LocalTier, expected_mb_s: int, *, direct: bool, most_s: float
) -> Iterator[Finding]:
    info = os.fstatvfs(fd)
    reserve = max(tier.reserve_free_bytes, info.f_blocks * info.f_frsize * tier.reserve_free_percent // 100)
    room = (info.f_bavail * info.f_frsize - reserve) // 4  # the node must not come under disk pressure for this
    most = min(speed.MOST_BYTES, max(speed.CHUNK, room))
    found = speed.measure(file, direct=direct, most_bytes=most, most_s=most_s)
    values = {"write_mb_s": found.write_mb_s, "read_mb_s": found.read_mb_s, "measured_bytes": float(found.written)}
    told = f"writes {found.write_mb_s:.0f} MB/s, reads {found.read_mb_s:.0f} MB/s ({size(found.written)}, one stream)"
    if found.written and found.read_mb_s < expected_mb_s * _SLOW:
        yield warned(
            "Speed",
            f"{told}: loads will miss their deadline, which expects {expected_mb_s} MB/s and waits three times as long",
            "use a faster drive, or set failOpen.expectedBandwidth to what it does",
            tier=tier.name,
            **values,
        )
    else:
        yield fine("Speed", told, tier=tier.name, **values)


@contextlib.contextmanager
def scratch_file(dir_fd: int) -> Iterator[tuple[int, bool]]:
    """A file to read and write that nobody else sees and that goes with its descriptor; whether it never had a name."""
    flags, unnamed = os.O_RDWR | os.O_CLOEXEC, True
    try:
        file = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=dir_fd)
    except OSError as e:
        if e.errno not in _NO_TMPFILE:
            raise
        unnamed = False
        name = f".{names.POOL_ID}.preflight-{secrets.token_hex(8)}"  # not taken for somebody else's
        file = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
        os.unlink(name, dir_fd=dir_fd)
    try:
        yield file, unnamed
    finally:
        os.close(file)


def size(count: float) -> str:
    """Bytes for people: 512Mi, 1.8Ti."""
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if count < 1024 or unit == "Ti":
            break
        count /= 1024
    return f"{count:.4g}{unit}"
