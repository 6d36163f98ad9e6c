"""`make bench BENCH=lookup`: what it counts, without judging any time."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.__main__ import names
from bench.lookup import percentile, row_of, take_turns


def test_it_is_a_measurement_of_its_own():
    assert "lookup" in names()


def test_contenders_take_turns_and_the_first_calls_do_not_count():
    calls: list[str] = []
    times = take_turns((lambda: calls.append("a"), lambda: calls.append("b")), 4)
    assert [len(each) for each in times] == [4, 4]
    assert all(sorted(pair) == ["a", "b"] for pair in zip(calls[::2], calls[1::2], strict=True))
    assert len(calls) > 2 * 4


def test_a_slow_call_in_five_does_not_change_a_row():
    assert percentile([5.0, 1.0, 2.0, 3.0, 4.0], 0.2) == 2.0
    steady = row_of(80, "local", [2e-6] * 10, [4e-6] * 10)
    assert asdict(steady) == {"hashes": 80, "case": "local", "us": 2.0, "mget_us": 4.0, "ratio": pytest.approx(0.5)}
    assert row_of(80, "local", [2e-6] * 8 + [9.0] * 2, [4e-6] * 10) == steady
