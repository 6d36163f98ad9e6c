"""`kvpool-sidecar wipe`: delete a pool's blocks, only from directories that are marked as this pool's."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import RetryableError
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.buckets.options import open_bucket
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from kvpool.config import PoolConfig

__all__ = ["wipe"]

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 30.0


def wipe(config: PoolConfig, *, local: bool = True, shared: bool = True, object_secret_dir: str = "") -> int:
    """Delete the blocks and return the number of files. Idempotent, and safe to run on several nodes in parallel.

    RetryableError while a sidecar runs.
    """
    removed = 0
    if local:
        removed += sum(_wipe_directory(tier.path, config.uid, exclusive=True) for tier in config.local)
    if shared and config.shared is not None:
        removed += _wipe_directory(config.shared.path, config.uid, exclusive=False)
    if shared and config.fsspec is not None:
        store = ObjectStore(
            open_bucket(config.fsspec, object_secret_dir),
            ObjectStoreSettings(pool_uid=config.uid, max_payload=config.cache.max_block_bytes),
        )
        removed += store.wipe()
        store.close()
    return removed


def _wipe_directory(path: str, pool_uid: str, *, exclusive: bool) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        known = names.read_pool_id(fd, path)
        if known is None or known.pool_uid != pool_uid:
            log.info("%s does not belong to this pool and is left unchanged", path)
            return 0
        if exclusive:
            _lock(fd, path)
        removed = sum(safefs.remove_tree(fd, name) for name in (names.BLOCKS, names.QUARANTINE, names.TMP, names.SWEEP))
        # last, so that an interrupted wipe can be repeated
        removed += safefs.remove_tree(fd, names.POOL_ID)
        removed += safefs.remove_tree(fd, names.SWEEP)  # a sidecar that still ran may have recreated it; now it cannot
    finally:
        os.close(fd)
    log.info("%s: deleted %d files", path, removed)
    return removed


def _lock(dir_fd: int, path: str) -> None:
    """Lock the directory; the lock ends with the process, after its file is deleted."""
    fd = safefs.open_beneath(dir_fd, names.POOL_ID, os.O_RDONLY)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise RetryableError("a sidecar still serves this directory; stop it first", where=path) from None
        time.sleep(0.1)
