"""The pace of announcements follows the index, and the journal of changes stays small."""

from __future__ import annotations

from kvpool_sidecar.index.journal import Journal
from kvpool_sidecar.index.pace import AdaptivePace


def rate_after(pace, *seconds: float, times: int = 1) -> float:
    for _ in range(times):
        for one in seconds:
            pace.note(one)
    return pace.rate


def test_an_index_that_answers_soon_is_told_faster():
    assert rate_after(AdaptivePace(), 0.002, times=100) > 100_000


def test_one_slow_answer_among_fast_ones_changes_nothing():
    assert rate_after(AdaptivePace(), 0.002, 0.002, 0.5, times=50) > 100_000


def test_an_index_that_queues_is_told_slower_and_recovers():
    pace = AdaptivePace()
    fast = rate_after(pace, 0.002, times=20)
    slow = rate_after(pace, 0.1, times=40)
    assert slow < fast / 100
    assert rate_after(pace, 0.002, times=80) >= fast


def test_a_distant_index_is_not_taken_for_a_slow_one():
    assert rate_after(AdaptivePace(), 0.07, times=100) > 100_000


def test_nodes_that_share_a_server_settle_below_its_limit():
    """500 nodes write to a server that does 100,000 blocks a second; its queue is what they wait for."""
    paces = [AdaptivePace() for _ in range(500)]
    queued, shares = 0.0, []
    for second in range(400):
        sent = sum(min(pace.rate, 2400.0) for pace in paces)
        queued = max(0.0, queued + sent - 100_000)
        queued = min(queued, 500 * 256)  # each waits for its batch
        for pace in paces:
            pace.note(0.002 + queued / 100_000)
        if second >= 200:
            shares.append(sent / 100_000)
    assert 0.3 < sum(shares) / len(shares) < 1.2


def test_the_pace_never_falls_to_nothing():
    pace = AdaptivePace()
    for _ in range(100):
        pace.fail()
    assert pace.pause_s(1, 0.0) <= 0.1


def test_a_journal_keeps_the_latest_state_of_each_block():
    journal = Journal(10)
    journal.put({b"a": 1, b"b": 2})
    journal.put({b"a": None, b"b": 3})
    assert journal.first(9) == {b"a": None, b"b": 3}
    assert len(journal) == 2
    assert journal.announcements == 1


def test_what_changed_while_it_was_published_stays():
    journal = Journal(10)
    journal.put({b"a": 1, b"b": 2})
    taken = journal.first(9)
    journal.put({b"a": None})
    journal.done(taken)
    assert journal.first(9) == {b"a": None}


def test_a_full_journal_drops_what_is_new_and_says_so_only_for_blocks_to_announce():
    journal = Journal(3)
    journal.put({b"a": 1, b"b": 2, b"c": 3, b"d": None})
    assert not journal.is_incomplete
    journal.put({b"a": 4, b"b": None})
    assert not journal.is_incomplete
    journal.put({b"e": 5})
    assert journal.is_incomplete
    assert journal.first(9) == {b"a": 4, b"b": None, b"c": 3}


def test_withdrawals_and_announcements_share_a_batch():
    journal = Journal(1000)
    journal.put({b"%d" % n: None for n in range(100)})
    journal.put({b"x%d" % n: n for n in range(100)})
    batch = journal.first(20)
    assert sum(length is None for length in batch.values()) == 10
    assert len(batch) == 20
    assert set(journal.first(20, only_withdrawals=True).values()) == {None}
