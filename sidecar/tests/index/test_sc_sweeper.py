"""The sweeper gives memory back at a bounded rate, only where this node has a number, and lives through failures."""

from __future__ import annotations

import time

import pytest
from sc_nodes import wait_for

from kvpool.errors import RetryableError
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.expiry import IndexExpiry
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record
from kvpool_testing.index import key

A = NodeInfo("a", "127.0.0.1", 1, 11)


@pytest.fixture
def index():
    index = MemoryIndex(lease_s=60, forget_s=60)
    index.announce([(key(n), Record(4711, 1000, 7)) for n in range(300)])
    return index


@pytest.fixture
def sweeper(index):
    made = []

    def make(number, **kw):
        one = IndexExpiry(index, number, **{"keys_per_s": 1e6, "interval_s": 0.02, **kw})
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.stop()


def test_what_no_node_stands_for_goes(index, sweeper):
    number = index.join(A)
    index.announce([(key(0), Record(number, 1000, 7))])
    one = sweeper(lambda: number)
    wait_for(lambda: one.removed == 300, "swept")
    assert index.locate([key(0), key(1)]) == [(Record(number, 1000, 7),), ()]


def test_a_node_without_a_number_does_not_sweep(index, sweeper):
    one = sweeper(lambda: 0)
    time.sleep(0.2)
    assert one.removed == 0
    assert index.locate([key(0)])[0]


def test_the_rate_is_bounded(index, sweeper):
    started = time.monotonic()
    one = sweeper(lambda: 1, keys_per_s=1000)
    wait_for(lambda: one.removed == 300, "swept")
    assert time.monotonic() - started >= 0.29


def test_an_index_that_fails_is_swept_later(index, sweeper, monkeypatch):
    failing = [RetryableError("away"), RuntimeError("a mistake of ours")]
    sweep = index.expire

    def flaky(number, pace):
        if failing:
            raise failing.pop()
        return sweep(number, pace)

    monkeypatch.setattr(index, "expire", flaky)
    one = sweeper(lambda: 1)
    wait_for(lambda: one.removed == 300, "swept")
