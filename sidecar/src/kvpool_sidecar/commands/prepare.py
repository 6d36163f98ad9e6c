"""Gives the tiers' directories to the storage server's user. Runs as root with no capability but CHOWN.

Without FOWNER root cannot change the mode of what is no longer its own, and without DAC_OVERRIDE it cannot look into
it: so the mode comes first, the owner last, and what has the right owner already is left alone. Idempotent.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool_sidecar.storage import layout as names

if TYPE_CHECKING:
    from kvpool.config import PoolConfig

__all__ = ["prepare"]

log = logging.getLogger(__name__)


def prepare(config: PoolConfig, uid: int, gid: int) -> None:
    """Make and give away the directories of all tiers. ConfigError if one is somebody else's, OSError if it fails."""
    for tier in config.local:
        _prepare_local(tier.path, config.uid, uid, gid)
    if config.shared is not None:
        _prepare_shared(config.shared.path, config.uid, uid, gid)


def _prepare_local(path: str, pool_uid: str, uid: int, gid: int) -> None:
    os.makedirs(path, 0o700, exist_ok=True)
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid == uid:
            log.info("%s belongs to user %d already", path, uid)
            return
    finally:
        os.close(fd)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_foreign(fd, pool_uid, path)
        os.fchmod(fd, 0o700)
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)
    log.info("%s given to user %d", path, uid)


def _prepare_shared(path: str, pool_uid: str, uid: int, gid: int) -> None:
    """A shared file system may not let root do this; then the directory must be writable for the server already."""
    try:
        _prepare_local(path, pool_uid, uid, gid)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL):
            raise
        log.warning("%s: %s; user %d must be able to write there", path, e.strerror, uid)


def _refuse_foreign(fd: int, pool_uid: str, path: str) -> None:
    known = names.read_pool_id(fd, path)
    if known is not None and known.pool_uid != pool_uid:
        raise ConfigError(f"the directory belongs to pool {known.pool_uid}, not to {pool_uid}", where=path)
    if known is None and (foreign := names.foreign_entry(fd)):
        raise ConfigError(f"the directory holds {foreign!r}, which is not ours: give the pool its own", where=path)
