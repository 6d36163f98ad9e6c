"""The margin of deadlines: nothing while calls end in time, earlier ends and refusals while they end late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.transport.deadline_margin import DeadlineMargin

if TYPE_CHECKING:
    from cl_clock import Clock


def test_a_call_that_ends_in_time_or_a_little_late_costs_the_next_one_nothing(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now + 1.0)
    margin.note(until=clock.now - 0.09)  # a garbage collection of the engine
    assert margin.usable(clock.now + 0.02) == clock.now + 0.02


def test_a_late_call_makes_the_next_one_end_earlier(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.2)
    assert margin.usable(clock.now + 1.0) == pytest.approx(clock.now + 0.9)


def test_a_small_margin_leaves_a_short_call_half_of_its_time(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.19)
    assert margin.usable(clock.now + 0.02) == pytest.approx(clock.now + 0.01)


def test_a_call_that_would_lose_more_than_half_of_its_time_is_refused(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.3)
    assert margin.usable(clock.now + 0.3) is None
    assert margin.usable(clock.now + 0.5) == pytest.approx(clock.now + 0.3)


def test_a_process_that_was_stopped_for_minutes_is_served_again_after_two_seconds(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 600.0)
    assert margin.usable(clock.now + 0.02) is None
    clock.now += 1.5
    assert margin.usable(clock.now + 0.02) is None
    clock.now += 0.5
    assert margin.usable(clock.now + 0.02) is not None


def test_a_call_that_is_less_late_does_not_shrink_the_margin(clock: Clock) -> None:
    margin = DeadlineMargin(clock)
    margin.note(until=clock.now - 0.6)
    margin.note(until=clock.now - 0.2)
    assert margin.seconds == pytest.approx(0.5)
