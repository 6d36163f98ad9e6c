"""Descriptors of blocks that were just loaded from this node's drives: a load of them again needs no request.

A descriptor is used only while the sidecar's block table (kvpool.transport.block_table) is valid and has not named its
block as removed since the file was opened. So a load sees an eviction, a purge or a lost tenant as soon as a lookup
does. Descriptors of removed blocks are closed within `INTERVAL_S`, all of them once the table is not valid or no load
used one for `IDLE_S`. The payload's checksum is kept with the descriptor, and each read is verified by it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import block, block_table, wire
from kvpool.transport.descriptor_closer import close_later
from kvpool.transport.pending import PendingRead
from kvpool.transport.use_reports import UseReports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.transport.block_table import BlockTable
    from kvpool.transport.connection_pool import ConnectionPool
    from kvpool.transport.load import LoadBatch
    from kvpool.transport.local_lookups import LocalLookups
    from kvpool.transport.responses import BlockRequest

__all__ = ["IDLE_S", "INTERVAL_S", "MAX_BLOCKS", "HotBlocks", "Moment"]

_log = logging.getLogger("kvpool")

INTERVAL_S = 0.1
"""Time between two checks of what was removed, and between two reports of loads."""
IDLE_S = 10.0
MAX_BLOCKS = 1024
"""Most descriptors of one client; fewer where its process may have less than 16 times as many open files."""
_SHARE_OF_FILES = 16
_TAG = block_table.TAG_BYTES


class Moment(NamedTuple):
    """A table, and how many blocks it had removed when a load began."""

    table: BlockTable
    removed: int


class _HotBlock(NamedTuple):
    block_id: bytes
    block_key: bytes
    payload_sum: bytes
    size: int
    descriptor: int


class HotBlocks:
    """Thread-safe. No method raises or waits. A block belongs to one load at a time; another one requests it."""

    def __init__(self, lookups: LocalLookups, max_blocks: int = MAX_BLOCKS) -> None:
        self._lookups = lookups
        self._max_blocks = min(max_blocks, _allowed_files() // _SHARE_OF_FILES)
        self._is_offered = self._closed = False
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _HotBlock] = {}  # by tag, the least recently used first
        self._table: BlockTable | None = None  # of all blocks
        self._applied = 0  # removals
        self._used_at = 0.0
        self._reports = UseReports(wire.Op.LOADED, lambda server: server.load_reports, INTERVAL_S, self.tend)

    def __len__(self) -> int:
        return len(self._blocks)

    def reset(self, *, has_tables: bool, accepts_reports: bool) -> None:
        """Forget the table and close all descriptors, because another connection was made. Its sidecar's abilities."""
        self._lookups.reset(is_offered=has_tables)
        self._is_offered = accepts_reports and block.CAN_CHECKSUM
        self._clear()

    def close(self) -> None:
        """Close all descriptors and keep no more."""
        self._closed = True
        self._reports.close()
        self._clear()

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors; the parent's stay open. Unusable afterwards."""
        self._closed = True
        blocks, self._blocks = self._blocks, {}
        for hot in list(blocks.values()):
            with contextlib.suppress(OSError):
                os.close(hot.descriptor)

    def load(
        self, batch: LoadBatch, requests: Sequence[BlockRequest], moment: Moment | None, connections: ConnectionPool
    ) -> Sequence[BlockRequest]:
        """Load what is here into `batch`. Return the requests for the rest; call `keep` after they are loaded too."""
        if moment is None:
            return requests
        batch.keeps = True
        if not (hot := self.take(requests, moment)):
            return requests
        rest = batch.run_hot(hot, requests)
        if loaded := tuple(load.block_id for load in batch.loads if load.ok):
            self._reports.record(loaded, connections)  # the eviction order and the counters follow uses
        return rest

    def moment(self) -> Moment | None:
        """Return the state of the table before a load; None: nothing is kept now."""
        table = self._lookups.table
        if table is None or not self._is_offered or self._closed or not self._max_blocks:
            return None
        removed = table.removed
        return Moment(table, removed) if removed >= 0 else None

    def take(self, requests: Sequence[BlockRequest], moment: Moment) -> list[PendingRead]:
        """Return those of the requested blocks that are here and not removed by `moment`, for one load."""
        if not self._blocks:
            return []
        found = []
        with self._lock:
            gone = self._follow(moment)
            for position, block_id, view in requests:
                hot = self._blocks.get(block_id[:_TAG])
                if hot is None or hot.block_id != block_id or hot.size != len(view):
                    continue
                del self._blocks[block_id[:_TAG]]
                load = PendingRead(position, block_id, hot.block_key, wire.Tier.LOCAL, view, hot.payload_sum)
                load.descriptor, load.hot = hot.descriptor, hot
                found.append(load)
        close_later(gone, wire.Tier.LOCAL)
        return found

    def keep(self, loads: Sequence[PendingRead], moment: Moment | None, connections: ConnectionPool) -> None:
        """Take over the descriptors of blocks that were loaded since `moment`, but of those removed meanwhile."""
        if not loads or moment is None:
            return
        surplus: list[int] = []
        with self._lock:
            surplus += self._follow(moment)
            removed = moment.table.removed if self._table is moment.table and not self._closed else -1
            tags: list[bytes] | None = [] if removed == moment.removed else None
            if removed > moment.removed:
                tags = moment.table.removals(moment.removed, removed)
            gone = frozenset(tags) if tags else ()
            for load in loads:
                tag, descriptor = load.block_id[:_TAG], load.take_descriptor()
                is_known = isinstance(hot := load.hot, _HotBlock) or moment.table.has_all((load.block_id,))
                if tags is None or tag in gone or not is_known:
                    surplus.append(descriptor)
                    continue
                if (known := self._blocks.pop(tag, None)) is not None:
                    surplus.append(known.descriptor)
                self._blocks[tag] = hot if isinstance(hot, _HotBlock) else _of(load, descriptor)
            while len(self._blocks) > self._max_blocks:
                surplus.append(self._blocks.pop(next(iter(self._blocks))).descriptor)
            self._used_at = time.monotonic()
        close_later(surplus, wire.Tier.LOCAL)
        if self._blocks:
            self._reports.wake(connections)

    def tend(self) -> bool:
        """Close what must not be kept any longer. False if nothing is left."""
        try:
            moment = self.moment()
            if moment is None or time.monotonic() - self._used_at > IDLE_S:
                self._clear()
            else:
                with self._lock:
                    gone = self._follow(moment)
                close_later(gone, wire.Tier.LOCAL)
        except Exception:
            _log.exception("kvpool: descriptors of loaded blocks cannot be kept")
            self._clear()
        return bool(self._blocks)

    def _clear(self) -> None:
        with self._lock:
            blocks, self._blocks, self._table = self._blocks, {}, None
        close_later([hot.descriptor for hot in blocks.values()], wire.Tier.LOCAL)

    def _follow(self, moment: Moment) -> list[int]:
        """Drop what was removed by `moment`, or everything of another table. Return the descriptors to close."""
        if moment.table is self._table and moment.removed <= self._applied:
            return []
        tags = moment.table.removals(self._applied, moment.removed) if moment.table is self._table else None
        self._table, self._applied = moment.table, moment.removed
        if tags is None:
            blocks, self._blocks = self._blocks, {}
            return [hot.descriptor for hot in blocks.values()]
        return [hot.descriptor for tag in tags if (hot := self._blocks.pop(tag, None)) is not None]


def _of(load: PendingRead, descriptor: int) -> _HotBlock:
    return _HotBlock(load.block_id, load.block_key, load.payload_sum, len(load.view), descriptor)


def _allowed_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_BLOCKS * _SHARE_OF_FILES if soft == resource.RLIM_INFINITY else soft
