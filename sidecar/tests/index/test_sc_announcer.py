"""A node keeps the index true to itself, and asks it no more than needed."""

from __future__ import annotations

import collections
import os
import threading
import time
from types import SimpleNamespace

import pytest
from sc_nodes import wait_for

from kvpool.errors import RetryableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index.base import IndexFullError, NodeInfo
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.registration import IndexRegistration
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import key, put

A = NodeInfo("a", "127.0.0.1", 1, 11)
B = NodeInfo("b", "127.0.0.2", 2, 22)


class CountingIndex(MemoryIndex):
    """Counts calls; `away` makes them fail."""

    def __init__(self, **kw):
        super().__init__(**kw)
        self.away = self.full = False
        self.asked = self.located = 0
        self.questions: list[int] = []
        self.batches: list[int] = []

    def _check(self):
        if self.away:
            raise RetryableError("away")

    def query(self, keys, numbers):
        self._check()
        self.asked += 1
        self.located += bool(keys)
        self.questions.append(len(keys))
        return super().query(keys, numbers)

    def renew(self, number, info):
        self._check()
        return super().renew(number, info)

    def announce(self, blocks):
        self._check()
        if blocks and self.full:
            raise IndexFullError("full")
        if blocks:
            self.batches.append(len(blocks))
        super().announce(blocks)


@pytest.fixture
def index():
    return CountingIndex(lease_s=5)


@pytest.fixture
def store():
    store = MemoryStore(1 << 30)
    yield store
    store.close()


@pytest.fixture
def announcer(index, store):
    made = []

    def make(**kw):
        one = IndexRegistration(index, A, store, **{"scanned": lambda: True, "lease_s": 0.3, **kw})
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.stop()


def found(index, *blocks):
    return [bool(records) for records in index.locate([key(n) for n in blocks])]


def test_everything_is_announced_at_the_start_and_then_what_comes_and_goes(index, store, announcer):
    put(store, 1)
    one = announcer()
    wait_for(lambda: found(index, 1) == [True], "the first is announced")
    put(store, 2)
    one.announce(key(2), 20_000)
    wait_for(lambda: found(index, 2) == [True], "the second is announced")
    store.delete(key(1))
    one.withdraw([key(1)])
    wait_for(lambda: found(index, 1, 2) == [False, True], "the first is withdrawn")
    assert one.status().announced == 1


def test_nothing_is_announced_before_the_drive_is_scanned(index, store, announcer):
    put(store, 1)
    scanned = []
    one = announcer(scanned=lambda: bool(scanned))
    wait_for(lambda: one.status().connected, "connected")
    assert found(index, 1) == [False]
    scanned.append(1)
    wait_for(lambda: found(index, 1) == [True], "announced after the scan")


def test_an_emptied_index_is_told_everything_again(index, store, announcer):
    for n in range(5):
        put(store, n)
    one = announcer()
    wait_for(lambda: one.status().announced == 5, "announced")
    epoch = one.status().epoch
    index.flush()
    wait_for(lambda: one.status().epoch != epoch and one.status().announced == 5, "announced again")
    assert found(index, *range(5)) == [True] * 5


def test_what_happens_while_the_index_is_away_is_told_later(index, store, announcer):
    put(store, 1)
    one = announcer()
    wait_for(lambda: one.status().announced == 1, "announced")
    index.away = True
    put(store, 2)
    one.announce(key(2), 20_000)
    store.delete(key(1))
    one.withdraw([key(1)])
    wait_for(lambda: not one.status().connected, "noticed")
    index.away = False
    wait_for(lambda: found(index, 1, 2) == [False, True], "told")


