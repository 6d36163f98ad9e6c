"""`make bench BENCH=gil`: what it counts, without judging any time."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.__main__ import names
from bench.gil import Scheduler


def test_it_is_a_measurement_of_its_own():
    assert "gil" in names()


def test_beside_nothing_no_bytes_are_moved():
    share, rate = Scheduler().measure(None, 0.01)
    assert share > 0
    assert rate == 0


def test_the_bytes_of_the_other_thread_count_and_it_ends_with_the_measurement():
    before = threading.active_count()
    moved = threading.Event()

    def move() -> int:
        moved.set()
        return 1 << 20

    while True:  # a busy machine may not run the other thread in one measurement
        _, rate = Scheduler().measure(move, 0.01)
        if rate:
            break
    assert moved.is_set()
    assert threading.active_count() <= before
