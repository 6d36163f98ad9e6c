"""Which descriptors of loaded blocks a client keeps, beside a real block table; no processes."""

from __future__ import annotations

import hashlib
import os
import time

import pytest
from sc_nodes import wait_for

from kvpool.protocol import block_table as layout
from kvpool.protocol import wire
from kvpool.transport import hot_blocks
from kvpool.transport.block_table import BlockTable
from kvpool.transport.hot_blocks import HotBlocks
from kvpool.transport.pending import PendingRead
from kvpool.transport.responses import BlockRequest
from kvpool_sidecar.serving.block_table import BlockTableWriter

SIZE = 64


class Lookups:
    """The table as LocalLookups gives it."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table

    def reset(self, *, is_offered: bool) -> None:
        pass


class Connections:
    """No report is ever due here: no use is recorded."""


class Bench:
    def __init__(self, max_blocks: int = 100) -> None:
        self.new_table()
        self.lookups = Lookups(self.table)
        self.hot = HotBlocks(self.lookups, max_blocks)
        self.hot.reset(has_tables=True, accepts_reports=True)

    def new_table(self) -> None:
        self.writer = BlockTableWriter(1 << 10)
        self.writer.set_valid_until(time.monotonic_ns() + 3600 * 10**9)
        descriptor = self.writer.open_for_reading()
        self.table = BlockTable(descriptor)
        os.close(descriptor)

    def insert(self, *numbers: int) -> None:
        for n in numbers:
            self.writer.insert(name(n)[:16], name(n))

    def keep(self, *numbers: int, moment=None) -> list[int]:
        """The descriptors of blocks that were loaded since `moment`."""
        loads = []
        for n in numbers:
            load = PendingRead(0, name(n), name(n), wire.Tier.LOCAL, memoryview(bytearray(SIZE)))
            load.descriptor, load.payload_sum, load.ok = os.open("/dev/null", os.O_RDONLY), b"s" * 16, True
            loads.append(load)
        opened = [load.descriptor for load in loads]
        self.hot.keep(loads, moment or self.hot.moment(), Connections())
        return opened

    def take(self, *numbers: int, size: int = SIZE) -> list[bytes]:
        requests = [BlockRequest(0, name(n), memoryview(bytearray(size))) for n in numbers]
        moment = self.hot.moment()
        found = self.hot.take(requests, moment)
        for load in found:
            load.ok = True
        self.hot.keep(found, moment, Connections())
        return [load.block_id for load in found]


def name(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.hot.close()


def test_a_block_is_kept_and_taken_by_its_whole_id_and_its_length(bench):
    bench.insert(1, 2)
    bench.keep(1, 2)
    assert bench.take(1, 2, 3) == [name(1), name(2)]
    assert bench.take(1, size=SIZE + 1) == []
    moment = bench.hot.moment()
    other = name(1)[:16] + bytes(16)  # the same tag
    assert bench.hot.take([BlockRequest(0, other, memoryview(bytearray(SIZE)))], moment) == []
    assert bench.take(1) == [name(1)]


def test_a_block_in_one_load_is_not_given_to_another(bench):
    bench.insert(1)
    bench.keep(1)
    request, moment = BlockRequest(0, name(1), memoryview(bytearray(SIZE))), bench.hot.moment()
    (first,) = bench.hot.take([request], moment)
    assert bench.hot.take([request], moment) == []
    first.ok = True
    bench.hot.keep([first], moment, Connections())
    assert bench.take(1) == [name(1)]


def test_a_block_that_is_not_in_the_table_is_closed(bench):
    bench.insert(1)
    kept, other = bench.keep(1, 2)
    wait_for(lambda: not is_open(other), "it is closed")
    assert is_open(kept)
    assert bench.take(1, 2) == [name(1)]


@pytest.mark.parametrize("is_stored_again", [False, True])
def test_a_block_that_was_removed_while_it_was_loaded_is_closed(bench, is_stored_again):
    bench.insert(1, 2)
    moment = bench.hot.moment()
    bench.writer.remove(name(1))
    if is_stored_again:
        bench.insert(1)
    old, kept = bench.keep(1, 2, moment=moment)
    wait_for(lambda: not is_open(old), "it is closed")
    assert is_open(kept)
    assert bench.take(1, 2) == [name(2)]


def test_a_block_that_was_removed_and_stored_again_is_not_taken(bench):
    bench.insert(1, 2)
    old, kept = bench.keep(1, 2)
    bench.writer.remove(name(1))
    bench.insert(1)
    assert bench.take(1, 2) == [name(2)]
    wait_for(lambda: not is_open(old), "it is closed")
    assert is_open(kept)


def test_more_removals_than_the_table_remembers_drop_everything(bench, monkeypatch):
    monkeypatch.setattr(bench.hot._reports, "wake", lambda _: None)  # else its thread follows beside them
    bench.insert(1)
    (old,) = bench.keep(1)
    for n in range(100, 100 + layout.REMOVALS):
        bench.insert(n)
        bench.writer.remove(name(n))
    assert bench.take(1) == []
    wait_for(lambda: not is_open(old), "it is closed")


def test_too_many_removals_during_a_load_keep_nothing(bench):
    bench.insert(1)
    moment = bench.hot.moment()
    for n in range(100, 100 + layout.REMOVALS):
        bench.insert(n)
        bench.writer.remove(name(n))
    (old,) = bench.keep(1, moment=moment)
    wait_for(lambda: not is_open(old), "it is closed")


def test_another_table_drops_everything(bench):
    bench.insert(1)
    (old,) = bench.keep(1)
    moment = bench.hot.moment()
    bench.new_table()
    bench.insert(1)
    bench.lookups.table = bench.table
    assert bench.take(1) == []
    (late,) = bench.keep(1, moment=moment)  # a load that began with the old one
    wait_for(lambda: not is_open(old) and not is_open(late), "both are closed")


def test_an_invalid_table_gives_nothing_and_everything_is_closed(bench):
    bench.insert(1)
    (old,) = bench.keep(1)
    moment = bench.hot.moment()
    bench.writer.set_valid_until(0)
    assert bench.hot.moment() is None
    (late,) = bench.keep(1, moment=moment)
    wait_for(lambda: not is_open(old) and not is_open(late), "both are closed, although no load comes")
    assert len(bench.hot) == 0


def test_the_least_recently_used_goes_first_and_the_number_is_bounded():
    bench = Bench(max_blocks=3)
    bench.insert(*range(1, 8))
    first = bench.keep(1, 2, 3)
    assert bench.take(1) == [name(1)]
    bench.keep(4, 5)
    wait_for(lambda: [is_open(one) for one in first] == [True, False, False], "two are closed")
    assert bench.take(1, 2, 3, 4, 5) == [name(1), name(4), name(5)]
    bench.hot.close()
    wait_for(lambda: not is_open(first[0]), "all are closed")


def test_a_second_descriptor_of_a_block_replaces_the_first(bench):
    bench.insert(1)
    (old,), (new,) = bench.keep(1), bench.keep(1)
    wait_for(lambda: not is_open(old), "one is enough")
    assert is_open(new)
    assert len(bench.hot) == 1


def test_nothing_is_kept_for_a_sidecar_that_accepts_no_reports_or_after_the_end(bench):
    bench.insert(1)
    (old,) = bench.keep(1)
    moment = bench.hot.moment()
    bench.hot.reset(has_tables=True, accepts_reports=False)
    assert bench.hot.moment() is None
    wait_for(lambda: not is_open(old), "it is closed")
    bench.hot.reset(has_tables=True, accepts_reports=True)
    assert bench.hot.moment() is not None
    bench.hot.close()
    (late,) = bench.keep(1, moment=moment)
    assert bench.hot.moment() is None
    wait_for(lambda: not is_open(late), "it is closed")


def test_a_process_with_few_open_files_keeps_fewer(monkeypatch):
    monkeypatch.setattr(hot_blocks.resource, "getrlimit", lambda _: (64, 64))
    bench = Bench()
    bench.insert(*range(1, 10))
    bench.keep(*range(1, 10))
    assert len(bench.hot) == 4
    bench.hot.close()
