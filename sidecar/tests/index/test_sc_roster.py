"""Each node knows the nodes of its pool, however many there are, and a heartbeat reads what changed."""

from __future__ import annotations

import pytest
from sc_redis import Servers

from kvpool_sidecar.index.base import IndexAnswer, NodeInfo, RosterChange
from kvpool_sidecar.index.live_nodes import LiveNodes
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.redis_roster import RedisRoster
from kvpool_testing.index import A, B

MANY = 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("roster")) as servers:
        yield servers.make("index")


@pytest.fixture
def connect(server):
    made = []

    def make():
        index = RedisIndex(f"redis://{server.endpoint}/0", lease_s=60, timeout_s=10, slow_timeout_s=10)
        made.append(index)
        return index

    server.client.flushall()
    yield make
    for index in made:
        index.close()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def readers(connect):
    """Rosters of `count` nodes, all read."""

    def make(count, clock):
        rosters = [RedisRoster(connect()._topology, 15.0, clock, lambda n=n: n / count) for n in range(count)]
        for roster in rosters:
            roster.refresh()
        return rosters

    return make


def info(number: int) -> NodeInfo:
    return NodeInfo(f"node-{number}", f"10.0.{number >> 8}.{number & 255}", 7421, number)


def play(server, numbers) -> None:
    """Register nodes as a release does that publishes no changes."""
    with server.client.pipeline(transaction=False) as pipe:
        for number in numbers:
            pipe.set(f"n:{number}", info(number).dumps())
        pipe.set("nodes", max(numbers) - 1)
        pipe.execute()


def collect(rosters, clock, wanted, *, heartbeats=200) -> None:
    """Heartbeats until `wanted(change)` was true for each of the readers."""
    missing = list(rosters)
    for _ in range(heartbeats):
        clock.now += 5
        missing = [roster for roster in missing if not wanted(roster.refresh())]
        if not missing:
            return
    pytest.fail(f"{len(missing)} readers did not see it in {heartbeats} heartbeats")


def test_all_nodes_of_a_large_pool_are_members(server, connect):
    play(server, range(1, MANY + 1))
    index = connect()
    assert len(index.members()) == MANY
    assert index.live_nodes().nodes[4711] == info(4711)


def test_a_large_roster_is_read_once_and_at_a_random_time(server, connect):
    play(server, range(1, MANY + 1))
    clock = Clock()
    roster = RedisRoster(connect()._topology, 15.0, clock, lambda: 0.5)
    assert roster.refresh() == RosterChange({}, frozenset())
    clock.now += 0.5 * MANY * 0.03
    assert roster.refresh() == RosterChange({n: info(n) for n in range(1, MANY + 1)}, frozenset())
    before = server.client.info("stats")
    for _ in range(100):
        clock.now += 5
        assert roster.refresh() == RosterChange({}, frozenset())
    after = server.client.info("stats")
    assert after["total_net_output_bytes"] - before["total_net_output_bytes"] < 100 * 3000
    assert after["total_commands_processed"] - before["total_commands_processed"] < 100 * 13


def test_nodes_that_join_leave_and_drain_are_seen_at_the_next_heartbeat(connect):
    mine, other = connect(), connect()
    assert mine.refresh_roster() == RosterChange({}, frozenset())
    number = other.join(A)
    assert mine.refresh_roster() == RosterChange({number: A}, frozenset())
    leaving = A._replace(leaving=True)
    assert other.renew(number, leaving)
    assert mine.refresh_roster() == RosterChange({number: leaving}, frozenset())
    assert other.renew(number, leaving)
    assert mine.refresh_roster() == RosterChange({}, frozenset())
    other.leave(number, leaving)
    assert mine.refresh_roster() == RosterChange({}, frozenset({number}))


def test_a_node_that_ends_without_a_word_is_found_and_reported(server, readers):
    play(server, range(1, 101))
    clock = Clock()
    rosters = readers(5, clock)
    server.client.delete("n:50")
    collect(rosters, clock, lambda change: 50 in change.gone)
    assert int(server.client.get("n:version")) == 1  # by one of those that found it


def test_a_node_that_publishes_nothing_is_found(server, readers):
    """During an upgrade, nodes of both releases register."""
    play(server, range(1, 101))
    clock = Clock()
    rosters = readers(5, clock)
    play(server, [101])
    collect(rosters, clock, lambda change: change.alive.get(101) == info(101))
    server.client.set("n:7", info(7)._replace(leaving=True).dumps())
    collect(rosters, clock, lambda change: 7 in change.alive)


def test_an_emptied_index_takes_no_node_that_renews_its_lease_out_of_the_roster(server, connect, readers):
    index, clock = connect(), Clock()
    joined = {index.join(info(n)): info(n) for n in range(1, 51)}
    (roster,) = readers(1, clock)
    server.client.flushall()
    seen = [roster.refresh()]
    for number, own in joined.items():
        if own != info(50):
            assert index.renew(number, own)
        clock.now += 0.1
        seen.append(roster.refresh())
    assert [change.gone for change in seen if change.gone] == []
    collect([roster], clock, lambda change: change.gone == {number})
    assert len(index.members()) == 49


def test_a_reader_that_is_far_behind_reads_everything(server, readers):
    play(server, range(1, 101))
    clock = Clock()
    (roster,) = readers(1, clock)
    server.client.set("n:version", 5000)
    server.client.delete("n:9")
    assert roster.refresh().gone == {9}


def test_a_change_that_was_counted_but_never_named_leads_to_reading_everything(server, readers):
    play(server, range(1, 101))
    clock = Clock()
    (roster,) = readers(1, clock)
    server.client.incr("n:version")
    play(server, range(1, 102))
    collect([roster], clock, lambda change: 101 in change.alive, heartbeats=6)


def test_a_roster_that_is_not_read_any_more_ends():
    nodes = LiveNodes(15.0)
    nodes.note_roster(RosterChange({1: A, 2: B}, frozenset()), 100.0)
    assert nodes.all(114.0) == {1: A, 2: B}
    assert nodes.get(1, 114.0) == (A, True)
    assert nodes.all(116.0) == {}
    assert nodes.get(1, 116.0) == (A, False)
    nodes.note_roster(RosterChange({}, frozenset({2})), 120.0)
    assert nodes.all(121.0) == {1: A}


def test_a_node_that_was_not_reached_stays_in_the_roster_and_is_queried_again():
    nodes = LiveNodes(15.0)
    nodes.note_roster(RosterChange({1: A}, frozenset()), 100.0)
    nodes.note_moved(A, 101.0)
    assert nodes.get(1, 102.0) == (A, False)
    assert nodes.all(102.0) == {1: A}  # it is probed
    assert nodes.take_strangers() == [1]
    moved = A._replace(host="10.0.0.9")
    nodes.note_answer([1], IndexAnswer([], {1: moved}), 103.0)
    assert nodes.get(1, 104.0) == (moved, True)
    assert nodes.all(104.0) == {1: moved}
    assert nodes.take_strangers() == []
