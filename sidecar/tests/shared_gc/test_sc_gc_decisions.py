"""Shared GC: the file lease and the decisions which blocks are removed."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
from sc_shared_gc import DAY, HOUR

from kvpool_sidecar.shared_gc.age_histogram import AgeHistogram
from kvpool_sidecar.shared_gc.file_lease import Lease
from kvpool_sidecar.shared_gc.plan import CollectionLimits, Group, Inventory, Model, level, make_plan, superseded
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageEstimator, UsageReport

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
    assert leases.hold(two)  # terms began again: the name is that of `one`, the file is not
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
