"""Block tables of a node without the process around them: growth beside changes, bounds of memory, fenced drives."""

from __future__ import annotations

import errno
import os
import random
import threading

import pytest
from sc_nodes import wait_for

from kvpool.protocol import block
from kvpool.protocol import block_table as layout
from kvpool.protocol.wire import Tier
from kvpool.transport.block_table import BlockTable
from kvpool_sidecar.blocks.events import BlocksRemoved, BlockStored
from kvpool_sidecar.serving import block_tables
from kvpool_sidecar.serving.block_table import SLOT_BYTES
from kvpool_sidecar.serving.block_tables import BlockTables
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import TAG, block_id, key, put
from kvpool_testing.drives import make_drive

MIB = 1 << 20
FINGERPRINT = b"f" * 32


class Holding:
    """A store that has the blocks of `keys`."""

    drives = ()

    def __init__(self, keys) -> None:
        self.keys = keys

    def contains(self, block_key: bytes) -> bool:
        return block_key in self.keys


def stored(n: int, **changes) -> BlockStored:
    rng = random.Random(n)
    block_id, block_key = rng.randbytes(32), rng.randbytes(32)
    fields = {"payload_len": 1, "payload_sum": bytes(16), "created_ms": 1, **changes}
    return BlockStored(block_key, block.BlockHeader(block_key, block_id, FINGERPRINT, TAG, **fields))


def table_of(tables: BlockTables, tag: bytes = TAG, fingerprint: bytes = FINGERPRINT) -> BlockTable | None:
    descriptor = tables.open_for(tag, fingerprint)
    if descriptor < 0:
        return None
    try:
        return BlockTable(descriptor)
    finally:
        os.close(descriptor)


def test_a_table_grows_while_blocks_come_and_go_and_then_has_those_that_are_there():
    events = [stored(n) for n in range(20_000)]
    tables = BlockTables(Holding({event.block_key for event in events}))
    first = table_of(tables)
    removed = {event.block_key for event in events[::3]}
    parts = [events[start : start + 256] for start in range(0, len(events), 256)]
    due, done = threading.Semaphore(0), threading.Semaphore(0)

    def churn() -> None:
        for part in parts:
            due.acquire()
            for event in part:
                tables.on_stored(event)
                if event.block_key in removed:
                    tables.on_removed(BlocksRemoved([event.block_key]))
            done.release()

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in parts:
        due.release()
        tables.renew()  # grows the table beside the changes
        assert done.acquire(timeout=60)
    thread.join()
    tables.renew()
    assert not first.is_valid, "it was replaced by a larger one"
    latest = table_of(tables)
    expected = [event.header.block_id for n, event in enumerate(events) if n % 3]
    assert sum(latest.has_all([one]) for one in expected) == len(expected)
    assert not any(latest.has_all([event.header.block_id]) for event in events[::3])
    assert tables.status()["blocks"] == len(expected)
    tables.stop()
    assert not latest.is_valid


def test_all_tables_together_stay_within_their_memory():
    tables = BlockTables(Holding(set()))
    tenants = [bytes([n]) * 16 for n in range(100)]
    given = [tag for tag in tenants for n in range(3) if tables.open_for(tag, bytes([n]) * 32) >= 0]
    assert len(given) >= 64
    status = tables.status()
    assert status["tables"] <= 64
    assert block_tables._MAX_TOTAL_SLOTS * SLOT_BYTES + 64 * layout.JOURNAL_END < block_tables.MAX_BYTES
    assert status["bytes"] <= 64 * (layout.JOURNAL_END + (1 << 12) * 32)
    for tag in tenants[:20]:
        assert tables.open_for(tag, b"n" * 32) >= 0, "a tenant's own older table makes room"
    assert tables.open_for(b"x" * 16, b"n" * 32) == -1
    assert tables.status()["tables"] <= 64


