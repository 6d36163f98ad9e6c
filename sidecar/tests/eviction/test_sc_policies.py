"""The pure decisions: what goes first, what fits, where a block belongs, when a part counts as absent."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import DeadlineExceededError, PoolUnavailableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.eviction import PERSIST_EVERY_S, Entry, Lru
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.storage.local import placement
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key


def lru(*sizes: int) -> Lru:
    found = Lru()
    for n, size in enumerate(sizes):
        found.add(key(n), Entry(size, size, 0))
    return found


def test_the_least_recently_opened_goes_first():
    table = lru(10, 10, 10)
    table.touch(key(0), 1)
    assert [k for k, _ in table.pop_victims(20, 99)] == [key(1), key(2)]
    assert table.total_bytes == 10
    assert list(table) == [key(0)]


def test_no_more_go_than_needed_nor_than_allowed():
    assert len(lru(10, 10, 10).pop_victims(11, 99)) == 2
    assert len(lru(10, 10, 10).pop_victims(999, 2)) == 2
    assert len(lru(10, 10, 10).pop_victims(0, 99)) == 0
    assert len(lru(10, 10, 10).pop_victims(0, 99, at_least=2)) == 2


def test_a_victim_that_could_not_go_is_first_again():
    table = lru(10, 10)
    (first, entry), *_ = table.pop_victims(1, 1)
    table.reinsert(first, entry)
    assert list(table) == [key(0), key(1)]
    assert table.total_bytes == 20


def test_recency_is_saved_now_and_then_only():
    table = lru(10)
    assert not table.touch(key(0), PERSIST_EVERY_S - 1)
    assert table.touch(key(0), PERSIST_EVERY_S + 1)
    assert not table.touch(key(0), PERSIST_EVERY_S + 2)
    assert not table.touch(key(9), 0)


def test_after_a_scan_the_order_is_that_of_the_saved_times():
    table = Lru()
    for n, when in enumerate([30, 10, 20]):
        table.add(key(n), Entry(1, 1, when))
    table.sort_by_last_use()
    assert list(table) == [key(1), key(2), key(0)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50), st.booleans()), max_size=60))
def test_the_bytes_of_a_table_are_the_sum_of_its_blocks(steps):
    table = Lru()
    for n, size, add in steps:
        if add:
            table.add(key(n), Entry(size, size, 0))
        else:
            table.discard(key(n))
        assert table.total_bytes == sum(table.get(k).size for k in table)


LIMITS = quota.CapacityLimits(1000, 85, 75, 100, reserve_bytes=50, reserve_percent=10)


@pytest.mark.parametrize(
    ("used", "pending", "need", "over"), [(0, 0, 1000, 0), (500, 300, 200, 0), (500, 300, 201, 1), (0, 0, 1001, 1)]
)
def test_what_is_promised_counts_against_the_capacity(used, pending, need, over):
    assert quota.bytes_over_capacity(used, pending, need, LIMITS) == over


@pytest.mark.parametrize(("used", "pending", "over"), [(850, 0, 0), (851, 0, 101), (700, 200, 150)])
def test_eviction_starts_above_the_high_and_ends_at_the_low_watermark(used, pending, over):
    assert quota.bytes_over_watermark(used, pending, LIMITS) == over


@pytest.mark.parametrize(
    ("free", "total", "need", "short"), [(200, 1000, 100, 0), (199, 1000, 100, 1), (60, 100, 0, 0)]
)
def test_the_larger_of_both_reserves_stays_free(free, total, need, short):
    assert quota.fs_shortfall(free, total, need, LIMITS) == short


def test_blocks_spread_over_drives_by_their_capacity():
    counts = Counter(placement.choose(key(n), ["a", "b", "c"], [1, 1, 2]) for n in range(4000))
    assert 800 < counts[0] < 1200
    assert 800 < counts[1] < 1200
    assert 1800 < counts[2] < 2200


def test_a_new_drive_takes_blocks_but_moves_none_between_the_others():
    for n in range(500):
        before = placement.choose(key(n), ["a", "b"], [5, 5])
        assert placement.choose(key(n), ["a", "b", "c"], [5, 5, 5]) in (before, 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_tries_once_and_closes():
    clock = Clock()
    breaker = CircuitBreaker(2, 1.0, clock, max_cooldown_s=4.0)
    breaker.failure()
    assert breaker.allow()
    breaker.failure()
    assert not breaker.allow()
    assert breaker.is_open
    clock.now += 1.1
    assert not breaker.is_open
    assert breaker.allow()
    assert not breaker.allow()  # one trial at a time
    breaker.failure()
    clock.now += 1.1
    assert not breaker.allow()  # it waits twice as long now
    clock.now += 1.0
    assert breaker.allow()
    breaker.success()
    assert breaker.allow()
    assert breaker.allow()


def test_success_between_failures_keeps_a_breaker_closed():
    breaker = CircuitBreaker(2, 1.0, Clock())
    for _ in range(5):
        breaker.failure()
        breaker.success()
    assert breaker.allow()


def guard(threads=2, backlog=2, failures=99) -> Bulkhead:
    return Bulkhead("test", threads, backlog, CircuitBreaker(failures, 60.0, time.monotonic))


def test_a_guarded_call_gives_its_result_or_its_error():
    g = guard()
    assert g.run(lambda: 5, 1) == 5
    assert g.run(lambda: None, 1) is None
    with pytest.raises(KeyError):
        g.run(lambda: {}["x"], 1)
    assert g.run_all([], 1) == []


def test_nobody_waits_longer_than_asked_for_a_call_that_hangs_and_its_late_result_is_discarded():
    g, gate, late = guard(), threading.Event(), []

    def hang():
        gate.wait()
        return "late"

    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        g.run(hang, 0.05, discard=late.append)
    assert time.monotonic() - started < 1
    assert g.run(lambda: 1, 1) == 1
    gate.set()
    for _ in range(200):
        if late:
            break
        time.sleep(0.01)
    assert late == ["late"]


def test_hanging_calls_hold_a_bounded_number_of_threads_and_then_all_are_refused_at_once():
    g, gate = guard(threads=2, backlog=2), threading.Event()
    before = threading.active_count()
    for _ in range(4):
        with pytest.raises((DeadlineExceededError, PoolUnavailableError)):
            g.run(gate.wait, 0.02)
    assert threading.active_count() - before <= 2
    answers = g.run_all([lambda: 1] * 3, 0.5)
    assert all(isinstance(a, PoolUnavailableError) for a in answers)
    gate.set()
    for _ in range(200):
        if g.run_all([lambda: 1], 1) == [1]:
            return
        time.sleep(0.01)
    pytest.fail("it did not recover")


def test_after_repeated_failures_calls_are_refused_without_being_made():
    g, calls = guard(failures=2), []

    def fail():
        calls.append(1)
        raise OSError("no")

    for _ in range(10):
        with pytest.raises((OSError, PoolUnavailableError)):
            g.run(fail, 1)
    assert len(calls) == 2
    assert not g.available


def test_labels_from_outside_are_bounded():
    stats = Stats()
    for n in range(500):
        stats.add("misses", f"reason{n}")
    stats.add("misses", "A Label\nwith = syntax", 7)
    found = stats.whole("misses")
    assert len(found) <= 49
    assert sum(found.values()) == 507
    assert all(label.isidentifier() for label in found)
