"""Housekeeping of a shared directory: what goes, what stays, and who may. Real directories, no processes."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import replace

import pytest
from sc_nodes import wait_for

from kvpool.errors import ConfigError
from kvpool.protocol import block
from kvpool_sidecar.blocks.events import SharedBlockOpened
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.shared_gc import collection as sweep
from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.shared_gc.access_times import AccessTimes
from kvpool_sidecar.shared_gc.age_histogram import AgeHistogram
from kvpool_sidecar.shared_gc.collection import CollectionStoppedError, EntryRateLimiter, LeaseLostError
from kvpool_sidecar.shared_gc.file_lease import Lease
from kvpool_sidecar.shared_gc.filesystem_collector import FilesystemCollector, Schedule
from kvpool_sidecar.shared_gc.loop import CollectorSettings
from kvpool_sidecar.shared_gc.metadata import TierMetadata
from kvpool_sidecar.shared_gc.plan import CollectionLimits, Group, Inventory, Model, level, make_plan, superseded
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageEstimator, UsageReport
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.system import safe_open as safefs
from kvpool_testing.blocks import TAG, header, key, payload, put, read, write

SIZE = 20_000
FILE = SIZE + block.HEADER_BYTES
HOUR = 3600.0
DAY = 24 * HOUR
FAST = Schedule(lease_s=30.0, every_s=1e9, entries_per_s=1e9)


class Shared:
    """A pool's shared directory and the sidecars that use it, without threads."""

    def __init__(self, path, uid="pool-uid"):
        self.path = path
        self.uid = uid
        path.mkdir()
        self.store = FilesystemStore(str(path), pool_uid=uid)
        self.stats = Stats()
        self.swept = []
        self.stores = [self.store]

    def claim(self):
        """As the first use does."""
        self.store.contains(key(0))

    def sweeper(self, *, timing=FAST, own_store=False, models=tuple, **kw):
        limits = CollectionLimits(**{k: kw.pop(k) for k in list(kw) if k in CollectionLimits._fields})
        store = FilesystemStore(str(self.path), pool_uid=self.uid) if own_store else self.store
        self.stores.append(store)
        return FilesystemCollector(
            str(self.path),
            self.uid,
            limits,
            store,
            self.stats,
            CollectorSettings(schedule=timing, removed=self.swept.append, **kw),
            models,
        )

    def put(self, n, *, idle=0.0, made=None, tenant=TAG, fingerprint=b"f" * 32):
        data = payload(n, SIZE)
        head = replace(header(n, data), tenant_tag=tenant, fingerprint=fingerprint)
        head = replace(head, created_ms=int((time.time() - (idle if made is None else made)) * 1000))
        pending = self.store.begin(key(n), SIZE)
        write(pending, head, data)
        pending.commit()
        self.age(n, idle)

    def age(self, n, idle):
        os.utime(self.file(n), (time.time() - idle,) * 2)

    def file(self, n):
        name = key(n).hex()
        return self.path / "blocks" / name[:2] / name[2:4] / name

    def left(self, numbers):
        return [n for n in numbers if self.store.contains(key(n))]


def again(sweeper):
    """It is time for the next sweep."""
    sweeper._not_before, sweeper._report = 0.0, UsageReport()
    sweeper.step()


@pytest.fixture
def shared(tmp_path):
    one = Shared(tmp_path / "shared")
    yield one
    for store in one.stores:
        store.close()


# -- the lease


@pytest.fixture
def leases(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)

    class Leases:
        now = time.time()
        folder = fd
        path = tmp_path

        def make(self, **kw):
            return Lease(30.0, **kw)

        def hold(self, lease, later=0.0):
            return lease.hold(fd, time.time() + later)

        def stamp(self, age):
            for name in os.listdir(tmp_path):
                os.utime(tmp_path / name, (time.time() - age,) * 2)

    yield Leases()
    os.close(fd)


def test_one_of_two_has_the_lease_and_keeps_it(leases):
    one, two = leases.make(), leases.make()
    assert leases.hold(one)
    assert not leases.hold(two)
    leases.stamp(25)
    assert leases.hold(one)  # renewed
    leases.stamp(0)
    assert not leases.hold(two, later=20)
    assert one.held
    assert not two.held


