"""The margin of deadlines: nothing while calls end in time, earlier ends and refusals while they end late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.transport.deadline_margin import DeadlineMargin

if TYPE_CHECKING:
    from cl_clock import Clock


def test_a_call_that_ends_in_time_costs_the_next_one_nothing(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now + 1.0)
    margin.note(until=clock.now - 0.01)  # some turns of the interpreter's lock
    assert margin.usable(clock.now + 0.02) == clock.now + 0.02


def test_a_late_call_makes_the_next_one_end_earlier(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.12)
    assert margin.usable(clock.now + 1.0) == pytest.approx(clock.now + 0.9)


def test_a_call_that_would_lose_half_of_its_time_is_refused(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.12)
    assert margin.usable(clock.now + 0.15) is None
    assert margin.usable(clock.now + 0.25) is not None


def test_refused_calls_are_tried_again_after_seconds(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 1.02)
    assert margin.usable(clock.now + 0.2) is None
    clock.now += 4.0
    assert margin.seconds == pytest.approx(1.0 / 16)
    assert margin.usable(clock.now + 0.2) is not None


def test_a_call_that_is_less_late_does_not_shrink_the_margin(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.52)
    margin.note(until=clock.now - 0.12)
    assert margin.seconds == pytest.approx(0.5)
