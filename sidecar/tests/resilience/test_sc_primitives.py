"""Background workers, periodic tasks, the bounded cache and the rate limiter."""

from __future__ import annotations

import threading
import time

import pytest

from kvpool.errors import PoolUnavailableError
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.resilience.worker import BackgroundWorker, PeriodicTask


def eventually(check, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def test_a_worker_handles_items_in_order_and_survives_exceptions(caplog):
    handled = []

    def handle(item):
        if item == 2:
            raise ValueError(item)
        handled.append(item)

    worker = BackgroundWorker("test-worker", handle)
    for item in range(4):
        assert worker.submit(item)
    assert worker.queued == 4
    worker.start()
    worker.start()
    eventually(lambda: handled == [0, 1, 3])
    assert "test-worker failed" in caplog.text
    worker.stop()
    assert not worker.submit(5)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-worker"]


def test_a_worker_bounds_its_queue_and_runs_several_threads():
    gate, running = threading.Event(), []

    def handle(item):
        running.append(item)
        gate.wait(5)

    worker = BackgroundWorker("test-pool", handle, max_queued=3, threads=2)
    worker.start()
    assert all(worker.submit(item) for item in range(2))
    eventually(lambda: len(running) == 2)
    assert {thread.name for thread in threading.enumerate()} >= {"test-pool-0", "test-pool-1"}
    assert [worker.submit(item) for item in range(4)] == [True, True, True, False]
    worker.stop(0.01)
    assert worker.queued == 0
    gate.set()
    eventually(lambda: not any(thread.name.startswith("test-pool") for thread in threading.enumerate()))
    assert sorted(running) == [0, 1]


def test_a_worker_may_stop_itself():
    worker = BackgroundWorker("test-self", lambda _: worker.stop())
    worker.start()
    worker.submit(None)
    eventually(lambda: not any(thread.name == "test-self" for thread in threading.enumerate()))


def test_a_periodic_task_runs_at_its_interval_on_trigger_and_after_exceptions(caplog):
    calls = []

    def work():
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise ValueError("first")
        return 0.01 if len(calls) < 4 else None

    task = PeriodicTask("test-task", work, 60.0)
    task.start()
    eventually(lambda: len(calls) == 4)
    assert calls[1] - calls[0] >= 0.45
    assert "test-task failed" in caplog.text
    task.trigger()
    eventually(lambda: len(calls) == 5)
    began = time.monotonic()
    task.stop()
    assert time.monotonic() - began < 1.0
    assert not any(thread.name == "test-task" for thread in threading.enumerate())
    assert task.is_stopping


def test_a_periodic_task_may_wait_for_its_first_interval_and_sleep_in_its_work():
    ended = []
    task = PeriodicTask("test-late", lambda: ended.append(task.sleep(30)), 0.05, run_at_once=False)
    assert not ended
    task.start()
    time.sleep(0.1)
    task.stop()
    assert ended == [True]
    idle = PeriodicTask("test-idle", lambda: ended.append(False), 60.0, run_at_once=False)
    idle.start()
    idle.stop()
    assert ended == [True]
    idle.start()


def test_a_cache_evicts_the_least_recently_used_and_expires():
    now = [0.0]
    cache: BoundedCache[str, int] = BoundedCache(2, 10.0, lambda: now[0])
    assert cache.put("a", 1) == []
    cache.put("b", 2)
    assert cache.get("a") == 1
    assert cache.put("c", 3) == [("b", 2)]
    assert cache.peek("a") == 1
    assert cache.put("d", 4) == [("a", 1)]
    assert (list(cache), cache.values(), len(cache)) == (["c", "d"], [3, 4], 2)
    now[0] = 10.0
    assert "c" not in cache
    assert cache.get("c") is None
    assert cache.pop("d") is None
    assert cache.pop("d") is None
    assert cache.values() == []
    cache.put("e", 5)
    assert "e" in cache
    assert cache.pop("e") == 5
    cache.clear()
    assert len(cache) == 0


def test_a_cache_without_a_ttl_never_reads_the_clock():
    cache: BoundedCache[str, int] = BoundedCache(1, clock=lambda: pytest.fail("read"))
    cache.put("a", 1)
    assert (cache.get("a"), "a" in cache, cache.values(), cache.pop("a")) == (1, True, [1], 1)


def test_a_rate_limiter_keeps_its_rate_on_average_and_carries_what_a_deadline_cut_off(monkeypatch):
    now, pauses = [0.0], []

    def wait(seconds):
        pauses.append(seconds)
        now[0] += seconds
        return False

    monkeypatch.setattr("kvpool_sidecar.resilience.rate_limiter.time.monotonic", lambda: now[0])
    limiter = RateLimiter(lambda: 100.0, wait)
    for _ in range(100):
        limiter.acquire(3)
    assert 2.99 < now[0] < 3.01
    limiter.acquire(1000, now[0] + 0.5)
    assert 3.49 < now[0] < 3.51
    limiter.settle()
    assert 12.99 < now[0] < 13.01
    lazy = RateLimiter(lambda: 100.0, wait, min_pause_s=0.02)
    pauses.clear()
    for _ in range(6):
        lazy.acquire(1)
    assert [round(seconds, 3) for seconds in pauses] == [0, 0, 0.03, 0, 0, 0.03]
    with pytest.raises(PoolUnavailableError):
        RateLimiter(lambda: 100.0, lambda _: True).acquire(1)