def test_a_lease_that_ran_out_is_taken_by_exactly_one_and_the_former_holder_notices(leases):
    one, others = leases.make(), [leases.make() for _ in range(8)]
    assert leases.hold(one)
    leases.stamp(31)
    start = threading.Barrier(8)

    def contend(lease):
        start.wait()
        leases.hold(lease)

    threads = [threading.Thread(target=contend, args=(lease,)) for lease in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease.held for lease in others) == 1
    assert max(lease.term for lease in others) == 2
    assert not leases.hold(one)
    assert os.listdir(leases.path) == ["term-000000000002"]


def test_whoever_was_stopped_asks_before_the_next_removal(leases):
    clock = [0.0]
    one, two = leases.make(clock=lambda: clock[0]), leases.make()
    assert leases.hold(one)
    assert one.still_held(leases.folder)
    leases.stamp(31)  # one is stopped for that long
    assert leases.hold(two)
    clock[0] += 31
    assert not one.still_held(leases.folder)
    assert not one.still_held(leases.folder)
    assert two.still_held(leases.folder)


def test_even_without_a_pause_the_lease_is_asked_for_after_a_few_removals(leases):
    one, two = leases.make(clock=lambda: 0.0, trust_count=32), leases.make()
    assert leases.hold(one)
    leases.stamp(31)
    assert leases.hold(two)
    assert sum(one.still_held(leases.folder) for _ in range(100)) == 32


def test_a_new_holder_that_was_killed_before_it_tidied_up_is_noticed_all_the_same(leases):
    one = leases.make(trust_count=0)
    assert leases.hold(one)
    (leases.path / "term-000000000002").write_bytes(b"another")
    assert not one.still_held(leases.folder)
    assert not leases.hold(one)


def test_a_holder_whose_file_went_although_no_other_came_stops(leases):
    one = leases.make()
    assert leases.hold(one)
    os.unlink(leases.path / "term-000000000001")
    two = leases.make()
    assert leases.hold(two)  # terms began anew: the name is that of `one`, the file is not
    assert not leases.hold(one)
    assert two.still_held(leases.folder)


def test_clocks_of_nodes_do_not_matter_and_a_mount_set_back_does_not_block_for_ever(leases):
    one, two = leases.make(clock=lambda: 1e9), leases.make(clock=lambda: -1e9)
    assert leases.hold(one)
    assert not leases.hold(two)
    os.utime(leases.path / "term-000000000001", (time.time() + 7200,) * 2)
    assert leases.hold(two)


def test_a_lease_that_was_given_back_is_free_at_once_and_terms_go_on(leases):
    one, two = leases.make(), leases.make()
    assert leases.hold(one)
    one.release(leases.folder)
    assert not one.held
    assert leases.hold(two)
    assert two.term == 2


def test_one_that_saw_an_old_list_of_terms_withdraws(leases, monkeypatch):
    one, late = leases.make(), leases.make()
    for _ in range(3):
        assert leases.hold(one)
        one.release(leases.folder)
    assert leases.hold(one)  # term 4
    from kvpool_sidecar.shared_gc import file_lease as module

    true, calls = module._terms, []

    def cached(fd):
        calls.append(fd)
        return [] if len(calls) == 1 else true(fd)

    monkeypatch.setattr(module, "_terms", cached)
    assert not leases.hold(late)
    assert os.listdir(leases.path) == ["term-000000000004"]
    assert one.still_held(leases.folder)


# -- decisions


def census_of(*groups):
    """(group, [(age, size), ...], first_s) each."""
    census = Inventory()
    for group, blocks, first in groups:
        for age, size in blocks:
            census.add(size, age)
            census.attribute(group, size, age, first)
    return census


def taken(plan, census_groups):
    gone = {}
    for group, blocks, _ in census_groups:
        for age, size in blocks:
            reason = plan.reason(group, size, age)
            if reason:
                gone[reason] = gone.get(reason, 0) + size
    return gone


def test_a_cut_takes_the_oldest_and_no_more_than_one_block_too_many():
    rng = random.Random(7)
    for _ in range(50):
        blocks = [(rng.expovariate(1 / DAY), rng.randrange(1, 1000)) for _ in range(200)]
        ages = AgeHistogram()
        for age, size in blocks:
            ages.add(age, size)
        need = rng.randrange(1, ages.total)
        cut = ages.cutoff(need)
        gone = [(age, size) for age, size in blocks if cut.selects(age, size)]
        assert need <= sum(size for _, size in gone) < need + 1000
        kept = [age for age, size in blocks if (age, size) not in gone]
        assert min(age for age, _ in gone) >= max(kept, default=0) * 0.85


