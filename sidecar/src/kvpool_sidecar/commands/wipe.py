"""Removes a pool's blocks from this node's drives and the shared tier: only from directories that say they are its."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import RetryableError
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.buckets.options import open_bucket
from kvpool_sidecar.storage.shared.object_store import ObjectStore
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from kvpool.config import PoolConfig

__all__ = ["wipe"]

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 30.0


def wipe(config: PoolConfig, *, local: bool = True, shared: bool = True, object_secret_dir: str = "") -> int:
    """How many files went. Safe to run twice, and on several nodes at once. RetryableError while a sidecar runs."""
    removed = 0
    if local:
        removed += sum(_wipe_directory(tier.path, config.uid, alone=True) for tier in config.local)
    if shared and config.shared is not None:
        removed += _wipe_directory(config.shared.path, config.uid, alone=False)
    if shared and config.fsspec is not None:
        store = ObjectStore(
            open_bucket(config.fsspec, object_secret_dir), pool_uid=config.uid, max_payload=config.cache.max_block_bytes
        )
        removed += store.wipe()
        store.close()
    return removed


def _wipe_directory(path: str, pool_uid: str, *, alone: bool) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        known = names.read_pool_id(fd, path)
        if known is None or known.pool_uid != pool_uid:
            log.info("%s is not of this pool: left alone", path)
            return 0
        if alone:
            _lock(fd, path)
        removed = sum(safefs.remove_tree(fd, name) for name in (names.BLOCKS, names.QUARANTINE, names.TMP, names.SWEEP))
        # last, so that a wipe that was cut short is taken up again
        removed += safefs.remove_tree(fd, names.POOL_ID)
        removed += safefs.remove_tree(fd, names.SWEEP)  # a sidecar that still ran may have made it anew; now it cannot
    finally:
        os.close(fd)
    log.info("%s: %d files removed", path, removed)
    return removed


def _lock(dir_fd: int, path: str) -> None:
    """The lock is let go when the process ends, with the file that it is on gone."""
    fd = safefs.open_beneath(dir_fd, names.POOL_ID, os.O_RDONLY)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise RetryableError("a sidecar still serves this directory", where=path) from None
        time.sleep(0.1)
