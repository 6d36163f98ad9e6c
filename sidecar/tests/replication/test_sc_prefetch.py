"""Reading ahead: what a lookup promised, in order, within bounds, and never in the way of those who really read."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_nodes import MIB, wait_for
from sc_raw import block_id, payload

from kvpool import config
from kvpool.protocol import wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.replication import prefetch
from kvpool_sidecar.replication.lookup_events import LookupEvents
from kvpool_sidecar.replication.prefetch import Prefetcher
from kvpool_sidecar.replication.prefetch_window import PrefetchWindow, ReadDecision
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.node_eviction import NodeEviction
from kvpool_sidecar.storage.local.node_table import NodeTable
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key, put

A, B = b"a" * 16, b"b" * 16
SIZE = 1 << 20


def block_ids(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "little") for n in numbers]


def test_what_is_read_ahead_is_bounded_and_opening_makes_room():
    window = PrefetchWindow(100, keep_s=5)
    assert window.reserve(A, key(1), 40, 0, 0) == ReadDecision.READ
    assert window.reserve(A, key(2), 40, 0, 0) == ReadDecision.WAIT  # half of it is for one tenant
    assert window.reserve(B, key(3), 50, 0, 0) == ReadDecision.READ
    assert window.reserve(b"c", key(4), 20, 0, 0) == ReadDecision.WAIT
    assert window.reserve(A, key(5), 101, 0, 0) == ReadDecision.SKIP
    assert window.consume(key(1), 1)
    assert window.reserve(A, key(2), 40, 0, 1) == ReadDecision.READ


def test_a_block_that_was_opened_since_the_lookup_is_not_read_ahead():
    window = PrefetchWindow(100, keep_s=5)
    assert not window.consume(key(1), 3)
    assert window.reserve(A, key(1), 10, 2, 4) == ReadDecision.SKIP
    assert window.reserve(A, key(1), 10, 4, 4) == ReadDecision.READ
    assert window.reserve(B, key(1), 10, 4, 4) == ReadDecision.SKIP  # held already


def test_what_nobody_opens_makes_room_after_a_while():
    window = PrefetchWindow(100, keep_s=5)
    window.reserve(A, key(1), 100, 0, 0)
    assert window.expire(4.9) == 0
    assert window.expire(5) == 1
    assert window.held_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 60), st.booleans()), max_size=80))
def test_never_more_than_the_limit_whatever_happens(steps):
    window = PrefetchWindow(100, keep_s=10)
    held: dict[bytes, tuple[int, int]] = {}
    for now, (tenant, n, size, opens) in enumerate(steps):
        window.expire(now)
        held = {k: v for k, v in held.items() if v[1] > now}
        if opens:
            assert window.consume(key(n), now) == (held.pop(key(n), None) is not None)
        elif window.reserve(bytes([tenant]) * 16, key(n), size, now, now) == ReadDecision.READ:
            held[key(n)] = (size, now + 10)
        assert window.held_bytes == sum(size for size, _ in held.values()) <= 100


class Namer:
    """A tenant whose block id of block n is n."""

    def __init__(self, tag: bytes) -> None:
        self.tag = tag

    def block_key(self, block_id: bytes) -> bytes:
        return key(int.from_bytes(block_id, "little"))


class Drives:
    """Two real drives, a prefetcher over both, and what it read."""

    def __init__(self, directory, limit: int, **kw) -> None:
        limits = quota.CapacityLimits(1 << 30, 85, 75, 1000, 0, 0)
        node = NodeEviction(NodeTable(limits, EvictionConfig()))
        self.drives = [Drive(n, str(directory / n), limits, pool_uid="uid", node=node) for n in ("one", "two")]
        for root in self.drives:
            root.scan()
        self.store = LocalStore(self.drives)
        self.stats = Stats()
        self.read: list[int] = []
        self.numbers = {}
        self.pause = threading.Event()
        self.pause.set()
        self.prefetcher = Prefetcher(self.store, None, limit, self.stats, **{"read": self._note, **kw})
        self.after = LookupEvents([self.prefetcher.enqueue], self.stats)

    def start(self) -> None:
        self.prefetcher.start()
        self.after.start()

    def put(self, *numbers: int) -> None:
        for n in numbers:
            put(self.store, n, SIZE)
            fd = self.store.drive_of(key(n)).peek_fd(key(n))
            self.numbers[os.fstat(fd).st_ino] = n
            os.close(fd)

    def drive_of(self, n: int) -> str:
        return self.store.drive_of(key(n)).name

    def look_up(self, *numbers: int, tenant: bytes = A, tiers: bytes | None = None) -> None:
        given = tiers or bytes([wire.Tier.LOCAL]) * len(numbers)
        self.after.publish(Namer(tenant), block_ids(*numbers), given, [key(n) for n in numbers])

    def promise(self, *numbers: int) -> None:
        self.prefetcher.enqueue(A, [key(n) for n in numbers], bytes([wire.Tier.LOCAL]) * len(numbers), 0.0)

    def counted(self, what: str) -> int:
        return self.stats.whole("prefetch").get(what, 0)

    def _note(self, fd: int, offset: int, size: int) -> None:
        self.pause.wait(10)
        if offset == 0:
            self.read.append(self.numbers[os.fstat(fd).st_ino])


@pytest.fixture
def drives(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "in_memory", lambda fd, size: False)
    made = []

    def make(limit: int = 1 << 30, **kw) -> Drives:
        made.append(Drives(tmp_path, limit, **kw))
        return made[-1]

    yield make
    for one in made:
        one.pause.set()
        one.after.stop()
        one.prefetcher.stop()
        one.store.close()


def test_blocks_are_read_in_the_prompts_order_on_each_drive(drives):
    d = drives()
    d.put(*range(24))
    d.start()
    d.look_up(*range(24))
    wait_for(lambda: len(d.read) == 24, "all read ahead")
    for drive in ("one", "two"):
        there = [n for n in range(24) if d.drive_of(n) == drive]
        assert there, "both drives have some"
        assert [n for n in d.read if n in there] == there


def test_nothing_behind_the_first_miss_is_read(drives):
    d = drives()
    d.put(*range(8))
    d.start()
    d.look_up(*range(8), tiers=bytes([1, 1, 1, 0, 1, 1, 1, 1]))
    d.look_up(7)  # comes last, so all before it is done
    wait_for(lambda: 7 in d.read and len(d.read) == 4, "the promised ones and the last")
    assert sorted(d.read) == [0, 1, 2, 7]


def test_over_the_limit_it_waits_for_the_load(drives):
    d = drives(limit=4 * SIZE)
    d.put(*range(6))
    d.start()
    d.look_up(*range(6))
    wait_for(lambda: len(d.read) == 1, "one fits: half the limit is for one tenant, and a block has a header too")
    d.look_up(5, tenant=B)
    wait_for(lambda: len(d.read) == 2, "room for another tenant")
    assert d.prefetcher.held_bytes <= 4 * SIZE
    first = d.read[0]
    d.prefetcher.consumed([key(first)])
    wait_for(lambda: len(d.read) == 3, "a load makes room")
    assert d.counted("used") == 1


def test_a_lookup_never_waits_however_much_is_queued(drives):
    d = drives()
    d.put(1, 2)
    d.pause.clear()
    d.start()
    for _ in range(500):
        d.look_up(1, 2)
    wait_for(lambda: d.counted("dropped"), "the rest is dropped")
    assert all(len(lane.prompts) <= 64 for lane in d.prefetcher._drive_queues.values())
    assert d.after.queued <= 64


def test_a_slow_drive_is_left_alone(drives):
    now = [0.0]

    def slow(fd: int, offset: int, size: int) -> None:
        now[0] += 0.3
        d.read.append(d.numbers[os.fstat(fd).st_ino])

    d = drives(read=slow, clock=lambda: now[0])
    d.put(*range(16))
    d.promise(*range(16))
    d.prefetcher._serve(d.prefetcher._drive_queues["one"])
    assert len(d.read) == 1
    assert not d.prefetcher._drive_queues["one"].prompts
    assert d.counted("busy") == len([n for n in range(16) if d.drive_of(n) == "one"]) - 1


def test_what_waited_too_long_is_not_read(drives):
    now = [0.0]
    d = drives(clock=lambda: now[0])
    d.put(1)
    d.promise(1)
    now[0] = 3.0
    d.prefetcher._serve(d.prefetcher._drive_queues[d.drive_of(1)])
    assert d.read == []
    assert d.counted("late") == 1


def test_reading_ahead_does_not_count_as_use(drives):
    d = drives()
    d.put(*range(8))
    order = {root.name: list(root._state.policy) for root in d.drives}
    d.start()
    d.look_up(*range(8))
    wait_for(lambda: len(d.read) == 8, "all read ahead")
    assert {root.name: list(root._state.policy) for root in d.drives} == order


# -- with real sidecars


def share_in_memory(file) -> float:
    """Share of the file's pages in the page cache, by mincore(2): it looks without touching."""
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) / len(pages)


