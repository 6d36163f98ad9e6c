"""Pauses of unreachable peers grow, end with a probe that reads, and each change is logged once."""

from __future__ import annotations

import pytest

from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.peer_reachability import MAX_ROWS, PeerReachability

A = NodeInfo("a", "127.0.0.1", 7421, 1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return PeerReachability(clock, jitter=lambda: 0.5)


def fail_probes(table, clock, count: int) -> list[float]:
    """The pause after each failed probe."""
    pauses = []
    for _ in range(count):
        peer, wait = table.next_probe([A])
        clock.now += max(0.0, wait)
        table.mark_down(peer, "timeout", probed=True)
        start = clock.now
        while table.is_down(A, clock.now):
            clock.now += 0.5
        pauses.append(clock.now - start)
        clock.now = start
    return pauses


def test_pauses_double_up_to_a_minute(table, clock):
    assert fail_probes(table, clock, 7) == [2, 4, 8, 16, 32, 60, 60]


def test_engines_that_fail_during_a_pause_do_not_prolong_it(table, clock):
    for _ in range(50):
        table.mark_down(A)
    assert table.is_down(A, clock.now + 1.9)
    assert not table.is_down(A, clock.now + 2.1)


def test_a_peer_is_probed_before_its_pause_ends_and_kept_paused_meanwhile(table, clock):
    table.mark_down(A)
    peer, wait = table.next_probe([A])
    assert (peer, 0 < wait < 2) == (A, True)
    clock.now += wait
    table.hold(A, 5.0)
    assert table.is_down(A, clock.now + 4.9)
    table.mark_up(A)
    assert not table.is_down(A, clock.now)


def test_a_probe_that_reads_resets_the_pause(table, clock):
    fail_probes(table, clock, 5)
    table.mark_up(A)
    assert fail_probes(table, clock, 2) == [2, 4]


def test_each_change_is_logged_once(table, clock, caplog):
    fail_probes(table, clock, 6)
    assert [r.getMessage() for r in caplog.records] == [
        "peer a at 127.0.0.1 cannot be read from (timeout): its blocks are misses [KVP0402]"
    ]
    table.mark_up(A)
    table.mark_up(A)
    assert len(caplog.records) == 2
    assert "can be read from again" in caplog.records[1].getMessage()


def test_rows_name_the_unreachable_first_and_are_bounded(table, clock):
    peers = [A._replace(node=f"n{n:03}", host=f"127.0.1.{n}") for n in range(MAX_ROWS + 20)]
    table.next_probe(peers)
    for peer in peers[:5]:
        table.mark_up(peer, len(peers))
    for _ in range(2):
        table.mark_down(peers[-1], "refused", probed=True)
    table.mark_down(peers[-2], probed=True)  # once: not confirmed
    status = table.status()
    assert {k: v for k, v in status.items() if k != "rows"} == {
        "peers": 84,
        "reachable": 5,
        "unreachable": 1,
        "unverified": 78,
    }
    assert len(status["rows"]) == MAX_ROWS
    assert status["rows"][0] == {
        "node": "n083",
        "address": "127.0.1.83:7421",
        "state": "unreachable",
        "reason": "refused",
        "seconds": 0,
    }


def test_many_peers_are_probed_less_often(table, clock):
    peers = [A._replace(node=f"n{n}", host=f"10.0.{n // 250}.{n % 250}") for n in range(1000)]
    table.next_probe(peers)
    for peer in peers:
        table.mark_up(peer, len(peers))
    _, wait = table.next_probe(peers)
    assert wait >= 1000 * 2 * 0.8


def test_peers_whose_lease_ended_are_forgotten(table, clock):
    fail_probes(table, clock, 3)
    assert table.next_probe([])[0] is None
    assert table.status() == {"peers": 0, "reachable": 0, "unreachable": 0, "unverified": 0, "rows": []}