def test_nothing_goes_below_the_high_watermark_and_above_it_down_to_the_low():
    limits = CollectionLimits(capacity=1000, high_percent=80, low_percent=60)
    groups = [(Group(b"a", b"f"), [(n * 100.0, 10) for n in range(80)], 0)]
    census = census_of(*groups)
    assert not make_plan(census, limits, [])
    plan = make_plan(census, limits, [], concurrent_writes=10)
    assert 210 <= taken(plan, groups)["capacity"] < 230
    assert not make_plan(census, CollectionLimits(), [], concurrent_writes=10**9)


def test_superseded_fingerprints_go_first_and_only_as_far_as_space_is_needed():
    limits = CollectionLimits(capacity=1000, high_percent=80, low_percent=60)
    old, new = Group(b"a", b"old"), Group(b"a", b"new")
    models = {b"old": Model("m", 8 * DAY), b"new": Model("m", 0)}
    fresh = [(30 * DAY, 10)] * 50 + [(0.0, 10)]
    for count, expected in (
        (20, {}),
        (40, {"superseded": 310}),
        (10, {}),
    ):
        groups = [(old, [(8 * DAY, 10)] * count, 90 * DAY), (new, fresh, 60 * DAY)]
        census = census_of(*groups)
        found = superseded(census, models, 7 * DAY)
        assert found == [old]
        assert taken(make_plan(census, limits, found), groups) == expected
    groups = [(old, [(8 * DAY, 10)] * 20, 90 * DAY), (new, [(1.0, 10)] * 100, 60 * DAY)]
    census = census_of(*groups)
    gone = taken(make_plan(census, limits, superseded(census, models, 7 * DAY)), groups)
    assert gone == {"superseded": 200, "capacity": 400}


@pytest.mark.parametrize(
    "what",
    [
        {"idle": 6 * DAY},  # used within the week
        {"model_idle": HOUR},  # an engine named it within the week
        {"tenant": b"b"},  # the younger one is of another tenant
        {"first": 30 * DAY},  # the other one is older
        {"newer_idle": 8 * DAY},  # the other one is not in use either
        {"model": "another"},
        {"unknown": True},
    ],
)
def test_a_fingerprint_is_superseded_only_if(what):
    old, new = Group(b"a", b"old"), Group(what.get("tenant", b"a"), b"new")
    census = census_of(
        (old, [(what.get("idle", 8 * DAY), 10)], what.get("first", 90 * DAY)),
        (new, [(what.get("newer_idle", 0.0), 10)], 60 * DAY),
    )
    models = {b"new": Model("m", 0)}
    if not what.get("unknown"):
        models[b"old"] = Model(what.get("model", "m"), what.get("model_idle", 8 * DAY))
    assert superseded(census, models, 7 * DAY) == []
    models[b"old"] = Model("m", 8 * DAY)
    if set(what) <= {"model", "model_idle", "unknown"}:
        assert superseded(census, models, 7 * DAY) == [old]


def test_the_largest_come_down_to_one_level():
    assert level({b"a": 100, b"b": 50, b"c": 10}, 50) == {b"a": 50}
    assert level({b"a": 100, b"b": 50, b"c": 10}, 90) == {b"a": 70, b"b": 20}
    assert sum(level({b"a": 100, b"b": 50, b"c": 10}, 151).values()) == 151
    assert level({b"a": 5, b"b": 5}, 100) == {b"a": 5, b"b": 5}


def test_a_tenant_over_its_quota_pays_alone_and_a_full_tier_is_paid_by_who_takes_most():
    a, b, c = (Group(t, b"f") for t in (b"a", b"b", b"c"))
    groups = [(a, [(5.0, 10)] * 70, 0), (b, [(900.0, 10)] * 30, 0), (c, [(900.0, 10)] * 5, 0)]
    census = census_of(*groups)
    limits = CollectionLimits(capacity=10_000, high_percent=80, low_percent=60, tenant_bytes=400)
    plan = make_plan(census, limits, [])
    assert taken(plan, groups) == {"quota": 400}
    assert set(plan.quota) == {b"a"}
    limits = CollectionLimits(capacity=1000, high_percent=80, low_percent=60, tenant_bytes=690)
    plan = make_plan(census, limits, [])
    assert set(plan.tenants) | set(plan.quota) == {b"a", b"b"}
    assert 450 <= sum(taken(plan, groups).values()) < 470
    assert not any(plan.reason(c, 10, 900.0) for _ in range(5))


