"""The directory `sweep` of a shared tier, where the pool's sidecars leave notes for each other.

::

    <tier>/sweep/term-000000000007     the lease (kvpool_sidecar.shared_gc.file_lease)
    <tier>/sweep/node-<16 hex>         of each sidecar, renewed at each turn: what it has stored since it started
    <tier>/sweep/summary               of the holder: what lies there
    <tier>/sweep/model-<64 hex>        of each fingerprint: a digest of the model's name, touched while it is in use

Notes are small JSON, written beside and renamed; what cannot be read is as good as not there. A sidecar's own file is
also how it learns the time on the mount.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

__all__ = [
    "MAX_NOTES",
    "MODEL",
    "NODE",
    "SUMMARY",
    "TERM",
    "TierMetadata",
    "UnclaimedError",
    "is_ours",
    "is_temporary",
    "notes",
    "read_note",
    "remove_note",
    "touch_note",
    "write_note",
]

MAX_NOTES = 4096
_MAX_NOTE = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
NODE = re.compile(r"node-([0-9a-f]{16})")
MODEL = re.compile(r"model-([0-9a-f]{64})")
SUMMARY = "summary"
TERM = re.compile(r"term-([0-9]{12})")
_TEMPORARY = re.compile(rf"({NODE.pattern}|{MODEL.pattern}|{SUMMARY})\.[0-9a-f]{{16}}")


class UnclaimedError(ConfigError):
    """It is nobody's so far: the first block that is stored will tell."""


class TierMetadata:
    """Descriptors of a shared tier's parts; a context manager that closes them.

    UnclaimedError or ConfigError if the directory is not this pool's; OSError, ELOOP if it is a link.
    """

    def __init__(self, path: str, pool_uid: str) -> None:
        with contextlib.ExitStack() as made:
            self.root = os.open(path, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            made.callback(os.close, self.root)
            known = names.read_pool_id(self.root, path)
            if known is None:
                raise UnclaimedError("no pool has used this directory yet", where=path)
            if known.pool_uid != pool_uid:
                raise ConfigError("not the directory of this pool: nothing is swept", where=path)
            self.device = os.fstat(self.root).st_dev
            self.blocks = self._open(names.BLOCKS, made)
            self.quarantine = self._open(names.QUARANTINE, made)
            self.tmp = self._open(names.TMP, made)
            self.sweep = self._open(names.SWEEP, made)
            self._close = made.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def _open(self, folder: str, made: contextlib.ExitStack) -> int:
        safefs.make_directories(self.root, folder)
        fd = safefs.open_beneath(self.root, folder, _DIRECTORY)
        made.callback(os.close, fd)
        if os.fstat(fd).st_dev != self.device:
            raise ConfigError("another file system is mounted inside the tier: nothing is swept", where=folder)
        return fd


def write_note(folder: int, name: str, value: dict[str, Any]) -> float:
    """Replace it; the mount's time, Unix seconds as the file system stamped it."""
    temporary = f"{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        os.write(fd, json.dumps(value).encode())
    finally:
        os.close(fd)
    try:
        os.utime(temporary, dir_fd=folder, follow_symlinks=False)
        now = os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_mtime
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        remove_note(folder, temporary)
        raise
    return now


def read_note(folder: int, name: str) -> dict[str, Any]:
    """Empty if there is none that can be read."""
    try:
        fd = safefs.open_beneath(folder, name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        data = os.read(fd, _MAX_NOTE)
    except OSError:
        return {}
    finally:
        os.close(fd)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def touch_note(folder: int, name: str) -> bool:
    """Have it stamped anew. False if it is not there."""
    try:
        os.utime(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def remove_note(folder: int, name: str) -> bool:
    """False if it was not there."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def notes(folder: int, kind: re.Pattern[str]) -> Iterator[tuple[str, str, float]]:
    """Of each note of this kind its name, what the name tells, and its time; at most MAX_NOTES."""
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            found = kind.fullmatch(entry.name)
            if found is None:
                continue
            count += 1
            if count > MAX_NOTES:
                return
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, found[1], entry.stat(follow_symlinks=False).st_mtime


def is_ours(name: str) -> bool:
    """Is it a note, one on its way, or a lease?"""
    return name == SUMMARY or any(p.fullmatch(name) for p in (NODE, MODEL, TERM, _TEMPORARY))


def is_temporary(name: str) -> bool:
    """Was this left by a writer that did not get to rename it?"""
    return _TEMPORARY.fullmatch(name) is not None
