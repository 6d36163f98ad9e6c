"""Block tables of the tenants and fingerprints of this node's clients: which blocks a client finds without asking.

A table is made when a client requests it. Blocks enter it when they are stored, and those of an earlier process when a
lookup finds them: their headers are read in the background. Blocks with a salt tag never enter, and a table has blocks
of its own tenant only. A table is valid for a second at a time, and not while a drive is fenced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block_table as layout
from kvpool.protocol.block import HEADER_BYTES, NO_SALT, decode_header
from kvpool.protocol.wire import Tier
from kvpool_sidecar.blocks.events import BlocksRemoved
from kvpool_sidecar.resilience.worker import BackgroundWorker, PeriodicTask
from kvpool_sidecar.serving.block_table import SLOT_BYTES, BlockTableWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.blocks.events import BlockStored
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["MAX_BYTES", "BlockTables"]

log = logging.getLogger(__name__)

_MIN_SLOTS = 1 << 12
_GROWTH = 8
_MAX_TOTAL_SLOTS = 1 << 20  # 32 MiB
_MAX_TABLES = 64
_MAX_OF_TENANT = 8
_RENEW_S = 0.25
_COPY_PLACES = 1024  # in one turn of the lock
_MAX_QUEUED = 64
_MAX_EXAMINED = 1 << 16
MAX_BYTES: Final = 45 << 20
"""Upper bound of the memory of all tables and of the keys of examined blocks."""


class _Name(NamedTuple):
    tenant_tag: bytes
    fingerprint: bytes


class _Table:
    __slots__ = ("growing", "writer")

    def __init__(self, writer: BlockTableWriter) -> None:
        self.writer = writer
        self.growing: BlockTableWriter | None = None  # gets all changes, and the blocks of `writer`

    @property
    def slots(self) -> int:
        return self.writer.slots + (self.growing.slots if self.growing is not None else 0)


class BlockTables:
    """Thread-safe. Bounded: 64 tables, 8 of a tenant, and MAX_BYTES in all."""

    def __init__(self, local: LocalStore) -> None:
        self._local = local
        self._lock = threading.Lock()  # held for operations of memory only
        self._tables: OrderedDict[_Name, _Table] = OrderedDict()  # requested last: at the end
        self._is_supported = self._can_grow = True
        self._examined: set[bytes] = set()  # keys of blocks whose headers were read for the current tables
        self._learner: BackgroundWorker[tuple[bytes, list[bytes]]] = BackgroundWorker(
            "block-table", self._learn, max_queued=_MAX_QUEUED
        )
        self._renewal = PeriodicTask("block-table-renewal", self.renew, _RENEW_S)

    def start(self) -> None:
        """Start to renew the tables."""
        self._learner.start()
        self._renewal.start()

    def stop(self) -> None:
        """Invalidate all tables: clients ask again."""
        self._renewal.stop()
        self._learner.stop()
        with self._lock:
            tables, self._tables = list(self._tables.values()), OrderedDict()
            self._is_supported = False
            for table in tables:
                _close(table)

    def open_for(self, tenant_tag: bytes, fingerprint: bytes) -> int:
        """Return a read-only descriptor of the table, which the caller closes; -1 if there can be none."""
        name = _Name(tenant_tag, fingerprint)
        with self._lock:
            table = self._tables.get(name) or self._create(name)
            if table is None:
                return -1
            self._tables.move_to_end(name)
            try:
                return table.writer.open_for_reading()
            except OSError as e:
                log.warning("no block table for a client: %s", e)
                return -1

    def withdraw(self, tenant_tag: bytes) -> None:
        """Replace the tenant's tables: pods that have left it keep a descriptor, but of the old ones."""
        with self._lock:
            self._examined = set()
            for name in [name for name in self._tables if name.tenant_tag == tenant_tag]:
                _close(self._tables.pop(name))

    def on_stored(self, event: BlockStored) -> None:
        """Add a block that a drive has stored."""
        self._insert(event.block_key, event.header, replaces=True)

    def on_removed(self, event: BlocksRemoved) -> None:
        """Remove blocks that are gone."""
        with self._lock:
            for table in self._tables.values():
                for key in event.block_keys:
                    table.writer.remove(key)
                    if table.growing is not None:
                        table.growing.remove(key)

    def on_lookup(self, tenant: bytes, keys: Sequence[bytes], tiers: bytes, _asked_at: float) -> None:
        """Listener of LookupEvents: queue the local blocks of an answered lookup, which may miss in the table."""
        examined = self._examined
        new = [k for k, tier in zip(keys, tiers, strict=True) if tier == Tier.LOCAL and k not in examined]
        with self._lock:
            is_used = any(name.tenant_tag == tenant for name in self._tables)
        if is_used and new:
            self._learner.submit((tenant, new))

    def renew(self) -> None:
        """Make the tables valid for one more second, or not while a drive is fenced; start to grow one."""
        is_usable = not any(drive.health.fenced for drive in self._local.drives)
        until = time.monotonic_ns() + int(layout.VALID_S * 1e9) if is_usable else 0
        with self._lock:
            for table in self._tables.values():
                table.writer.set_valid_until(until)
            small = next((name for name, table in self._tables.items() if self._should_grow(table)), None)
        if small is not None:
            self._grow(small)

    def status(self) -> dict[str, Any]:
        """Return tables, blocks in them, and bytes of memory, shared and private."""
        with self._lock:
            tables = list(self._tables.values())
            return {
                "tables": len(tables),
                "blocks": sum(table.writer.count for table in tables),
                "bytes": sum(table.slots * SLOT_BYTES + layout.JOURNAL_END for table in tables),
            }

    def _create(self, name: _Name) -> _Table | None:
        """Make an empty table, if there is room or the tenant has an older one. The lock is held."""
        own = [other for other in self._tables if other.tenant_tag == name.tenant_tag]
        is_over = len(self._tables) >= _MAX_TABLES or self._total_slots() + _MIN_SLOTS > _MAX_TOTAL_SLOTS
        if len(own) >= _MAX_OF_TENANT or (is_over and own):
            _close(self._tables.pop(own[0]))
        elif is_over:
            return None
        if not self._is_supported:
            return None
        try:
            table = _Table(BlockTableWriter(_MIN_SLOTS))
        except OSError as e:
            self._is_supported = False
            log.warning("this kernel has no sealed memory files: clients ask for each lookup (%s)", e)
            return None
        self._tables[name] = table
        self._examined = set()
        table.writer.set_valid_until(time.monotonic_ns() + int(layout.VALID_S * 1e9))
        return table

    def _insert(self, block_key: bytes, header: BlockHeader, *, replaces: bool) -> None:
        if header.salt_tag != NO_SALT:
            return
        tag = header.block_id[: layout.TAG_BYTES]
        with self._lock:
            table = self._tables.get(_Name(header.tenant_tag, header.fingerprint))
            if table is None:
                return
            table.writer.insert(tag, block_key, replaces=replaces)
            if table.growing is not None:
                table.growing.insert(tag, block_key)
        if not self._local.contains(block_key):  # removed before it was inserted
            self.on_removed(BlocksRemoved([block_key]))

    def _learn(self, lookup: tuple[bytes, list[bytes]]) -> None:
        """Read the headers of blocks that no table has, and add those of this tenant."""
        tenant, keys = lookup
        with self._lock:
            examined = self._examined = self._examined if len(self._examined) < _MAX_EXAMINED else set()
        for key in keys:
            with self._lock:
                is_known = any(key in table.writer for table in self._tables.values())
            header = None if is_known else _header(self._local, key)
            if header is not None and header.tenant_tag == tenant:
                self._insert(key, header, replaces=False)
            examined.add(key)

    def _total_slots(self) -> int:
        return sum(table.slots for table in self._tables.values())

    def _should_grow(self, table: _Table) -> bool:
        slots = table.writer.slots * _GROWTH
        has_room = self._can_grow and slots <= layout.MAX_SLOTS and self._total_slots() + slots <= _MAX_TOTAL_SLOTS
        return has_room and table.writer.count > table.writer.slots // 2

    def _grow(self, name: _Name) -> None:
        """Replace a table by a larger one. Other calls continue meanwhile, and change both."""
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                return
            old = table.writer
            try:
                table.growing = larger = BlockTableWriter(old.slots * _GROWTH)
            except OSError as e:
                self._can_grow = False
                log.warning("block tables stay small: %s", e)
                return
        for start in range(0, old.slots, _COPY_PLACES):
            with self._lock:
                if self._tables.get(name) is not table:
                    return  # withdrawn meanwhile, and closed
                old.copy_places(start, _COPY_PLACES, larger)
        with self._lock:
            if self._tables.get(name) is table:
                table.writer, table.growing = larger, None
                larger.set_valid_until(time.monotonic_ns() + int(layout.VALID_S * 1e9))
                old.close()


def _close(table: _Table) -> None:
    table.writer.close()
    if table.growing is not None:
        table.growing.close()


def _header(local: LocalStore, block_key: bytes) -> BlockHeader | None:
    """Return the header of a local block; None if it is gone or cannot be read."""
    block = local.peek(block_key)
    if block is None:
        return None
    try:
        header = decode_header(os.pread(block.fd, HEADER_BYTES, 0))
    except (CorruptBlockError, OSError):
        return None
    finally:
        os.close(block.fd)
    return header if header.block_key == block_key else None