@pytest.mark.parametrize("quota", [0, 900])
def test_whatever_lies_there_a_plan_makes_room_and_no_more_than_that(quota):
    rng = random.Random(11)
    planned = 0
    for _ in range(300):
        groups = []
        for n in range(rng.randrange(1, 7)):
            ages = [(rng.expovariate(1 / DAY), rng.randrange(1, 20)) for _ in range(rng.randrange(1, 80))]
            groups.append((Group(bytes([n % 3 + 1]), bytes([n])), ages, rng.random() * 90 * DAY))
        census = census_of(*groups)
        limits = CollectionLimits(rng.randrange(100, 5000), 80, 60, quota)
        old = [group for group, *_ in groups if rng.random() < 0.3]
        plan = make_plan(census, limits, old)
        total = census.bytes
        by_tenant = census.tenants()
        over = {t: size - quota * 60 // 80 for t, size in by_tenant.items() if quota and size > quota}
        need = max(sum(over.values()), total - limits.low if total > limits.high else 0)
        left = dict(by_tenant)
        gone = 0
        for group, blocks, _ in groups:
            for age, size in blocks:
                if plan.reason(group, size, age):
                    gone += size
                    left[group.tenant] -= size
        assert bool(plan) == (need > 0)
        assert need <= gone <= need + 20 * 12  # a block too many for each cut
        assert all(left[tenant] <= quota * 60 // 80 for tenant in over)
        planned += need > 0
    assert planned > 50


def test_the_census_is_bounded_whatever_the_headers_say():
    census = Inventory()
    for n in range(5000):
        census.add(10, 1.0)
        census.attribute(Group(n.to_bytes(16, "big"), b"f"), 10, 1.0, 1.0)
    assert len(census.groups) <= 1025
    assert sum(census.tenants().values()) == 50_000


def test_the_ledger_follows_what_the_sidecars_tell_also_of_one_that_left():
    ledger = UsageEstimator()
    ledger.reset(StoredUsage(1000, 10), {"a": StoredUsage(500, 5)})
    ledger.update({"a": StoredUsage(700, 7), "b": StoredUsage(50, 1)})
    assert ledger.used() == StoredUsage(1250, 13)
    ledger.update({"a": StoredUsage(800, 8)})
    assert ledger.used() == StoredUsage(1350, 14)
    ledger.subtract(100)
    assert ledger.used() == StoredUsage(1250, 13)
    marks = {"a": StoredUsage(600, 6), "b": StoredUsage(50, 1)}
    assert ledger.seen_during_walk(marks) == StoredUsage(100, 1)
    ledger.reset(StoredUsage(2000, 20), marks, StoredUsage(100, 1))
    ledger.update({"a": StoredUsage(800, 8)})
    assert ledger.used() == StoredUsage(2100, 21)
    assert UsageReport.from_json(
        UsageReport(1.0, 2.0, StoredUsage(3, 4), {"aa": 5}, {"b": StoredUsage(6, 7)}, "n").to_json()
    ) == UsageReport(1.0, 2.0, StoredUsage(3, 4), {"aa": 5}, {"b": StoredUsage(6, 7)}, "n")


@pytest.mark.parametrize("value", [{}, {"finished": "x"}, {"finished": 1, "seconds": 1, "used": 3}, {"tenants": []}])
def test_a_summary_that_makes_no_sense_is_none(value):
    assert UsageReport.from_json(value) == UsageReport()


# -- what goes


def test_capacity_holds_and_the_least_recently_used_go(shared):
    for n in range(20):
        shared.put(n, idle=n * HOUR)
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    sweeper.step()
    assert shared.left(range(20)) == list(range(10))
    assert sorted(shared.swept) == sorted(key(n) for n in range(10, 20))
    assert shared.stats.whole("swept") == {"capacity": 10}
    assert shared.stats.whole("swept_bytes") == {"capacity": 10 * FILE}
    status = sweeper.status()
    assert (status["used_bytes"], status["blocks"], status["holder"]) == (10 * FILE, 10, True)
    assert status["tenants"] == {TAG.hex(): 10 * FILE}
    assert [read(shared.store, n) for n in range(10)] == [payload(n) for n in range(10)]


def test_a_sweep_that_takes_long_takes_no_more_for_it(shared, monkeypatch):
    """Between the walks all blocks grow older."""
    for n in range(20):
        shared.put(n, idle=n * 2.0)
    true, later = sweep.make_plan, []

    def slow_plan(*args, **kw):
        later.append(1000.0)
        return true(*args, **kw)

    monkeypatch.setattr(sweep, "make_plan", slow_plan)
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    monkeypatch.setattr(sweeper, "_now", lambda: time.time() + sum(later))
    sweeper.step()
    assert shared.left(range(20)) == list(range(10))


def test_what_was_stored_since_the_count_makes_the_holder_sweep_again(shared):
    shared.claim()
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    sweeper.step()
    for n in range(16):
        shared.put(n, idle=n * HOUR)
    sweeper.step()
    assert len(shared.left(range(99))) == 16
    shared.put(16, idle=16 * HOUR)
    sweeper._not_before = 0.0
    sweeper.step()
    assert shared.left(range(99)) == list(range(10))


def test_what_another_sidecar_stored_counts_too(shared):
    shared.claim()
    one = shared.sweeper(own_store=True, capacity=20 * FILE, high_percent=80, low_percent=50)
    two = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    one.step()
    for n in range(17):
        shared.put(n, idle=n * HOUR)
    two.step()
    assert not two.status()["holder"]
    one._not_before = 0.0
    one.step()
    assert len(shared.left(range(99))) == 10
    two.step()
    assert two.status()["used_bytes"] == 10 * FILE
    assert shared.store.usage().used_bytes == 10 * FILE


def test_only_the_holder_reads_what_the_others_tell(shared, monkeypatch):
    shared.claim()
    sweepers = [shared.sweeper(own_store=True) for _ in range(5)]
    read, true = [], folder.read_note
    monkeypatch.setattr(folder, "read_note", lambda fd, name: read.append(name) or true(fd, name))
    for _ in range(2):
        for sweeper in sweepers:
            read.clear()
            sweeper.step()
            if not sweeper.status()["holder"]:
                assert read == ["summary"]
    sweepers[0].step()
    assert len([name for name in read if name.startswith("node-")]) >= 5


def test_quota_of_a_tenant(shared):
    other = b"u" * 16
    for n in range(10):
        shared.put(n, idle=n * HOUR)
    for n in range(10, 14):
        shared.put(n, idle=100 * HOUR, tenant=other)
    sweeper = shared.sweeper(capacity=100 * FILE, high_percent=80, low_percent=64, tenant_bytes=5 * FILE)
    sweeper.step()
    assert shared.left(range(14)) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert shared.stats.whole("swept") == {"quota": 6}
    assert sweeper.status()["tenants"] == {TAG.hex(): 4 * FILE, other.hex(): 4 * FILE}


def test_idle_and_age(shared):
    shared.put(1, idle=0.5 * HOUR)
    shared.put(2, idle=1.5 * HOUR)
    shared.put(3, idle=0.1 * HOUR, made=9 * HOUR)
    shared.put(4, idle=0.1 * HOUR, made=11 * HOUR)
    shared.put(5, idle=0.1 * HOUR, made=-400 * HOUR)  # by a clock that is ahead
    shared.sweeper(idle_s=HOUR, max_age_s=10 * HOUR, grace_s=60.0).step()
    assert shared.left(range(9)) == [1, 3, 5]
    assert shared.stats.whole("swept") == {"idle": 1, "age": 1}


def test_a_maker_whose_clock_is_ahead_makes_no_block_immortal(shared):
    shared.put(1, idle=11 * HOUR, made=-400 * HOUR)
    shared.put(2, idle=9 * HOUR, made=-400 * HOUR)
    shared.sweeper(max_age_s=10 * HOUR).step()
    assert shared.left([1, 2]) == [2]


@pytest.mark.parametrize("jump", [8 * DAY, -8 * DAY])
def test_fault_26_a_node_whose_clock_jumps_finds_no_block_too_old(shared, monkeypatch, jump):
    """Ages are those that the mount tells."""
    shared.put(1, idle=0.5 * HOUR)
    shared.put(2, idle=2 * HOUR)
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall + jump)
    sweeper = shared.sweeper(idle_s=HOUR, max_age_s=3 * HOUR)
    sweeper.step()
    assert shared.left([1, 2]) == [1]
    assert not shared.store.touch(key(1), HOUR)
    assert shared.store.touch(key(1), 60.0)


def test_a_use_is_noted_so_what_is_in_use_stays(shared):
    shared.put(1, idle=2 * HOUR)
    shared.put(2, idle=2 * HOUR)
    touches = AccessTimes(shared.store.touch, shared.stats, every_s=600.0)
    shared.store.events.subscribe(SharedBlockOpened, lambda event: touches.record(event.block_key))
    touches.start()
    assert read(shared.store, 1) == payload(1)
    wait_for(lambda: shared.stats.whole("touches") == {"touched": 1}, "the use is noted")
    touches.stop()
    assert not shared.store.touch(key(1), 600.0)  # not again so soon
    shared.sweeper(idle_s=HOUR).step()
    assert shared.left([1, 2]) == [1]


def test_a_lookup_that_found_a_block_on_a_node_is_a_use_of_its_copy(shared):
    for n in range(4):
        shared.put(n, idle=2 * HOUR)
    touches = AccessTimes(shared.store.touch, shared.stats, every_s=600.0)
    touches.on_lookup(TAG, [key(n) for n in range(4)] + [key(9)], bytes([1, 2, 3, 0, 1]), 0.0)
    touches.start()
    wait_for(lambda: not touches._queue, "all are dealt with")
    wait_for(lambda: shared.stats.whole("touches") == {"touched": 2}, "of those that are there")
    touches.stop()
    shared.sweeper(idle_s=HOUR).step()
    assert shared.left(range(4)) == [0, 1]


def test_a_superseded_fingerprint_goes_first(shared):
    old, new = b"o" * 32, b"n" * 32
    for n in range(8):
        shared.put(n, idle=8 * DAY, made=30 * DAY, fingerprint=old)
    for n in range(8, 20):
        shared.put(n, idle=20 * DAY if n < 19 else 0.0, made=20 * DAY, fingerprint=new)
    sweeper = shared.sweeper(
        capacity=20 * FILE, high_percent=80, low_percent=60, models=lambda: [(old, "model"), (new, "model")]
    )
    with TierMetadata(str(shared.path), shared.uid) as tier:
        sweeper._publish_usage(tier)
        sweeper._note_models(tier)
    os.utime(shared.path / "sweep" / f"model-{old.hex()}", (time.time() - 8 * DAY,) * 2)
    sweeper.step()
    assert shared.stats.whole("swept") == {"superseded": 8}
    assert shared.left(range(20)) == list(range(8, 20))


def aged(path, age):
    os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)


