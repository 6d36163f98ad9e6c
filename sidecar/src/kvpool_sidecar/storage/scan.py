"""Startup scan of a tier directory: reports blocks and removes other files, one directory at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader

__all__ = ["prune", "purge", "remove_orphan", "scan"]

_HEX = frozenset("0123456789abcdef")


def scan(
    blocks: int,
    on_block: Callable[[bytes, os.stat_result], None],
    on_junk: Callable[[], None],
    stop: Callable[[], bool],
) -> None:
    """Walk `blocks` (a directory descriptor). Memory is that of one fan-out directory; ends early when `stop()`."""

    def junk(fd: int, name: str) -> None:
        if remove_orphan(fd, name):
            on_junk()

    for outer in _fan_out(blocks, junk):
        outer_fd = safefs.open_beneath(blocks, outer, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for inner in _fan_out(outer_fd, junk):
                if stop():
                    return
                inner_fd = safefs.open_beneath(outer_fd, inner, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    _files(inner_fd, outer, inner, on_block, junk)
                finally:
                    os.close(inner_fd)
        finally:
            os.close(outer_fd)


def remove_orphan(dir_fd: int, name: str) -> bool:
    """Remove a file that is no block. Directories only if empty: their content may be foreign."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=dir_fd)
        except OSError:
            return False
    except OSError:
        return False
    return True


def prune(dir_fd: int, keep: int) -> int:
    """Remove all but the `keep` newest files. Returns the bytes of the rest."""
    found: list[tuple[float, int, str]] = []
    for name in os.listdir(dir_fd):
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            found.append((info.st_ctime, info.st_blocks * 512, name))
    found.sort(reverse=True)
    for _, _, name in found[keep:]:
        remove_orphan(dir_fd, name)
    return sum(size for _, size, _ in found[:keep])


def purge(dir_fd: int, doomed: Callable[[BlockHeader | None], bool]) -> int:
    """Remove files selected by header (None: undecodable). Returns how many."""
    removed = 0
    for name in os.listdir(dir_fd):
        header = None
        with contextlib.suppress(OSError, CorruptBlockError):
            header = blockfile.header_of(safefs.open_beneath(dir_fd, name, os.O_RDONLY | os.O_NONBLOCK))
        if doomed(header):
            removed += remove_orphan(dir_fd, name)
    return removed


def _files(
    fd: int,
    outer: str,
    inner: str,
    on_block: Callable[[bytes, os.stat_result], None],
    junk: Callable[[int, str], None],
) -> None:
    with os.scandir(fd) as entries:
        for entry in entries:
            key = names.parse_block_key(entry.name, outer, inner)
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if key is not None and stat.S_ISREG(info.st_mode) and info.st_size > HEADER_BYTES:
                on_block(key, info)
            else:
                junk(fd, entry.name)


def _fan_out(fd: int, junk: Callable[[int, str], None]) -> list[str]:
    """Names of the fan-out directories in `fd`, at most 256."""
    found: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if len(entry.name) == 2 and _HEX.issuperset(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                junk(fd, entry.name)
    return found