def test_a_journal_that_overflows_keeps_its_changes_and_the_rest_is_found_by_comparing(
    index, store, announcer, monkeypatch
):
    monkeypatch.setattr("kvpool_sidecar.index.announcer._MAX_JOURNAL", 10)
    put(store, 100)
    one = announcer()
    wait_for(lambda: one.status().announced == 1, "announced")
    index.away = True
    for n in range(30):
        put(store, n)
        one.announce(key(n), 20_000)
    assert len(one._announcer._journal) == 10
    index.batches.clear()
    index.away = False
    wait_for(lambda: found(index, *range(30)) == [True] * 30, "all announced")
    assert index.batches[0] == 10  # the journal comes first


def test_what_was_not_told_while_all_was_announced_is_told_later(index, store, announcer):
    """The index goes away in the middle and comes back as it was: the same epoch."""
    for n in range(30):
        put(store, n)
    one = announcer(keys_per_s=25600)
    wait_for(lambda: found(index, *range(30)) == [True] * 30, "all announced")
    index.away = True
    one._announcer.restart(one.number, A.generation)
    wait_for(lambda: not one.status().connected, "it notices")
    index.away = False
    index.withdraw(one.number, [key(n) for n in range(30)])
    wait_for(lambda: found(index, *range(30)) == [True] * 30, "all announced again")


def test_news_does_not_wait_for_a_rebuild(index, store, announcer):
    for n in range(600):
        put(store, n, 100)
    one = announcer(keys_per_s=1)
    wait_for(lambda: sum(index.batches) == 256, "the first batch")
    put(store, 1000)
    one.announce(key(1000), 20_000)
    wait_for(lambda: found(index, 1000) == [True], "announced immediately; the next batch comes in minutes")
    assert sum(index.batches) == 257


def test_a_lease_is_kept_while_announcements_are_slow(index, store, announcer):
    lasting, released = threading.Event(), threading.Event()
    announce = index.announce

    def slow(blocks):
        lasting.set()
        released.wait(60)
        announce(blocks)

    index.announce = slow
    index._lease_s = 0.3
    put(store, 1)
    one = announcer()
    assert lasting.wait(60)
    number, seen = one.number, index._leases[one.number][1]
    for _ in range(5):
        wait_for(lambda seen=seen: index._leases[number][1] > seen, "a heartbeat")
        seen = index._leases[number][1]
    released.set()


def test_announcing_everything_goes_at_a_bounded_rate(index, store, announcer):
    for n in range(600):
        put(store, n, 100)
    started = time.monotonic()
    announcer(keys_per_s=2560)
    wait_for(lambda: sum(index.batches) >= 600, "all announced")
    assert max(index.batches) <= 256
    assert time.monotonic() - started >= 0.19  # two pauses of a tenth


def test_the_more_nodes_the_slower_each_announces(index, store, announcer):
    for n in range(600):
        put(store, n, 100)
    started = time.monotonic()
    announcer(keys_per_s=25600, resolver=SimpleNamespace(live_peers=9, refresh=lambda: None))
    wait_for(lambda: sum(index.batches) >= 600, "all announced")
    assert time.monotonic() - started >= 0.19