def test_files_that_writers_left_go_after_an_hour_and_not_before(shared):
    shared.claim()
    sweeper = shared.sweeper()
    sweeper.step()
    places = {
        "tmp": "ab" * 16,
        "sweep": f"node-{'0' * 16}",
        "": ".POOL_ID." + "ab" * 8,
    }
    for directory, name in places.items():
        for file, age in ((name, 4000), (name.replace("a", "c").replace("0", "1"), 3000)):
            (shared.path / directory / file).touch()
            aged(shared.path / directory / file, age)
    (shared.path / "sweep" / ("summary." + "ab" * 8)).touch()
    aged(shared.path / "sweep" / ("summary." + "ab" * 8), 4000)
    again(sweeper)
    assert shared.stats.whole("swept") == {"temporary": 4}
    assert os.listdir(shared.path / "tmp") == ["cb" * 16]
    assert not (shared.path / "sweep" / f"node-{'0' * 16}").exists()
    assert (shared.path / "sweep" / f"node-{'1' * 16}").exists()


def test_of_quarantined_blocks_a_few_stay(shared):
    for n in range(12):
        shared.put(n)
        shared.store.quarantine(key(n))
    sweeper = shared.sweeper()
    sweeper.step()
    assert len(os.listdir(shared.path / "quarantine")) == 12  # none is old
    sweep._SAFE_AGE_S, before = -1.0, sweep._SAFE_AGE_S
    try:
        again(sweeper)
    finally:
        sweep._SAFE_AGE_S = before
    assert len(os.listdir(shared.path / "quarantine")) == 8
    assert shared.stats.whole("swept")["quarantine"] == 4


