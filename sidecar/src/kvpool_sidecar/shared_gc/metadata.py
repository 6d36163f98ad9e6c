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
    """The directory has no owner yet; the first store claims it."""


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
    """Replace a note. Returns the mount's time, Unix seconds as stamped by the file system."""
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
    """Return a note; empty if it is missing or invalid."""
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
    """Update the note's time. False if it is missing."""
    try:
        os.utime(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def remove_note(folder: int, name: str) -> bool:
    """Remove a note. False if it was missing."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def notes(folder: int, kind: re.Pattern[str]) -> Iterator[tuple[str, str, float]]:
    """Yield name, the part of the name that the pattern captures, and time of each note; at most MAX_NOTES."""
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
    """Return whether the name is that of a note, a temporary note, or a lease."""
    return name == SUMMARY or any(p.fullmatch(name) for p in (NODE, MODEL, TERM, _TEMPORARY))


def is_temporary(name: str) -> bool:
    """Return whether this is a temporary file of an interrupted writer."""
    return _TEMPORARY.fullmatch(name) is not None
