"""A watch that says nothing is found out by what listings show."""

from __future__ import annotations

from kvpool_operator.runtime.watch_staleness import WatchStaleness

ONE, TWO = ("sys", "one"), ("sys", "two")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_that_tells_everything_is_never_deaf():
    clock = Clock()
    watch_staleness = WatchStaleness(clock=clock)
    for version in ("1", "2", "3"):
        watch_staleness.observe_event(ONE, version)
        for _ in range(3):
            clock.now += 10
            watch_staleness.observe_list({ONE: version})
            assert watch_staleness.stale_seconds == 0


def test_a_change_that_was_just_made_may_still_be_under_way():
    clock = Clock()
    watch_staleness = WatchStaleness(clock=clock)
    watch_staleness.observe_event(ONE, "1")
    for version in ("2", "3", "4"):  # another one with every listing, each reported a moment after it
        watch_staleness.observe_list({ONE: version})
        watch_staleness.observe_event(ONE, version)
        clock.now += 10
        assert watch_staleness.stale_seconds == 0


def test_a_change_that_is_listed_twice_and_never_told_is_missed_until_it_is_told():
    clock = Clock()
    watch_staleness = WatchStaleness(clock=clock)
    watch_staleness.observe_event(ONE, "1")
    watch_staleness.observe_list({ONE: "2"})
    clock.now += 10
    watch_staleness.observe_list({ONE: "2"})
    clock.now += 50
    watch_staleness.observe_list({ONE: "2"})
    assert watch_staleness.stale_seconds == 50
    watch_staleness.observe_event(ONE, "2")
    watch_staleness.observe_list({ONE: "2"})
    assert watch_staleness.stale_seconds == 0


def test_a_new_pool_that_is_not_told_of_is_missed():
    watch_staleness = WatchStaleness(clock=(clock := Clock()))
    for _ in range(2):
        watch_staleness.observe_list({TWO: "7"})
    clock.now += 1
    assert watch_staleness.stale_seconds == 1


def test_pools_that_are_gone_are_forgotten():
    watch_staleness = WatchStaleness(clock=Clock())
    watch_staleness.observe_event(ONE, "1")
    watch_staleness.observe_list({})
    watch_staleness.observe_list({ONE: "1"})
    watch_staleness.observe_list({ONE: "1"})
    watch_staleness.observe_event(ONE, "1")
    watch_staleness.observe_list({ONE: "1"})
    assert watch_staleness.stale_seconds == 0


def test_what_this_process_wrote_is_no_news_and_counts_as_told():
    clock = Clock()
    watch_staleness = WatchStaleness(clock=clock)
    assert watch_staleness.observe_event(ONE, "1")
    watch_staleness.record_own_write(ONE, "2")
    assert not watch_staleness.observe_event(ONE, "2")
    assert watch_staleness.observe_event(TWO, "2"), "of another pool"
    for _ in range(3):
        watch_staleness.observe_list({ONE: "2", TWO: "2"})
        clock.now += 10
        assert watch_staleness.stale_seconds == 0
    assert watch_staleness.observe_event(ONE, "3")