def test_nothing_is_touched_that_is_not_called_as_we_call_things(shared, tmp_path):
    for n in range(3):
        shared.put(n, idle=100 * DAY)
    victim = shared.file(0)
    outside = tmp_path / "outside"
    (outside / "cd").mkdir(parents=True)
    blocks = shared.path / "blocks"
    name = "ab" + "cd" + "0" * 60
    strange = [
        shared.path / "notes.txt",
        shared.path / "tmp" / "report.txt",
        shared.path / "sweep" / "mine",
        shared.path / "quarantine" / "mine",
        blocks / "readme",
        blocks / "zz" / "readme",
        victim.parent / "readme",
        victim.parent / (victim.name + ".part"),
        victim.parent / ("0" * 64),  # of another directory
        outside / "cd" / name,
        outside / victim.name,
    ]
    for file in strange:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"precious" * 1000)
        aged(file, 100 * DAY)
    links = [blocks / "ab", victim.parent / (victim.name[:4] + "f" * 60), shared.path / "tmp" / ("ab" * 16)]
    links[0].exists() and links[0].rmdir()
    links[0].symlink_to(outside)
    links[1].symlink_to(outside / victim.name)
    links[2].symlink_to(outside / victim.name)
    (victim.parent / (victim.name[:4] + "e" * 60)).mkdir()
    for link in links:
        aged(link, 100 * DAY)
    shared.sweeper(capacity=1, idle_s=1.0, max_age_s=1.0).step()
    assert shared.left(range(3)) == []
    assert [file for file in strange if file.read_bytes() != b"precious" * 1000] == []
    assert all(link.is_symlink() for link in links)
    assert (victim.parent / (victim.name[:4] + "e" * 60)).is_dir()


