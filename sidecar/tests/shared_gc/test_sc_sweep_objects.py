"""Housekeeping of an object store: a directory behind fsspec, whose times can be set, and a real S3-speaking server."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest
from sc_nodes import wait_for
from sc_raw import block_id, payload
from sc_s3 import S3Server, s3_bucket

from kvpool import config
from kvpool.protocol import block
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.shared_gc import object_lease
from kvpool_sidecar.shared_gc.collection import LeaseLostError
from kvpool_sidecar.shared_gc.controller import create_controller
from kvpool_sidecar.shared_gc.loop import CollectorSettings, Schedule
from kvpool_sidecar.shared_gc.object_collector import ObjectCollector
from kvpool_sidecar.shared_gc.object_lease import ObjectLease
from kvpool_sidecar.shared_gc.plan import CollectionLimits
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageReport
from kvpool_sidecar.storage.buckets.base import ObjectInfo
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.tenancy.mapping import Tenancy
from kvpool_testing.blocks import key, put, read

SIZE = 20_000
FILE = SIZE + block.HEADER_BYTES
HOUR = 3600.0
FAST = Schedule(lease_s=30.0, every_s=1e9, entries_per_s=1e9)
_fresh = itertools.count(1)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "s3.log").start()
    server.make_bucket("kvpool")
    yield server
    server.stop()


class Pool:
    """One pool's objects in a directory."""

    def __init__(self, directory, uid="uid-1"):
        self.directory = directory / uid
        self.url = f"file://{directory}"
        self.uid = uid
        self.stats = Stats()
        self.swept = []
        self.stores = []
        self.store = self.open()

    def open(self):
        self.stores.append(ObjectStore(FsspecBucket(self.url), ObjectStoreSettings(self.uid, 1 << 20)))
        return self.stores[-1]

    def sweeper(self, store=None, timing=FAST, **kw):
        limits = CollectionLimits(**{k: kw.pop(k) for k in list(kw) if k in CollectionLimits._fields})
        return ObjectCollector(
            limits, store or self.store, self.stats, CollectorSettings(schedule=timing, removed=self.swept.append, **kw)
        )  # fmt: skip

    def put(self, n, idle=0.0):
        put(self.store, n)
        os.utime(self.file(n), (time.time() - idle,) * 2)

    def file(self, n):
        return self.directory / "blocks" / key(n).hex()[:2] / key(n).hex()

    def left(self, numbers):
        return [n for n in numbers if self.store.contains(key(n))]

    def notes(self):
        return sorted(os.listdir(self.directory / "sweep"))

    def age_notes(self, age):
        for name in self.notes():
            os.utime(self.directory / "sweep" / name, (time.time() - age,) * 2)


@pytest.fixture
def pool(tmp_path):
    one = Pool(tmp_path)
    yield one
    for store in one.stores:
        store.close()


def test_capacity_holds_and_the_oldest_go(pool):
    for n in range(20):
        pool.put(n, idle=n * HOUR)
    sweeper = pool.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    sweeper.step()
    assert pool.left(range(20)) == list(range(10))
    assert sorted(pool.swept) == sorted(key(n) for n in range(10, 20))
    assert pool.stats.whole("swept") == {"capacity": 10}
    status = sweeper.status()
    assert (status["holder"], status["used_bytes"], status["blocks"]) == (True, 10 * FILE, 10)
    assert pool.store.usage().used_bytes == 10 * FILE


def test_idle_and_age_and_a_touch(pool):
    for n in range(4):
        pool.put(n, idle=5 * HOUR)
    assert pool.store.touch(key(0), 0.0)
    assert not pool.store.touch(key(99), 0.0)
    pool.sweeper(idle_s=4 * HOUR, grace_s=2 * HOUR).step()
    assert pool.left(range(4)) == list(range(4))
    sweeper = pool.sweeper(idle_s=4 * HOUR, timing=FAST._replace(every_s=0.0))
    pool.age_notes(31)
    sweeper.step()
    assert pool.left(range(4)) == [0]
    assert pool.stats.whole("swept") == {"idle": 3}
    pool.put(5, idle=5 * HOUR)
    pool.file(0).touch()
    sweeper._limits = CollectionLimits(max_age_s=4 * HOUR)
    sweeper._not_before, sweeper._report = 0.0, UsageReport()
    sweeper.step()
    assert pool.stats.whole("swept") == {"idle": 3, "age": 1}


