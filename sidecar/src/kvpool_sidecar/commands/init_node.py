"""`kvpool-sidecar init-node`: give the tiers' directories to the storage server's user.

Runs as root with the capability CHOWN only. Without FOWNER root cannot change the mode of a directory that it no longer
owns, and without DAC_OVERRIDE it cannot list one. So the mode is set first and the owner last. A directory that has the
right owner is left unchanged; the server examines what this process cannot list. Idempotent.
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

__all__ = ["init_node"]

log = logging.getLogger(__name__)


def init_node(config: PoolConfig, uid: int, gid: int) -> None:
    """Create the directories of all tiers and change their owner.

    ConfigError if a directory belongs to another user or pool or holds foreign files, OSError if a system call fails.
    """
    for tier in config.local:
        _init_local(tier.path, config.uid, uid, gid)
    if config.shared is not None:
        _init_shared(config.shared.path, config.uid, uid, gid)


def _init_local(path: str, pool_uid: str, uid: int, gid: int) -> None:
    os.makedirs(path, 0o700, exist_ok=True)
    owner = _owner(path)
    if owner not in (os.geteuid(), uid):
        raise ConfigError(
            f"the directory belongs to user {owner}; set a dedicated directory, or change its owner to root", where=path
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        # mode 0700 of the server's user, which examines the directory itself before it uses it
        log.info("%s already belongs to user %d", path, uid)
        return
    try:
        _refuse_foreign(fd, pool_uid, path)
        if owner == uid:
            log.info("%s already belongs to user %d", path, uid)
            return
        os.fchmod(fd, 0o700)
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)
    log.info("changed the owner of %s to user %d", path, uid)


def _owner(path: str) -> int:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def _init_shared(path: str, pool_uid: str, uid: int, gid: int) -> None:
    """Tolerate a shared file system that denies this to root; the server must then be able to write already."""
    os.makedirs(path, 0o700, exist_ok=True)
    if (owner := _owner(path)) not in (os.geteuid(), uid):
        log.warning("%s belongs to user %d and stays so; user %d must be able to write to it", path, owner, uid)
        return
    try:
        _init_local(path, pool_uid, uid, gid)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL):
            raise
        log.warning("cannot change the owner of %s: %s; user %d must be able to write to it", path, e.strerror, uid)


def _refuse_foreign(fd: int, pool_uid: str, path: str) -> None:
    known = names.read_pool_id(fd, path)
    if known is not None and known.pool_uid != pool_uid:
        raise ConfigError(
            f"the directory belongs to pool {known.pool_uid}, not to pool {pool_uid}; set another path", where=path
        )
    if known is None and (foreign := names.foreign_entry(fd)):
        raise ConfigError(
            f"the directory holds {foreign!r}, which does not belong to the pool; set a dedicated directory", where=path
        )
