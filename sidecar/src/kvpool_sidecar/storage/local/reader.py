"""Read path of a drive: opens block files and records their uses."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlocksOpened
from kvpool_sidecar.eviction import encode_mtime_ns
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.base import Block
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.storage.local.removal import BlockRemover
    from kvpool_sidecar.storage.local.scanner import Scanner
    from kvpool_sidecar.storage.local.state import DriveState

__all__ = ["BlockReader"]

_NOT_A_BLOCK = {errno.ENOTDIR, errno.ELOOP}


class BlockReader:
    """Thread-safe. A fenced drive has no blocks for readers."""

    def __init__(self, state: DriveState, remover: BlockRemover, scanner: Scanner) -> None:
        self._state = state
        self._remover = remover
        self._scanner = scanner

    def contains(self, block_key: bytes) -> bool:
        """See Store.contains."""
        with self._state.lock:
            known = self._state.get(block_key) is not None
        if known or self._state.scanned:
            return known and not self._state.health.fenced
        try:
            os.stat(names.block_path(block_key), dir_fd=self._state.directory.blocks, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open_many(self, keys: Sequence[bytes]) -> list[Block | None]:
        """See Store.open_many."""
        state = self._state
        if state.health.fenced:
            return [None] * len(keys)
        with state.lock:  # after the scan the table is complete: absent blocks cost no I/O
            unknown = {key for key in keys if state.get(key) is None} if state.scanned else frozenset[bytes]()
        if len(unknown) == len(keys):
            return [None] * len(keys)
        with state.health:
            files = [(-1, 0) if key in unknown else self._open_file(key) for key in keys]
            now = state.table.now()
            found: list[Block | None] = []
            truncated: list[tuple[bytes, int]] = []
            due: list[tuple[bytes, int]] = []
            with state.lock:
                for key, (fd, payload_len) in zip(keys, files, strict=True):
                    if fd < 0:
                        found.append(None)
                        continue
                    known = state.policy.get(key)
                    if known is not None and known.payload_len != payload_len:
                        truncated.append((key, fd))
                        found.append(None)
                        continue
                    if state.policy.touch(key, now):
                        due.append((key, state.policy.uses(key)))
                    found.append(Block(fd, payload_len))
            for key, fd in truncated:
                os.close(fd)
                self._remover.quarantine(key)  # blocks never change: this file was truncated or replaced
            self._persist_uses(due, now)
        return found

    def record_uses(self, keys: Sequence[bytes]) -> list[bytes]:
        """Record uses of blocks whose files were opened before. Return those that are on this drive."""
        state = self._state
        if state.health.fenced:
            return []
        now = state.table.now()
        with state.lock:
            here = [key for key in keys if state.get(key) is not None]
            due = [(key, state.policy.uses(key)) for key in here if state.policy.touch(key, now)]
        with state.health:
            self._persist_uses(due, now)
        if here and state.events.has_subscribers(BlocksOpened):
            state.events.emit(BlocksOpened(here))
        return here

    def _persist_uses(self, due: Sequence[tuple[bytes, int]], now: float) -> None:
        for key, uses in due:
            when = encode_mtime_ns(now, uses)
            with contextlib.suppress(OSError):
                os.utime(
                    names.block_path(key), ns=(when, when), dir_fd=self._state.directory.blocks, follow_symlinks=False
                )

    def _open_file(self, block_key: bytes) -> tuple[int, int]:
        """Return a descriptor of the block's file and its payload length; -1 if it is absent."""
        try:
            fd = safefs.open_beneath(
                self._state.directory.read_blocks, names.block_path(block_key), os.O_RDONLY | os.O_NONBLOCK
            )
        except OSError as e:
            self._state.record_error(e)
            if e.errno == errno.ENOENT:
                self._remover.forget_missing(block_key)
            elif e.errno in _NOT_A_BLOCK:
                self._remover.remove_non_block(block_key)
            return -1, 0
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size <= HEADER_BYTES:
            os.close(fd)
            self._remover.remove_non_block(block_key)
            return -1, 0
        if not self._state.scanned:
            self._scanner.add_found(block_key, info)
        return fd, info.st_size - HEADER_BYTES

    def peek_fd(self, block_key: bytes) -> int:
        """Return a descriptor of the block's file, or -1. Does not record a use."""
        if self._state.health.fenced:
            return -1
        try:
            return safefs.open_beneath(
                self._state.directory.blocks, names.block_path(block_key), os.O_RDONLY | os.O_NONBLOCK
            )
        except OSError:
            return -1