def make_cold(files) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if any(share_in_memory(file) == 1.0 for file in files):
        pytest.skip("this file system keeps files in memory (tmpfs): there is nothing to read ahead")


def stored_cold(node, count: int = 6, size: int = 4 * MIB) -> list[bytes]:
    with node.connect() as raw:
        assert set(raw.put({block_id(n): payload(n, size) for n in range(count)})) == {wire.CommitStatus.STORED}
    make_cold(node.files())
    return [block_id(n) for n in range(count)]


def test_after_a_lookup_the_blocks_are_in_memory_before_they_are_loaded(cluster):
    a = cluster(index=False).node("a")
    wanted = stored_cold(a)
    with a.connect() as raw:
        assert raw.lookup(wanted) == [wire.Tier.LOCAL] * 6
        wait_for(lambda: a.status()["prefetch"].get("blocks", 0) == 6, "all read ahead")
        wait_for(lambda: all(share_in_memory(f) == 1.0 for f in a.files()), "all in memory", 60)  # as the drive pleases
        assert raw.get(wanted) == [payload(n, 4 * MIB) for n in range(6)]
    assert a.status()["prefetch"]["used"] == 6
    assert b"kvpool_sidecar_prefetch_blocks_total 6.0" in a.get("/metrics")


def test_blocks_of_the_shared_tier_are_read_ahead_too(cluster):
    c = cluster(shared=True, index=False)
    a, b = c.node("a"), c.node("b")
    with a.connect() as raw:
        raw.put({block_id(n): payload(n) for n in range(4)})
    wait_for(lambda: a.status()["shared"]["copies"].get("copied", 0) == 4, "copied")
    make_cold([f for f in (c.shared / "blocks").rglob("*") if f.is_file()])
    with b.connect() as raw:
        assert raw.lookup([block_id(n) for n in range(4)]) == [wire.Tier.SHARED] * 4
        wait_for(lambda: b.status()["prefetch"].get("blocks", 0) == 4, "all read ahead")
        assert raw.get([block_id(n) for n in range(4)]) == [payload(n) for n in range(4)]


def test_switched_off_nothing_is_read_ahead(cluster):
    a = cluster(index=False).node("a", cache=config.CacheConfig(prefetch_bytes=0))
    wanted = stored_cold(a)
    with a.connect() as raw:
        raw.lookup(wanted)
        assert raw.get(wanted) == [payload(n, 4 * MIB) for n in range(6)]
    assert a.status()["prefetch"] == {}


def test_a_lookup_tells_the_drives_the_order_of_all_its_blocks_found_or_not():
    heard: list[tuple[list[bytes], bytes]] = []
    after = LookupEvents([], Stats(), lambda keys, tenant: heard.append((list(keys), tenant)))
    after.start()
    try:
        after.publish(Namer(A), block_ids(1, 2, 3), bytes([wire.Tier.LOCAL, wire.Tier.MISS, wire.Tier.MISS]), [key(1)])
        after.publish(Namer(A), block_ids(7, 8), bytes([wire.Tier.MISS, wire.Tier.MISS]), [])
        wait_for(lambda: len(heard) == 2, "both lookups are heard of")
    finally:
        after.stop()
    assert heard == [([key(1), key(2), key(3)], A), ([key(7), key(8)], A)]
