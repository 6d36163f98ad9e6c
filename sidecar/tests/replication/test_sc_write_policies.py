"""When a block is copied to the shared tier: by policy, off the engine's path, and never forgotten by a restart."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_nodes import MIB, wait_for
from sc_raw import block_id, payload

from kvpool import config
from kvpool.protocol.wire import CommitStatus, Tier
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.replication.dirty_set import DirtySet, HitCounter
from kvpool_sidecar.replication.write_back import WriteBack
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_testing.blocks import key, put
from kvpool_testing.faulty_store import FaultyStore

SIZE = 100_000


def settings(cluster, policy, *, capacity=512 * MIB, **cache):
    return {
        "local": (config.LocalTier("nvme", str(cluster.directory / "a" / "nvme"), capacity, reserve_free_percent=0),),
        "shared": config.SharedTier("shared", str(cluster.shared)),
        "cache": config.CacheConfig(write_policy=policy, **cache),
    }


def copied(cluster):
    return len([file for file in cluster.shared.rglob("blocks/*/*/*") if file.is_file()])


def store(node, numbers):
    with node.connect() as raw:
        for n in numbers:
            assert raw.put({block_id(n): payload(n, SIZE)}) == [CommitStatus.STORED]


def shared(node):
    return node.status()["shared"]


def read(node, n):
    """Block `n` by an engine of this node: its tier, and that its bytes are right."""
    with node.connect() as raw:
        (entry,) = raw.open([block_id(n)])
        data = raw.read(entry)
    assert data is None or data[4096:] == payload(n, SIZE)
    return entry.tier if data is not None else Tier.MISS


class TestWriteBack:
    def test_blocks_wait_on_their_node_and_a_killed_sidecar_knows_them_again(self, cluster):
        c = cluster(shared=True, index=False)
        node = c.node("a", **settings(c, "WriteBack"))
        store(node, range(20))
        assert (shared(node)["waiting"], shared(node)["dirty_bytes"], copied(c)) == (20, 20 * SIZE, 0)
        node.kill()
        node.start()
        node.ready()
        wait_for(lambda: shared(node)["waiting"] == 20, "the scan found them")
        assert copied(c) == 0
        node.stop(signal.SIGTERM, timeout=30)
        assert copied(c) == 20
        other = c.node("b")
        assert [read(other, n) for n in range(20)] == [Tier.SHARED] * 20

    def test_what_was_copied_is_not_dirty_after_a_restart(self, cluster):
        c = cluster(shared=True, index=False)
        node = c.node("a", **settings(c, "WriteBack"))
        store(node, range(5))
        node.stop(signal.SIGTERM, timeout=30)
        assert copied(c) == 5
        node.start()
        node.ready()
        wait_for(lambda: node.status()["scanned"], "scanned")
        store(node, [9])
        assert (shared(node)["waiting"], read(node, 1)) == (1, Tier.LOCAL)

    def test_no_more_waits_than_the_bound_and_the_oldest_go_first(self, cluster):
        c = cluster(shared=True, index=False)
        node = c.node("a", **settings(c, "WriteBack", write_max_dirty_bytes=5 * SIZE))
        store(node, range(12))
        wait_for(lambda: shared(node)["waiting"] == 5, "all but five were copied")
        assert copied(c) == 7
        node.kill()
        other = c.node("b")
        assert [read(other, n) for n in range(12)] == [Tier.SHARED] * 7 + [Tier.MISS] * 5

    def test_a_block_is_copied_before_it_is_evicted(self, cluster):
        c = cluster(shared=True, index=False)
        node = c.node("a", **settings(c, "WriteBack", capacity=4 * MIB, eviction_policy="FIFO"))
        store(node, range(36))  # 3.6 MB: above the high watermark, and there is room for each
        wait_for(lambda: node.status()["events"].get("evicted", 0) >= 4, "eviction made room")
        gone = [n for n in range(36) if read(node, n) == Tier.SHARED]
        assert len(gone) >= 4
        assert {read(node, n) for n in range(36)} == {Tier.LOCAL, Tier.SHARED}
        assert shared(node)["copies"].get("lost", 0) == 0

    def test_a_flood_is_stored_all_the_same_and_what_is_lost_is_told(self, cluster):
        c = cluster(shared=True, index=False)
        node = c.node("a", **settings(c, "WriteBack", capacity=2 * MIB, eviction_policy="FIFO"))
        store(node, range(200))
        there = [read(node, n) for n in range(200)]
        wait_for(
            lambda: there.count(Tier.MISS) <= shared(node)["copies"].get("lost", 0) <= 200, "who is missing was counted"
        )
        assert there[-1] == Tier.LOCAL


class TestSelective:
    def test_only_what_comes_back_is_copied(self, cluster):
        c = cluster(shared=True)
        node = c.node("a", **settings(c, "WriteThroughSelective", write_min_hits=2))
        other = c.node("b")
        store(node, range(6))
        node.wait_announced()
        assert read(node, 1) == Tier.LOCAL
        assert read(node, 2) == read(node, 2) == Tier.LOCAL
        assert wait_for(lambda: read(other, 3) == Tier.PEER, "a peer reads it")
        assert read(node, 3) == Tier.LOCAL
        wait_for(lambda: copied(c) == 2, "two blocks were used twice")
        node.kill()
        assert [read(other, n) for n in (2, 3)] == [Tier.SHARED] * 2
        assert copied(c) == 2


def test_write_through_goes_on_after_a_restart_where_it_was_when_it_was_killed(cluster):
    c = cluster(shared=True, index=False)
    node = c.node("a", **settings(c, "WriteBack"))
    store(node, range(8))
    node.kill()
    node.pool = config.PoolConfig(**{**vars(node.pool), "cache": config.CacheConfig(write_policy="WriteThrough")})
    node.write_config()
    node.start()
    node.ready()
    wait_for(lambda: copied(c) == 8, "what the scan found is copied")


class Setup:
    def __init__(self, **policy):
        self.local = MemoryStore(1 << 28)
        self.far = FaultyStore(MemoryStore(1 << 28))
        self.shared = SharedTier(self.far, cooldown_s=0.1)
        self.stats = Stats()
        self.copier = WriteBack(self.local, self.shared, self.stats, **policy)

    def store(self, *numbers):
        for n in numbers:
            put(self.local, n)
            self.copier.enqueue(key(n), 20_000)

    def far_has(self, *numbers):
        return [self.far.inner.contains(key(n)) for n in numbers]


@pytest.fixture
def setup():
    made = []

    def make(**policy):
        made.append(Setup(**policy))
        return made[-1]

    yield make
    for one in made:
        one.copier.stop()


def test_a_copy_that_fails_is_tried_again(setup):
    one = setup(policy="WriteThrough")
    one.far.fail("create", 1, OSError(5, "Input/output error"))
    one.copier.start()
    one.store(1)
    wait_for(lambda: one.far_has(1) == [True], "copied at the second attempt")
    wait_for(lambda: one.copier.waiting == 0, "it is dirty no more")
    assert one.stats.whole("copies") == {"failed": 1, "copied": 1}


def test_a_copy_that_always_fails_is_given_up_and_keeps_nobody(setup):
    one = setup(policy="WriteThrough")
    for n in range(1, 6):
        one.far.fail("create", n, OSError(5, "Input/output error"))
    one.store(1)
    one.copier.start()
    wait_for(lambda: one.stats.whole("copies").get("given-up") == 1, "given up", timeout=30)
    one.store(2)
    wait_for(lambda: one.far_has(1, 2) == [False, True], "the next is copied")
    assert (one.copier.waiting, one.copier.dirty_bytes) == (0, 0)


def test_what_is_to_be_evicted_is_copied_though_nothing_else_is_due(setup):
    one = setup(policy="WriteBack", max_dirty=1 << 20)
    one.copier.start()
    one.store(1, 2, 3)
    assert one.copier.dirty([key(2), key(9)]) == {key(2)}
    one.copier.expedite([key(2)])
    wait_for(lambda: one.copier.waiting == 2, "it is copied")
    assert one.far_has(1, 2, 3) == [False, True, False]


def test_a_flush_ends_with_its_time_when_the_shared_tier_hangs(setup):
    one = setup(policy="WriteBack", max_dirty=1 << 20)
    gate = one.far.hang("create")
    one.copier.start()
    one.store(1)
    one.copier.flush(0.2)
    assert one.copier.waiting == 1
    gate.set()
    wait_for(lambda: one.copier.waiting == 0, "it goes on")


def test_hits_count_the_blocks_used_last():
    hits = HitCounter(2, max_counted=2)
    assert hits.record([key(1)]) == []
    assert hits.record([key(1), key(2)]) == [key(1)]
    assert hits.record([key(1)]) == []
    assert hits.record([key(3), key(4)]) == []
    assert hits.record([key(2)]) == []  # forgotten meanwhile


@given(st.lists(st.tuples(st.sampled_from("atdrgh"), st.integers(0, 9), st.integers(1, 50)), max_size=60))
def test_dirty_blocks_add_up_whatever_happens_to_them(steps):
    dirty = DirtySet(100, max_blocks=6)
    waiting: dict[bytes, int] = {}
    going: dict[bytes, int] = {}
    urgent: set[bytes] = set()
    for what, n, size in steps:
        one = key(n)
        if what == "a":
            known = one in waiting or one in going
            room = len(waiting) + len(going) < 6
            assert dirty.add(one, size) == (known or room)
            if not known and room:
                waiting[one] = size
        elif what == "t":
            due = bool(urgent) or sum(waiting.values()) > 100
            taken = dirty.pop(0.0)
            assert (taken is not None) == bool(due)
            if taken is not None:
                assert taken in urgent if urgent else taken == next(iter(waiting))
                urgent.discard(taken)
                going[taken] = waiting.pop(taken)
        elif what == "d":
            dirty.done(one)
            going.pop(one, None)
        elif what == "r" and one in going:
            if dirty.retry(one):
                waiting[one] = going.pop(one)
            else:
                del going[one]
        elif what == "g":
            assert dirty.discard([one]) == (one in waiting or one in going)
            waiting.pop(one, None)
            going.pop(one, None)
            urgent.discard(one)
        elif what == "h":
            dirty.expedite([one])
            urgent.update({one} & waiting.keys())
        assert len(dirty) == len(waiting) + len(going)
        assert dirty.total_bytes == sum(waiting.values()) + sum(going.values())
        assert dirty.intersection([key(n) for n in range(10)]) == waiting.keys() | going.keys()