def test_while_the_index_is_full_what_goes_is_told_and_what_comes_is_told_later(index, store, announcer, monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.index.announcer._FULL_S", 0.2)
    put(store, 1)
    one = announcer()
    wait_for(lambda: one.status().announced == 1, "announced")
    index.full = True
    put(store, 2)
    one.announce(key(2), 20_000)
    wait_for(lambda: one.status().full, "noticed")
    assert one.status().connected
    store.delete(key(1))
    one.withdraw([key(1)])
    wait_for(lambda: found(index, 1) == [False], "withdrawn")
    epoch = one.status().epoch
    number = one.number
    time.sleep(0.5)  # some heartbeats
    assert index.nodes([number])
    index.full = False
    wait_for(lambda: found(index, 2) == [True] and not one.status().full, "told")
    assert one.status().epoch == epoch


def test_a_node_whose_number_was_taken_gets_another_and_announces_again(index, store, announcer):
    put(store, 1)
    one = announcer()
    wait_for(lambda: one.status().announced == 1, "announced")
    before = one.number
    with index._lock:
        index._leases[before] = (B, index._clock() + 60)
    wait_for(lambda: one.number != before, "another number")
    wait_for(lambda: any(r.node == one.number for r in index.locate([key(1)])[0]), "announced under it")


def test_a_stopped_node_is_not_asked_any_more(index, store):
    one = IndexRegistration(index, A, store, scanned=lambda: True, lease_s=5)
    one.start()
    wait_for(lambda: one.status().connected, "connected")
    assert index.nodes([one.number])
    one.stop()
    assert index.nodes([one.number]) == {}


# -- asking


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def directory(index, clock):
    guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
    index._clock = clock
    return BlockResolver(index, guard, lambda: 9, lease_s=5, clock=clock)


def test_a_living_peer_is_found_and_remembered(index, directory):
    number = index.join(B)
    index.announce([(key(1), Record(number, 777, 22))])
    assert [f and (f.peer, f.payload_len) for f in directory.locate([key(1), key(2)], 1)] == [(B, 777), None]
    asked = index.located
    assert directory.locate([key(1)], 1)[0].number == number
    assert index.located == asked
    directory.invalidate(key(1))
    directory.locate([key(1)], 1)
    assert index.located == asked + 1


def test_what_is_remembered_ages(index, directory, clock):
    number = index.join(B)
    index.announce([(key(1), Record(number, 777, 22))])
    directory.locate([key(1)], 1)
    index.withdraw(number, [key(1)])
    clock.now += 4
    assert directory.locate([key(1)], 1)[0]
    clock.now += 60
    assert directory.locate([key(1)], 1) == [None]


def test_a_peer_that_leaves_is_asked_only_if_nobody_else_has_the_block(index, directory, clock):
    leaving, staying = index.join(B._replace(leaving=True)), index.join(A)
    index.announce([(key(1), Record(leaving, 777, 22))])
    assert directory.locate([key(1)], 1)[0].number == leaving
    assert directory.replicas([key(1)], 1) == [{"b"}]
    assert directory.replicas([key(1)], 1, staying=True) == [set()]
    index.announce([(key(1), Record(staying, 777, 11))])
    assert directory.locate([key(1)], 1)[0].number == staying  # though the other one was remembered
    assert directory.replicas([key(1)], 1, staying=True) == [{"a"}]


def test_a_node_that_is_drained_says_so_at_once_and_takes_it_back(index, store):
    announcer = IndexRegistration(index, A, store, scanned=lambda: True, lease_s=300)
    announcer.start()
    assert announcer.set_draining(leaving=True, timeout_s=10)
    assert [node.leaving for node in index.members()] == [True]
    assert announcer.set_draining(leaving=False, timeout_s=10)
    assert [node.leaving for node in index.members()] == [False]
    announcer.stop()


def test_what_a_node_says_of_itself_survives_older_and_newer_readers():
    assert NodeInfo.loads(A._replace(leaving=True).dumps()) == A._replace(leaving=True)
    assert NodeInfo.loads('{"node": "a", "host": "127.0.0.1", "port": 1, "generation": 11}') == A
    assert NodeInfo.loads('{"node": "a", "host": "127.0.0.1", "port": 1, "generation": 11, "leaving": "x"}') == A


@pytest.mark.parametrize("why", ["dead", "generation", "self", "down", "shunned"])
def test_entries_that_lead_nowhere_are_ignored(index, directory, clock, why):
    number = index.join(B)
    record = Record(9 if why == "self" else number, 777, 21 if why == "generation" else 22)
    index.announce([(key(1), record)])
    if why == "dead":
        index.leave(number, B)
    if why == "down":
        found = directory.locate([key(1)], 1)[0]
        directory.mark_down(found.peer)
    if why == "shunned":
        directory.blacklist(key(1), number)
    assert directory.locate([key(1)], 1) == [None]
    if why == "down":
        clock.now += 3
        assert directory.locate([key(1)], 1)[0]


def test_askers_spread_over_the_holders_of_a_block(index, clock):
    holders = [index.join(NodeInfo(f"holder-{n}", "127.0.0.1", 1 + n, 11)) for n in range(16)]
    blocks = [key(n) for n in range(16)]
    for number in holders:
        index.announce([(block, Record(number, 777, 11)) for block in blocks])
    asked = collections.Counter()
    guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
    for asker in range(20_000, 20_200):
        one = BlockResolver(index, guard, lambda asker=asker: asker, lease_s=5)
        chosen = [found.number for found in one.locate(blocks, 60)]
        assert len(set(chosen)) <= 4  # few connections
        asked.update(chosen)
    guard.close()
    assert set(asked) == set(holders)
    assert max(asked.values()) <= 1.5 * sum(asked.values()) / 16


def test_a_second_copy_is_found_when_the_first_leads_nowhere(index, directory):
    a, b = index.join(A), index.join(B)
    index.announce([(key(1), Record(a, 777, 11))])
    index.announce([(key(1), Record(b, 777, 22))])
    first = directory.locate([key(1)], 1)[0]
    directory.mark_down(first.peer)
    second = directory.locate([key(1)], 1)[0]
    assert {first.number, second.number} == {a, b}


def test_a_peer_that_was_not_reached_is_found_at_the_address_of_its_successor(index, directory, clock):
    number = index.join(B)
    index.announce([(key(1), Record(number, 777, 22))])
    directory.mark_down(directory.locate([key(1)], 1)[0].peer)
    successor = B._replace(host="127.0.0.99")
    assert index.join(successor) == number  # the same drive
    assert directory.locate([key(1)], 1) == [None]
    clock.now += 0.3  # long before the other address would be tried again, or the lease is over
    assert directory.locate([key(1)], 1)[0].peer == successor


def test_a_peer_whose_lease_has_ended_is_not_asked_and_one_that_returns_is(index, directory, clock):
    number = index.join(B)
    index.announce([(key(1), Record(number, 777, 22))])
    assert directory.locate([key(1)], 1)[0]
    clock.now += 6  # the lease is over
    assert directory.locate([key(1)], 1) == [None]
    index.join(B)
    clock.now += 1.1
    assert directory.locate([key(1)], 1)[0]


def test_while_the_index_is_away_what_is_remembered_is_used_and_the_rest_is_a_miss(index, directory):
    number = index.join(B)
    index.announce([(key(n), Record(number, 777, 22)) for n in (1, 2)])
    assert directory.locate([key(1)], 1)[0]
    index.away = True
    for _ in range(5):
        assert [bool(f) for f in directory.locate([key(1), key(2)], 1)] == [True, False]
    assert not directory.available


def test_a_slow_index_costs_its_own_timeout_and_not_the_callers(index):
    guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
    peers = BlockResolver(index, guard, lambda: 9, lease_s=5, lookup_s=0.05)
    index.query = lambda keys, numbers: time.sleep(1)
    started = time.monotonic()
    assert peers.locate([key(1)], 30) == [None]
    assert time.monotonic() - started < 0.9


def test_how_many_peers_are_alive_follows_the_index(index, directory, clock):
    own, other = 9, index.join(B)
    index.announce([(key(1), Record(other, 777, 22)), (key(2), Record(own, 777, 11))])
    assert directory.live_peers == 0
    directory.locate([key(1), key(2)], 1)
    assert directory.live_peers == 1
    index.leave(other, B)
    directory.refresh()
    assert directory.live_peers == 0
    index._leases[other] = (B, clock.now + 60)
    directory.refresh()
    assert directory.live_peers == 1


def test_random_values_in_the_index_lead_nowhere(index, directory):
    for n in range(50):
        index.announce([(key(n), Record(int.from_bytes(os.urandom(2), "little") or 1, 5, 5))])
    assert directory.locate([key(n) for n in range(50)], 1) == [None] * 50