def test_another_pools_directory_is_never_swept(tmp_path):
    one, two = Shared(tmp_path / "one", "uid-1"), Shared(tmp_path / "two", "uid-2")
    for n in range(4):
        one.put(n, idle=DAY)
        two.put(n, idle=DAY)
    one.sweeper(idle_s=1.0).step()
    assert one.left(range(4)) == []
    assert two.left(range(4)) == list(range(4))
    mistaken = FilesystemCollector(str(two.path), "uid-1", CollectionLimits(idle_s=1.0), two.store, Stats())
    with pytest.raises(ConfigError, match="not the directory of this pool"):
        mistaken.step()
    (two.path / "POOL_ID").unlink()
    with pytest.raises(ConfigError):
        two.sweeper(idle_s=1.0).step()
    assert two.left(range(4)) == list(range(4))
    os.rename(one.path, tmp_path / "moved")
    os.symlink(two.path, one.path)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory") as told:
        one.sweeper(idle_s=1.0).step()
    assert told.value.errno in (errno.ELOOP, errno.ENOTDIR)
    for pool in (one, two):
        pool.store.close()


def test_a_directory_that_was_mounted_over_is_another_file_system_and_stays(shared, monkeypatch):
    shared.put(1, idle=DAY)
    with TierMetadata(str(shared.path), shared.uid) as tier:
        from kvpool_sidecar.shared_gc.walk import leaves

        assert len(list(leaves(tier.blocks, tier.device))) == 1
        assert list(leaves(tier.blocks, tier.device + 1)) == []


def test_empty_directories_go_once_they_are_old(shared):
    for n in range(3):
        shared.put(n, idle=DAY)
    sweeper = shared.sweeper(idle_s=HOUR)
    sweeper.step()
    blocks = shared.path / "blocks"
    assert len(list(blocks.iterdir())) == 3
    aged(shared.file(0).parent, DAY)
    again(sweeper)
    assert len(list(blocks.iterdir())) == 2
    assert not shared.file(0).parent.parent.exists()
    shared.put(0)
    assert read(shared.store, 0) == payload(0)


def test_a_block_that_is_read_while_it_is_swept_is_whole_or_a_miss(shared):
    rng = random.Random(3)
    numbers = range(60)
    stop, wrong, seen = threading.Event(), [], {"hit": 0, "miss": 0}

    def read_on():
        while not stop.is_set():
            n = rng.choice(numbers)
            data = read(shared.store, n)  # raises if it is not whole
            seen["miss" if data is None else "hit"] += 1
            if data is not None and data != payload(n, SIZE):
                wrong.append(n)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        deadline = time.monotonic() + 60
        while (min(seen.values()) < 50) and time.monotonic() < deadline:
            for n in numbers:
                if not shared.store.contains(key(n)):
                    shared.put(n, idle=DAY)
            sweeper = shared.sweeper(idle_s=HOUR)
            sweeper.step()
            sweeper.resign()
    finally:
        stop.set()
        reader.join()
    assert not wrong
    assert min(seen.values()) >= 50


# -- who may, and how fast


def test_a_sweeper_that_lost_the_lease_removes_nothing_more(shared):
    for n in range(200):
        shared.put(n, idle=DAY)
    one = shared.sweeper(idle_s=HOUR)
    two = shared.sweeper(own_store=True)

    def overtaken(_key):
        shared.swept.append(_key)
        if len(shared.swept) == 10:  # `one` is stopped here for longer than the lease
            for file in (shared.path / "sweep").glob("term-*"):
                aged(file, 31)
            two.step()
            assert two.status()["holder"]
            one._lease._asked_at -= 31

    one._removed = overtaken
    one.step()
    assert len(shared.swept) == 10
    assert len(shared.left(range(200))) == 190
    assert not one.status()["holder"]
    one.step()
    assert len(shared.swept) == 10


