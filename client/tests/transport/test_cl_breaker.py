"""The breaker, the counters and the worker pool: small parts with a clock of their own."""

from __future__ import annotations

import threading
import time

import pytest
from cl_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from kvpool.stats import Stats
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool.transport.worker_pool import WorkerPool


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(3, 1.0, Clock())
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.allow()
    for _ in range(3):
        breaker.failure()
    assert breaker.is_open
    assert not breaker.allow()


def test_one_trial_per_cooldown_and_success_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker(2, 1.0, clock)
    breaker.failure()
    breaker.failure()
    clock.now += 1.0
    assert not breaker.is_open
    assert [breaker.allow() for _ in range(5)] == [True, False, False, False, False]
    assert breaker.is_open
    breaker.failure()
    clock.now += 0.9
    assert not breaker.allow()
    clock.now += 0.1
    assert breaker.allow()
    breaker.success()
    assert [breaker.allow() for _ in range(5)] == [True] * 5


def test_a_trial_that_never_ends_does_not_keep_it_open_for_ever() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 1.0, clock)
    breaker.failure()
    clock.now += 1.0
    assert breaker.allow()
    clock.now += 1.0
    assert breaker.allow()


@given(st.lists(st.sampled_from("sfat"), max_size=60), st.integers(1, 4))
def test_it_always_recovers(steps: list[str], limit: int) -> None:
    clock = Clock()
    breaker = CircuitBreaker(limit, 1.0, clock)
    for step in steps:
        {"s": breaker.success, "f": breaker.failure, "a": breaker.allow, "t": lambda: None}[step]()
        clock.now += 0.3 if step == "t" else 0.0
    clock.now += 1.0
    assert not breaker.is_open
    assert breaker.allow()


def test_stats_report_growth_once() -> None:
    stats = Stats()
    stats.add("hits", "local", 2)
    stats.add("misses", "absent")
    stats.add("stores", "stored", 5)
    assert stats.take_report() == {"hits": {"local": 2}, "misses": {"absent": 1}}
    assert stats.take_report() == {}
    stats.add("hits", "local")
    assert stats.take_report() == {"hits": {"local": 1}}
    assert stats.snapshot()["hits"] == {"local": 3}


def test_workers_are_bounded_and_survive_errors(caplog: pytest.LogCaptureFixture) -> None:
    workers = WorkerPool(3, "t")
    gate, running, most = threading.Event(), [], []
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        gate.wait(5)
        with lock:
            running.pop()

    for _ in range(10):
        workers.submit(work)
    deadline = time.monotonic() + 5
    while len(running) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.set()
    workers.close()
    alone = WorkerPool(1, "alone")
    done = threading.Event()
    alone.submit(lambda: 1 / 0)
    alone.submit(done.set)
    assert done.wait(5)
    assert max(most) == 3
    assert "a worker failed" in caplog.text
    alone.close()
    alone.submit(lambda: pytest.fail("after close"))
