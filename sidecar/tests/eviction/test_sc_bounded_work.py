"""No operation of a table does much at once: lookups wait for the lock meanwhile. Counted in lines run, not in time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvpool_sidecar.eviction import Entry, PrefixAware
from kvpool_sidecar.eviction.recency_guard import RecencyGuard
from kvpool_sidecar.eviction.reuse_model import ReuseModel
from kvpool_testing.blocks import key

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIZE = 10
MOST_LINES = 40_000  # about 0.1 us each: 4 ms of the 10 that a lock may be held


class Lines:
    """The most lines of Python that one call ran."""

    def __init__(self) -> None:
        self.most = 0
        self._count = 0

    def of(self, call: Callable[[], object]) -> None:
        self._count = 0
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)
        self.most = max(self.most, self._count)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        self._count += event == "line"
        return self._trace


@pytest.fixture
def lines():
    before = sys.gettrace()
    yield Lines()
    sys.settrace(before)


def test_the_model_is_renewed_in_slices_of_bounded_work(lines):
    model = ReuseModel(1 << 30)
    for n in range(1 << 15):
        model.clock += 1 << 10
        model.record(key(n), n % 3)
    before = model.index(0, model.clock)
    calls = 0
    while model.index(0, model.clock) == before:
        lines.of(model.refit)
        calls += 1
    assert calls > 40
    assert lines.most < MOST_LINES


def test_a_sample_that_becomes_smaller_is_thinned_out_in_slices(lines):
    model, guard = ReuseModel(1 << 40, 1 << 12), RecencyGuard(1 << 12)
    for n in range(3 << 12):
        model.clock += 1
        for call in (lambda n=n: model.record(key(n), 0), lambda n=n: guard.store(key(n), SIZE)):
            lines.of(call) if 4000 < n < 4500 else call()
    assert model.sampled < 1
    assert guard.status.sampled < 1
    assert lines.most < 2000


def test_a_victim_takes_bounded_work_whatever_the_table_holds(lines):
    table = PrefixAware(40_000 * SIZE)
    for n in range(40_000):
        if n % 20 == 0:
            table.observe_sequence([key(m) for m in range(n, n + 20)])
        table.add(key(n), Entry(SIZE, SIZE, 0))
    for n in range(40_000, 41_000):
        lines.of(lambda n=n: table.add(key(n), Entry(SIZE, SIZE, 0)))
        lines.of(lambda: table.pop_victims(1, 1))
        lines.of(lambda n=n: table.touch(key(n - 20_000), 0))
    assert len(table) == 40_000
    assert lines.most < MOST_LINES