def test_a_sweep_that_is_cut_short_by_the_end_of_the_process_gives_the_lease_back(shared):
    for n in range(50):
        shared.put(n, idle=DAY)
    one = shared.sweeper(idle_s=HOUR, timing=FAST._replace(entries_per_s=10.0))
    one.start()
    wait_for(lambda: shared.swept, "it has begun")
    one.stop(30.0)
    assert len(shared.left(range(50))) > 0
    two = shared.sweeper(own_store=True, idle_s=HOUR)
    two.step()
    assert two.status()["holder"]
    assert shared.left(range(50)) == []


def test_the_pace_holds_on_the_average():
    clock, slept = [0.0], []

    def wait(seconds):
        slept.append(seconds)
        clock[0] += seconds
        return False

    pace = EntryRateLimiter(100.0, wait, lambda: clock[0])
    for _ in range(1000):
        pace(3)
        clock[0] += 0.001
    assert 29 < clock[0] < 31.5
    assert len(slept) == 1000
    with pytest.raises(CollectionStoppedError):
        EntryRateLimiter(100.0, lambda _s: True, lambda: 0.0)(100)


def test_a_long_sweep_keeps_the_lease_and_tells_meanwhile(shared):
    for n in range(40):
        shared.put(n)
    one = shared.sweeper(timing=Schedule(lease_s=0.4, every_s=1e9, entries_per_s=30.0))
    two = shared.sweeper(own_store=True, timing=Schedule(lease_s=0.4, every_s=1e9, entries_per_s=1e9))
    thread = threading.Thread(target=one.step)
    thread.start()
    wait_for(lambda: one.status()["sweeping"], "it sweeps")
    while thread.is_alive():
        two.step()
        thread.join(0.1)
    assert one.status()["holder"]
    assert one.status()["term"] == 1
    assert not two.status()["holder"]
    assert two.status()["blocks"] in (0, 40)


def test_memory_does_not_grow_with_the_number_of_blocks(shared, monkeypatch):
    """No list of names: of each directory one entry is held at a time."""
    from kvpool_sidecar.shared_gc import walk

    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("all names at once"))
    for n in range(50):
        shared.put(n)
    held = []
    true = walk.LeafDirectory.blocks

    def watched(leaf):
        for found in true(leaf):
            held.append(found.name)
            yield found
            assert held.pop() == found.name

    monkeypatch.setattr(walk.LeafDirectory, "blocks", watched)
    sweeper = shared.sweeper(capacity=10 * FILE)
    sweeper.step()
    assert shared.stats.whole("swept")["capacity"] >= 40


def test_of_very_many_blocks_a_part_of_the_headers_tells_of_all(shared, monkeypatch):
    monkeypatch.setattr(sweep, "_READ_ALL", 64)
    for n in range(300):
        put(shared.store, n, 100)
    sweeper = shared.sweeper()
    sweeper._report = UsageReport(finished=0.0, used=StoredUsage(1, 300))
    with TierMetadata(str(shared.path), shared.uid) as tier:
        folder.write_note(tier.sweep, folder.SUMMARY, sweeper._report.to_json())
    opened, true = [], safefs.open_beneath
    monkeypatch.setattr(
        safefs, "open_beneath", lambda fd, path, *a, **k: opened.append(path) or true(fd, path, *a, **k)
    )
    sweeper.step()
    headers = sum(len(path) == 64 for path in opened)
    assert 10 < headers < 80
    told = sweeper.status()["tenants"][TAG.hex()]
    assert 0.3 < told / (300 * 4196) < 2.0
    assert sweeper.status()["used_bytes"] == 300 * 4196


def test_a_mount_that_fails_is_told_and_tried_again(shared):
    sweeper = shared.sweeper()
    sweeper._attempt(sweeper.step)  # nobody has stored anything yet
    assert sweeper.status()["problem"] == ""
    assert not sweeper.status()["holder"]
    shared.put(1)
    moved = shared.path.with_name("away")
    os.rename(shared.path, moved)
    sweeper._attempt(sweeper.step)
    assert "No such file" in sweeper.status()["problem"]
    os.rename(moved, shared.path)
    sweeper._attempt(sweeper.step)
    assert sweeper.status()["problem"] == ""
    assert sweeper.status()["holder"]


def test_the_error_for_a_lost_lease_is_no_error_of_the_mount():
    assert not issubclass(LeaseLostError, OSError)
