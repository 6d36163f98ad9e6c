"""Checks of the shared tier from this node: a directory that every node mounts, or an object store.

Both may hang, so `run` calls these checks in threads with a time limit.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError, KVPoolError
from kvpool_sidecar.preflight import speed
from kvpool_sidecar.preflight.drive import scratch_file, size
from kvpool_sidecar.preflight.finding import failed, fine, warned
from kvpool_sidecar.preflight.mounts import mount_of
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.buckets.options import open_bucket
from kvpool_sidecar.system import filesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.config import FsspecTier, SharedTier
    from kvpool_sidecar.preflight.finding import Finding
    from kvpool_sidecar.preflight.mounts import Mount
    from kvpool_sidecar.storage.buckets.base import Bucket

__all__ = ["check_directory", "check_objects"]

_ROUNDS = 5
_PAGE = 4096
_MAX_BYTES = 64 << 20


def check_directory(
    tier: SharedTier,
    pool_uid: str,
    *,
    node_files: tuple[str, ...] = filesystem.NODE_FILES,
    measure: bool = True,
    max_s: float = speed.MAX_S,
    mount: Callable[[int], Mount | None] = mount_of,
) -> Iterator[Finding]:
    """Check that the directory exists, is shared and writable, and measure the round trip of a small file."""
    try:
        fd = os.open(tier.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        yield _unavailable(tier.name, f"the directory cannot be opened: {e.strerror}")
        return
    try:
        known = names.read_pool_id(fd, tier.path)
        foreign = names.foreign_entry(fd) if known is None else ""
        if foreign or (known is not None and known.pool_uid != pool_uid):
            owner = (
                f"belongs to pool {known.pool_uid}" if known is not None else f"holds foreign files ({foreign[:64]!r})"
            )
            yield failed("SharedDirectory", f"the directory {owner}", "use a dedicated directory", tier=tier.name)
            return
        yield from _kind(mount(fd), fd, tier, node_files)
        yield _round_trip(fd, tier)
        if measure:
            yield _speed(fd, tier, max_s)
    except (OSError, ConfigError) as e:
        problem = (e.strerror if isinstance(e, OSError) else None) or str(e)
        yield _unavailable(tier.name, f"a small file cannot be written and read: {problem}")
    finally:
        os.close(fd)


def _unavailable(tier: str, problem: str) -> Finding:
    advice = (
        "mount the directory on this node, and make it writable for the sidecars' user (65532, or spec.nodes.runAsUser)"
    )
    return failed("SharedDirectory", problem, advice, tier=tier)


def _kind(mount: Mount | None, fd: int, tier: SharedTier, node_files: tuple[str, ...]) -> Iterator[Finding]:
    on = f"{mount.fs_type} on {mount.source}" if mount is not None else "a file system of unknown type"
    if filesystem.is_shared(fd, node_files):
        yield warned(
            "NotMounted",
            f"the directory is on the node's own file system ({on}): other nodes cannot see it",
            "mount the shared file system there",
            tier=tier.name,
        )
    elif mount is not None and not mount.is_network:
        yield warned(
            "NotShared",
            f"other nodes may not see {on}",
            "use NFS, CephFS, Lustre or a similar file system",
            tier=tier.name,
        )
    elif mount is not None and mount.fs_type.startswith("nfs"):
        yield _nfs(mount, tier.name)
    else:
        yield fine("SharedFilesystem", on, tier=tier.name)


def _nfs(mount: Mount, tier: str) -> Finding:
    over = "RDMA" if {"proto=rdma", "rdma"} & set(mount.options) else "TCP"
    summary = f"{mount.fs_type} from {mount.source} over {over}"
    if "hard" in mount.options:
        return warned(
            "HardMount",
            f"{summary}, mounted hard: threads hang while the server is unavailable",
            "mount it with soft,timeo=30,retrans=2: a lost block is recomputed",
            tier=tier,
        )
    return fine("SharedFilesystem", summary, tier=tier)


def _round_trip(fd: int, tier: SharedTier) -> Finding:
    """Write a page, sync it, reopen it by name, read it, and remove it; report the median of several rounds."""
    durations = []
    for _ in range(_ROUNDS):
        data, name = os.urandom(_PAGE), f".{names.POOL_ID}.preflight-{secrets.token_hex(8)}"
        started = time.monotonic()
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
        try:
            try:
                os.write(file, data)
                os.fsync(file)
            finally:
                os.close(file)
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
            try:
                got = os.read(file, _PAGE)
            finally:
                os.close(file)
        finally:
            os.unlink(name, dir_fd=fd)
        if got != data:
            return failed(
                "SharedDirectory",
                "the file system returned other bytes than were written",
                "replace the file system",
                tier=tier.name,
            )
        durations.append((time.monotonic() - started) * 1000)
    ms = statistics.median(durations)
    return fine("RoundTrip", f"round trip of a small file: {ms:.1f} ms", tier=tier.name, round_trip_ms=ms)


def _speed(fd: int, tier: SharedTier, max_s: float) -> Finding:
    info = os.fstatvfs(fd)
    free = info.f_bavail * info.f_frsize
    with scratch_file(fd) as (file, _):
        direct = speed.takes_direct_io(file)
        limit = min(_MAX_BYTES, max(speed.CHUNK, free // 4))
        result = speed.measure(file, direct=direct, max_bytes=limit, max_s=max_s / 2)
    speeds = (
        f"writes {result.write_mb_s:.0f} MB/s, reads {result.read_mb_s:.0f} MB/s ({size(result.written)}, one stream)"
    )
    values = {"write_mb_s": result.write_mb_s, "read_mb_s": result.read_mb_s, "free_bytes": float(free)}
    if tier.capacity_bytes and info.f_blocks * info.f_frsize < tier.capacity_bytes:
        return warned(
            "Space",
            f"{speeds}; capacity is {size(tier.capacity_bytes)}, and the file system has "
            f"{size(info.f_blocks * info.f_frsize)}",
            "set capacity to the available space",
            tier=tier.name,
            **values,
        )
    return fine("Speed", speeds, tier=tier.name, **values)


def check_objects(
    tier: FsspecTier, pool_uid: str, secret_dir: str, *, open_it: Callable[[FsspecTier, str], Bucket] = open_bucket
) -> Iterator[Finding]:
    """Put, get and delete a small object. Errors of the store are reported; credentials never are."""
    try:
        bucket = open_it(tier, secret_dir)
    except ConfigError as e:
        yield failed("ObjectStore", str(e), "see docs/how-to/storage/object-store.md", tier=tier.name)
        return
    name, data = f"{pool_uid}/preflight/{secrets.token_hex(16)}", os.urandom(_PAGE)
    here = os.memfd_create("preflight", os.MFD_CLOEXEC)
    back = os.memfd_create("preflight", os.MFD_CLOEXEC)
    try:
        os.write(here, data)
        started = time.monotonic()
        bucket.put(name, here, len(data))
        try:
            bucket.get_to_fd(name, back, len(data))
        finally:
            bucket.delete(name)
        ms = (time.monotonic() - started) * 1000
        if os.pread(back, _PAGE, 0) != data:
            yield failed(
                "ObjectStore",
                "the store returned other bytes than were put",
                "replace the object store",
                tier=tier.name,
            )
        else:
            yield fine("ObjectStore", f"round trip of an object: {ms:.0f} ms", tier=tier.name, round_trip_ms=ms)
    except (OSError, KVPoolError) as e:
        problem = (e.strerror if isinstance(e, OSError) else None) or str(e)
        yield failed(
            "ObjectStore",
            f"an object cannot be put, read and deleted: {problem}",
            "check the URL, the endpoint and the Secret (docs/how-to/storage/object-store.md)",
            tier=tier.name,
        )
    finally:
        os.close(here)
        os.close(back)
        bucket.close()
