"""Walks the blocks of a shared tier one fan-out directory at a time: memory is independent of their number.

Files without a block's name, links and other file systems are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.shared_gc.plan import Group
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LeafDirectory", "Owner", "WalkResult", "leaves", "read_owner"]

_HEX = frozenset("0123456789abcdef")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_PASSED_OVER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES}


class WalkResult(NamedTuple):
    """A block's file: `size` in bytes, `used_at` in Unix seconds by the mount's clock."""

    key: bytes
    name: str
    size: int
    used_at: float


class Owner(NamedTuple):
    """Header fields of a block; `made_at` in Unix seconds by the writer's clock."""

    group: Group
    made_at: float


class LeafDirectory(NamedTuple):
    """One directory `blocks/ab/cd`: `fd` is open during the visit, `parent` is that of `ab`."""

    parent: int
    fd: int
    outer: str
    inner: str

    def blocks(self) -> Iterator[WalkResult]:
        """Yield the blocks; concurrent changes may be missed."""
        with os.scandir(self.fd) as entries:
            for entry in entries:
                key = names.parse_block_key(entry.name, self.outer, self.inner)
                if key is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        yield WalkResult(key, entry.name, info.st_size, info.st_mtime)


def leaves(blocks: int, device: int, first: int = 0) -> Iterator[LeafDirectory]:
    """Yield each fan-out directory, starting with outer number `first`. Descriptors are closed afterwards."""
    outers = sorted(_fan_out(blocks))
    start = sum(int(name, 16) < first for name in outers)
    for outer in outers[start:] + outers[:start]:
        with _opened(blocks, outer, device) as parent:
            if parent < 0:
                continue
            for inner in sorted(_fan_out(parent)):
                with _opened(parent, inner, device) as fd:
                    if fd >= 0:
                        yield LeafDirectory(parent, fd, outer, inner)


def read_owner(leaf: LeafDirectory, found: WalkResult) -> Owner | None:
    """Return None if the file is gone or its header is not of this block."""
    try:
        fd = safefs.open_beneath(leaf.fd, found.name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        header = block.decode_header(os.pread(fd, HEADER_BYTES, 0), packed=True)
    except (CorruptBlockError, OSError):
        return None
    finally:
        os.close(fd)
    if header.block_key != found.key:
        return None
    return Owner(Group(header.tenant_tag, header.fingerprint), header.created_ms / 1000)


@contextlib.contextmanager
def _opened(parent: int, name: str, device: int) -> Iterator[int]:
    """Yield -1 if it is not a directory of this file system, or gone."""
    try:
        fd = safefs.open_beneath(parent, name, _DIRECTORY)
    except OSError as e:
        if e.errno not in _PASSED_OVER:
            raise
        yield -1
        return
    try:
        yield fd if os.fstat(fd).st_dev == device else -1
    finally:
        os.close(fd)


def _fan_out(fd: int) -> list[str]:
    """At most 256 names."""
    with os.scandir(fd) as entries:
        return [e.name for e in entries if len(e.name) == 2 and _HEX.issuperset(e.name)]