def test_what_is_stored_between_two_counts_is_told_by_each_sidecar(pool):
    other = pool.open()
    one = pool.sweeper(store=other, capacity=20 * FILE, high_percent=80, low_percent=50)
    two = pool.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    one.step()
    for n in range(17):
        pool.put(n, idle=n * HOUR)
    two.step()
    assert not two.status()["holder"]
    one._not_before = 0.0
    one.step()
    assert pool.left(range(99)) == list(range(10))
    two.step()
    assert pool.store.usage().used_bytes == 10 * FILE
    assert two.status()["blocks"] == 10


def test_other_objects_and_other_pools_stay(tmp_path):
    one, two = Pool(tmp_path, "uid-1"), Pool(tmp_path, "uid-2")
    for n in range(3):
        one.put(n, idle=HOUR)
        two.put(n, idle=HOUR)
    strange = [
        one.directory / "blocks" / "ab" / "readme",
        one.directory / "blocks" / "ab" / ("cd" + "0" * 62),
        one.directory / "sweep" / "mine",
        tmp_path / "mine",
    ]
    for file in strange:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(b"x" * 9000)
        os.utime(file, (1, 1))
    one.sweeper(capacity=1, idle_s=1.0).step()
    assert one.left(range(3)) == []
    assert two.left(range(3)) == [0, 1, 2]
    assert all(file.exists() for file in strange)
    for pool in (one, two):
        pool.store.close()


def test_the_lease_of_a_sweeper_that_is_gone_is_taken_and_the_former_holder_notices(pool):
    for n in range(100):
        pool.put(n, idle=HOUR)
    one = pool.sweeper(idle_s=1.0)
    two = pool.sweeper(store=pool.open())

    def overtaken(_key):
        pool.swept.append(_key)
        if len(pool.swept) == 10:  # `one` is stopped here for longer than the lease
            pool.age_notes(31)
            two.step()
            assert two.status()["holder"]
            one._lease._asked_at -= 31

    one._removed = overtaken
    one.step()
    assert len(pool.swept) == 32  # the batch that was under way
    assert len(pool.left(range(100))) == 68
    assert not one.status()["holder"]
    one.step()
    assert len(pool.swept) == 32
    assert two.status()["term"] == 2
    two.resign()
    one.step()
    assert one.status()["term"] == 3  # at once


def test_a_former_holder_that_takes_its_next_turn_sees_the_higher_term(pool):
    one, two = pool.sweeper(), pool.sweeper(store=pool.open())
    pool.put(1)
    one.step()
    pool.age_notes(31)
    two.step()
    one.step()
    assert not one.status()["holder"]
    assert two.status()["term"] == 2


def test_notes_do_not_heap_up_and_those_of_dead_sidecars_go(pool):
    sweepers = [pool.sweeper(store=pool.open()) for _ in range(3)]
    for _ in range(4):
        for sweeper in sweepers:
            sweeper.step()
    names = pool.notes()
    assert len([name for name in names if name.startswith("beat-")]) == 3
    assert len([name for name in names if name.startswith("term-")]) == 1
    assert len([name for name in names if name.startswith("count-")]) == 1
    dead = next(name for name in names if name.startswith(f"beat-{sweepers[2]._owner}"))
    os.utime(pool.directory / "sweep" / dead, (time.time() - 7200,) * 2)
    sweepers[0].step()
    assert dead not in pool.notes()


def test_a_store_that_does_not_tell_times_is_not_swept(pool, monkeypatch):
    pool.put(1, idle=HOUR)
    true = FsspecBucket.list
    monkeypatch.setattr(FsspecBucket, "list", lambda self, f: (ObjectInfo(o.name, o.size, None) for o in true(self, f)))
    sweeper = pool.sweeper(idle_s=1.0)
    sweeper._attempt(sweeper.step)
    assert "does not report" in sweeper.status()["problem"]
    assert pool.left([1]) == [1]


def test_too_many_notes_are_told_and_cost_no_memory(pool, monkeypatch):
    monkeypatch.setattr(object_lease, "_MOST_OBJECTS", 5)
    pool.store.contains(key(1))
    (pool.directory / "sweep").mkdir()
    for n in range(9):
        (pool.directory / "sweep" / f"junk{n}").touch()
    sweeper = pool.sweeper()
    sweeper._attempt(sweeper.step)
    assert "too many notes" in sweeper.status()["problem"]


# -- S3


@pytest.fixture
def far(s3):
    return s3_bucket(s3.url, f"s3://kvpool/sweep-{next(_fresh)}")


