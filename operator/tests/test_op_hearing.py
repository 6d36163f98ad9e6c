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
    hearing = WatchStaleness(clock=clock)
    for version in ("1", "2", "3"):
        hearing.heard(ONE, version)
        for _ in range(3):
            clock.now += 10
            hearing.listed({ONE: version})
            assert hearing.deaf_s == 0


def test_a_change_that_was_just_made_may_still_be_under_way():
    clock = Clock()
    hearing = WatchStaleness(clock=clock)
    hearing.heard(ONE, "1")
    for version in ("2", "3", "4"):  # another one with every listing, each told a moment after it
        hearing.listed({ONE: version})
        hearing.heard(ONE, version)
        clock.now += 10
        assert hearing.deaf_s == 0


def test_a_change_that_is_listed_twice_and_never_told_is_missed_until_it_is_told():
    clock = Clock()
    hearing = WatchStaleness(clock=clock)
    hearing.heard(ONE, "1")
    hearing.listed({ONE: "2"})
    clock.now += 10
    hearing.listed({ONE: "2"})
    clock.now += 50
    hearing.listed({ONE: "2"})
    assert hearing.deaf_s == 50
    hearing.heard(ONE, "2")
    hearing.listed({ONE: "2"})
    assert hearing.deaf_s == 0


def test_a_new_pool_that_is_not_told_of_is_missed():
    hearing = WatchStaleness(clock=(clock := Clock()))
    for _ in range(2):
        hearing.listed({TWO: "7"})
    clock.now += 1
    assert hearing.deaf_s == 1


def test_pools_that_are_gone_are_forgotten():
    hearing = WatchStaleness(clock=Clock())
    hearing.heard(ONE, "1")
    hearing.listed({})
    hearing.listed({ONE: "1"})
    hearing.listed({ONE: "1"})
    hearing.heard(ONE, "1")
    hearing.listed({ONE: "1"})
    assert hearing.deaf_s == 0


def test_what_this_process_wrote_is_no_news_and_counts_as_told():
    clock = Clock()
    hearing = WatchStaleness(clock=clock)
    assert hearing.heard(ONE, "1")
    hearing.wrote(ONE, "2")
    assert not hearing.heard(ONE, "2")
    assert hearing.heard(TWO, "2"), "of another pool"
    for _ in range(3):
        hearing.listed({ONE: "2", TWO: "2"})
        clock.now += 10
        assert hearing.deaf_s == 0
    assert hearing.heard(ONE, "3")