def test_a_salted_block_never_enters():
    salted, plain = stored(1, salt_tag=b"s" * 16), stored(2)
    tables = BlockTables(Holding({salted.block_key, plain.block_key}))
    table = table_of(tables)
    tables.on_stored(salted)
    tables.on_stored(plain)
    assert not table.has_all([salted.header.block_id])
    assert table.has_all([plain.header.block_id])


def test_a_block_that_is_removed_while_it_enters_does_not_stay():
    event = stored(1)
    tables = BlockTables(Holding(set()))  # its removal was published before it entered
    table = table_of(tables)
    tables.on_stored(event)
    assert not table.has_all([event.header.block_id])


def test_the_tables_of_a_tenant_that_is_left_find_nothing_more():
    event = stored(1)
    tables = BlockTables(Holding({event.block_key}))
    old, other = table_of(tables), table_of(tables, b"o" * 16)
    tables.on_stored(event)
    assert old.has_all([event.header.block_id])
    tables.withdraw(TAG)
    assert not old.has_all([event.header.block_id])
    assert other.is_valid
    new = table_of(tables)
    assert new.is_valid
    assert not new.has_all([event.header.block_id])


def test_headers_are_read_once_for_the_tables_that_there_are(local):
    put(local, 1)
    tables = BlockTables(local)
    tables._learner.start()
    try:
        table_of(tables)
        tables.on_lookup(TAG, [key(1)], bytes([Tier.LOCAL]), 0.0)
        wait_for(lambda: tables.status()["blocks"] == 1, "the block was learned")
        wait_for(lambda: key(1) in tables._examined, "and its key is remembered")
        tables.on_removed(BlocksRemoved([key(1)]))
        tables.on_lookup(TAG, [key(1)], bytes([Tier.LOCAL]), 0.0)
        assert tables._learner.queued == 0
        tables.withdraw(TAG)
        table_of(tables)
        tables.on_lookup(TAG, [key(1)], bytes([Tier.LOCAL]), 0.0)
        wait_for(lambda: tables.status()["blocks"] == 1, "a new table learns it again")
    finally:
        tables.stop()


def test_a_table_that_cannot_grow_stays_as_it_is(monkeypatch):
    events = [stored(n) for n in range(3000)]
    tables = BlockTables(Holding({event.block_key for event in events}))
    table = table_of(tables)
    for event in events:
        tables.on_stored(event)

    def fail(_flags_and_name, _flags=0) -> int:
        raise OSError(errno.ENFILE, "no more files")

    monkeypatch.setattr(os, "memfd_create", fail)
    tables.renew()
    tables.renew()
    assert table.is_valid
    assert sum(table.has_all([event.header.block_id]) for event in events) == 3000


@pytest.fixture
def local(tmp_path):
    drive = make_drive("nvme", str(tmp_path / "r"), quota.CapacityLimits(64 * MIB, 85, 75, 1000))
    drive.scan()
    yield LocalStore([drive])
    drive.close()


def test_blocks_that_are_looked_up_enter_if_their_headers_fit(local):
    put(local, 1)
    put(local, 2)
    tables = BlockTables(local)
    table = table_of(tables)
    tables._learn((TAG, [key(1), key(2), key(3)]))
    assert table.has_all([block_id(1), block_id(2)])
    assert not table.has_all([block_id(3)])
    other = table_of(tables, b"o" * 16)
    tables._learn((b"o" * 16, [key(1)]))
    assert not other.has_all([block_id(1)]), "read by a grant"


def test_a_fenced_drive_makes_the_tables_void_until_it_works_again(local):
    put(local, 1)
    tables = BlockTables(local)
    table = table_of(tables)
    tables._learn((TAG, [key(1)]))
    assert table.has_all([block_id(1)])
    local.drives[0].health.fenced = True
    tables.renew()
    assert not table.has_all([block_id(1)])
    local.drives[0].health.fenced = False
    tables.renew()
    assert table.has_all([block_id(1)])
