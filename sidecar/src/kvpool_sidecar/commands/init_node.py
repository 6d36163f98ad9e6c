"""`kvpool-sidecar init-node`: give the tiers' directories to the storage server's user.

Runs as root with the capability CHOWN only. Without FOWNER root cannot change the mode of a directory that it no longer
owns, and without DAC_OVERRIDE it cannot list one. So the mode is set first and the owner last. A directory that has the
right owner is left unchanged; the server examines what this process cannot list. Idempotent.

With `migrate`, a tier that another user of KVPool's servers owns gets the new owner, with all its files. Root takes
each directory first, because only the owner may list it, and gives it away last: an interrupted migration continues.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ConfigError
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system.users import is_server_user

if TYPE_CHECKING:
    from kvpool.config import PoolConfig

__all__ = ["ServerUser", "init_node"]

log = logging.getLogger(__name__)


_PATH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ServerUser(NamedTuple):
    """User and group of the storage server. `migrate`: take over a local tier from an earlier user of the server."""

    uid: int
    gid: int
    migrate: bool = False


def init_node(config: PoolConfig, new: ServerUser) -> None:
    """Create the directories of all tiers and change their owner, except in volumes of the server's pod.

    ConfigError if a directory belongs to another user or pool or holds foreign files, OSError if a system call fails.
    """
    for tier in config.local:
        if not tier.is_ephemeral:
            _init_local(tier.path, config.uid, new)
    if config.shared is not None:
        _init_shared(config.shared.path, config.uid, new._replace(migrate=False))


def _init_local(path: str, pool_uid: str, new: ServerUser) -> None:
    uid = new.uid
    os.makedirs(path, 0o700, exist_ok=True)
    owner = _owner(path)
    if owner not in (os.geteuid(), uid) and is_server_user(owner):
        if not new.migrate:
            log.info("%s belongs to user %d until the sidecar of the new user starts", path, owner)
            return
        _take(path, pool_uid, owner)
        owner = os.geteuid()
    if owner not in (os.geteuid(), uid):
        raise ConfigError(
            f"the directory belongs to user {owner}; set a dedicated directory, or change its owner to root", where=path
        )
    try:
        fd = os.open(path, _LIST)
    except PermissionError:
        # mode 0700 of the server's user, which examines the directory itself before it uses it
        log.info("%s already belongs to user %d", path, uid)
        return
    try:
        if owner != uid and new.migrate:
            _take_file(fd, names.POOL_ID)  # an interrupted migration may have given it away
        _refuse_foreign(fd, pool_uid, path)
        if owner == uid:
            log.info("%s already belongs to user %d", path, uid)
            return
        if new.migrate and (changed := _give_tree(fd, new)):
            log.info("changed the owner of %d files of %s", changed, path)
        os.fchmod(fd, 0o700)
        os.fchown(fd, uid, new.gid)
    finally:
        os.close(fd)
    log.info("changed the owner of %s to user %d", path, uid)


def _take(path: str, pool_uid: str, owner: int) -> None:
    """Make root the owner of a directory that is this pool's. ConfigError, and the previous owner, if it is not."""
    group = os.stat(path, follow_symlinks=False).st_gid
    os.chown(path, os.geteuid(), -1, follow_symlinks=False)
    try:
        fd = os.open(path, _LIST)
        try:
            marked = _take_file(fd, names.POOL_ID)
            try:
                _refuse_foreign(fd, pool_uid, path)
            except BaseException:
                if marked:
                    os.chown(names.POOL_ID, owner, -1, dir_fd=fd, follow_symlinks=False)
                raise
        finally:
            os.close(fd)
    except BaseException:
        os.chown(path, owner, group, follow_symlinks=False)
        raise


def _take_file(dir_fd: int, name: str) -> bool:
    """Make root the owner of a file. False if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        os.chown(name, os.geteuid(), -1, dir_fd=dir_fd, follow_symlinks=False)
        return True
    return False


def _give_tree(dir_fd: int, new: ServerUser) -> int:
    """Change the owner of everything below a directory that root owns, each directory last. Returns how many files."""
    changed = 0
    device = os.fstat(dir_fd).st_dev
    for name in os.listdir(dir_fd):
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if info.st_uid == new.uid or info.st_dev != device:
            continue  # a directory with the new owner is complete
        try:
            below = os.open(name, _PATH, dir_fd=dir_fd)
        except NotADirectoryError:
            os.chown(name, new.uid, new.gid, dir_fd=dir_fd, follow_symlinks=False)
            changed += 1
            continue
        os.close(below)
        os.chown(name, os.geteuid(), -1, dir_fd=dir_fd, follow_symlinks=False)
        below = os.open(name, _LIST, dir_fd=dir_fd)
        try:
            changed += _give_tree(below, new)
            os.fchown(below, new.uid, new.gid)
        finally:
            os.close(below)
    return changed


def _owner(path: str) -> int:
    fd = os.open(path, _PATH)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def _init_shared(path: str, pool_uid: str, new: ServerUser) -> None:
    """Tolerate a shared file system that denies this to root; the server must then be able to write already."""
    uid = new.uid
    os.makedirs(path, 0o700, exist_ok=True)
    if (owner := _owner(path)) not in (os.geteuid(), uid):
        log.warning("%s belongs to user %d and stays so; user %d must be able to write to it", path, owner, uid)
        return
    try:
        _init_local(path, pool_uid, new)
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