def test_on_s3_of_many_that_try_for_a_term_exactly_one_has_it(far):
    leases = [ObjectLease(os.urandom(8).hex(), 30.0) for _ in range(6)]
    start = threading.Barrier(6)
    held = []

    def contend(lease):
        view = lease.heartbeat(far, "p/sweep", StoredUsage())
        start.wait()
        held.append(lease.hold(far, "p/sweep", view))

    threads = [threading.Thread(target=contend, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(held) == 1
    holder = leases[[lease.term for lease in leases].index(1)]
    assert holder.hold(far, "p/sweep", holder.heartbeat(far, "p/sweep", StoredUsage()))
    holder.release(far, "p/sweep")
    other = next(lease for lease in leases if lease is not holder)
    assert other.hold(far, "p/sweep", other.heartbeat(far, "p/sweep", StoredUsage()))
    assert other.term == 2
    assert not holder.hold(far, "p/sweep", holder.heartbeat(far, "p/sweep", StoredUsage()))
    far.close()


def test_on_s3_a_touch_makes_a_block_young_and_changes_none_of_its_bytes(far):
    store = ObjectStore(far, ObjectStoreSettings("uid-1", 1 << 20))
    put(store, 1)

    def stored_at():
        ((_, size, at),) = far.list(f"uid-1/blocks/{key(1).hex()[:2]}")
        assert size == FILE
        return at

    before = stored_at()
    wait_for(lambda: store.touch(key(1), 0.0) and stored_at() > before, "the store stamps it anew")
    assert read(store, 1) is not None
    assert not store.touch(key(2), 0.0)
    store.close()


def test_sidecars_keep_a_bucket_within_its_capacity_and_replace_the_one_that_sweeps(cluster, tmp_path):
    c = cluster(index=False)
    size = 16 * 1024
    file = size + block.HEADER_BYTES
    far = config.FsspecTier(
        "far", f"file://{tmp_path}/far", capacity_bytes=20 * file, sweep_lease_s=1, sweep_every_s=1
    )  # fmt: skip
    a, b = c.node("a", fsspec=far), c.node("b", fsspec=far)

    def sweep(node):
        return node.status()["shared"]["sweep"]

    def store(node, numbers):
        with node.connect() as raw:
            raw.put({block_id(n): payload(n, size) for n in numbers})

    holder = wait_for(lambda: next((n for n in (a, b) if sweep(n)["holder"]), None), "one sweeps", timeout=60)
    other = b if holder is a else a
    store(holder, range(9))
    store(other, range(9, 18))
    wait_for(lambda: sweep(holder)["removed"].get("capacity", 0) >= 1, "room is made", timeout=60)
    wait_for(lambda: sweep(holder)["used_bytes"] <= 0.85 * 20 * file, "the capacity holds")
    wait_for(lambda: 0 < sweep(other)["used_bytes"] <= 0.85 * 20 * file, "the other one is told")
    assert sweep(other)["removed"] == {}
    wait_for(lambda: sweep(other)["blocks"] >= 5, "not all went")
    holder.kill()
    wait_for(lambda: sweep(other)["holder"], "the other one has taken over", timeout=60)
    numbers = itertools.count(20)

    def makes_room():
        store(other, [next(numbers)])
        return sweep(other)["removed"].get("capacity", 0) >= 1

    wait_for(makes_room, "it makes room", timeout=60)


@pytest.mark.parametrize(
    ("url", "max_age", "idle"), [("s3://b/p", 0, 8), ("s3://b/p", 9, 0), ("gs://b/p", 0, 0), ("file:///p", 0, 8)]
)
def test_idle_counts_only_where_uses_can_be_noted(pool, url, max_age, idle):
    made = config.PoolConfig(
        pool="p", namespace="n", uid="uid-1", local=(config.LocalTier("l", "/x", 1),), index=config.IndexConfig(""),
        fsspec=config.FsspecTier("far", url, capacity_bytes=7),
        cache=config.CacheConfig(idle_ttl_s=8, max_age_s=max_age, tenant_quota_bytes=5),
    )  # fmt: skip
    tenancy = Tenancy(b"a secret of this test", made)
    keeper = create_controller(made, tenancy, "a", SharedTier(pool.store), Stats(), list)
    assert keeper.collector._limits == CollectionLimits(7, 85, 75, 0, idle, max_age)
    touched = []
    pool.store.touch = lambda key, every_s: touched.append(key) or True
    assert keeper.access_times._touch(b"k", 1.0) is bool(idle)
    assert touched == ([b"k"] if idle else [])


def test_a_lease_that_was_lost_is_no_error_of_the_store():
    assert not issubclass(LeaseLostError, OSError)
