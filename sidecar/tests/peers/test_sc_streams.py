"""Several connections to a peer, dialled ahead; what a client that gives up costs the peer; whose turn it is there."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from sc_nodes import MIB, fresh_address, wait_for
from sc_raw import block_id, payload

from kvpool.errors import PoolUnavailableError
from kvpool.protocol import wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import preconnect as spares
from kvpool_sidecar.peers import tcp
from kvpool_sidecar.peers.connection import PeerConnection, dial
from kvpool_sidecar.peers.preconnect import Preconnector
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.resilience.fair_queue import FairQueue
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import key, put

SECRET = b"secret of the pool"
PEER = NodeInfo("b", "127.0.0.1", 1, 1)


class Dialled(PeerConnection):
    """One end of a socket pair; `far` is the peer's."""

    def __init__(self) -> None:
        ours, self.far = socket.socketpair()
        super().__init__(ours, bytes(32))


class Dials:
    def __init__(self) -> None:
        self.links: list[Dialled] = []
        self.threads: list[str] = []
        self.broken = False

    def __call__(self, peer, timeout_s) -> Dialled:
        self.threads.append(threading.current_thread().name)
        if self.broken:
            raise PoolUnavailableError("away")
        self.links.append(Dialled())
        return self.links[-1]


@pytest.fixture
def dials():
    one = Dials()
    yield one
    for link in one.links:
        link.close()
        link.far.close()


@pytest.fixture
def pool(dials):
    made = []

    def make(count: int, **kw) -> Preconnector:
        made.append(Preconnector(dials, count, **kw))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_only_the_first_request_waits_for_a_dial(pool, dials):
    ahead = pool(2)
    used = [ahead(PEER, 1.0)]
    for _ in range(20):
        wait_for(lambda: ahead.ready(PEER) == 2, "two lie ready")
        used.append(ahead(PEER, 1.0))
    assert len({id(link) for link in used}) == 21  # no connection is ever given to two
    mine = threading.current_thread().name
    assert dials.threads.count(mine) == 1


def test_a_spare_that_the_peer_has_closed_is_not_given_out(pool, dials):
    ahead = pool(2)
    first = ahead(PEER, 1.0)
    wait_for(lambda: ahead.ready(PEER) == 2, "two lie ready")
    for link in dials.links[1:]:
        link.far.close()
    fresh = ahead(PEER, 1.0)
    assert fresh.alive
    assert fresh is not first


def test_spares_do_not_grow_old_nor_many(pool, dials, monkeypatch):
    monkeypatch.setattr(spares, "MAX_PEERS", 3)
    now = [0.0]
    ahead = pool(1, clock=lambda: now[0])
    peers = [NodeInfo(f"n{n}", "127.0.0.1", n + 1, 1) for n in range(5)]
    for peer in peers:
        ahead(peer, 1.0)
        wait_for(lambda peer=peer: ahead.ready(peer) == 1, "one lies ready")
    assert [ahead.ready(peer) for peer in peers] == [0, 0, 1, 1, 1]
    now[0] += 1000
    known = len(dials.links)
    ahead(peers[4], 1.0)
    assert len(dials.links) > known  # the old one was thrown away
    wait_for(lambda: ahead.ready(peers[4]) == 1 and ahead.ready(peers[2]) == 0, "the old ones are closed")


def test_a_peer_that_is_away_is_an_error_and_no_thread_spins(pool, dials):
    ahead = pool(2)
    dials.broken = True
    for _ in range(3):
        with pytest.raises(PoolUnavailableError):
            ahead(PEER, 0.1)
    assert len(dials.threads) == 3  # nothing is dialled ahead for a peer that could not be reached
    dials.broken = False
    assert ahead(PEER, 1.0).alive
    wait_for(lambda: ahead.ready(PEER) == 2, "two lie ready")
    dials.broken = True
    ahead.close()
    assert all(link._socket.fileno() < 0 for link in dials.links[1:])


def test_after_close_nothing_is_kept(pool, dials):
    ahead = pool(2)
    ahead.close()
    assert ahead(PEER, 1.0).alive
    time.sleep(0.05)
    assert ahead.ready(PEER) == 0
    assert len(dials.links) == 1


def test_a_large_load_comes_over_several_connections_and_a_small_one_over_one(cluster):
    c = cluster()
    a, b = c.node("a"), c.node("b")
    blocks = {block_id(n): payload(n, 8 * MIB) for n in range(4)} | {block_id(n): payload(n) for n in range(10, 14)}
    with a.connect() as raw:
        raw.put(blocks)
    a.wait_announced()
    with b.connect() as raw:
        names = list(blocks)
        large = raw.open(names[:4])
        assert [entry.tier for entry in large] == [wire.Tier.PEER] * 4
        assert sorted(entry.stream for entry in large) == [1, 1, 2, 2]
        assert all(raw.read(entry) is not None for entry in large)
        small = raw.open(names[4:])
        assert {entry.stream for entry in small} == {1}
        assert [raw.read(entry)[4096:] for entry in small] == [blocks[name] for name in names[4:]]
    with b.connect() as raw:  # another client connection: other peer connections, dialled ahead
        assert [got == blocks[name] for name, got in zip(names, raw.get(names), strict=True)] == [True] * 8


@pytest.fixture
def store():
    one = MemoryStore(1 << 30)
    yield one
    one.close()


@pytest.fixture
def serving(store):
    made = []

    def make(queue=None, **kw) -> PeerServer:
        made.append(PeerServer(fresh_address(), 0, store, Stats(), PeerServerOptions(secret=SECRET, queue=queue), **kw))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


def connect(server: PeerServer) -> PeerConnection:
    return dial(*server._listener.getsockname(), secret=SECRET, timeout_s=5)


def test_a_client_that_gives_up_costs_the_peer_no_more_than_what_is_on_the_way(serving, store):
    server = serving()
    for n in range(40):
        put(store, n, 8 * MIB)
    one = connect(server)
    one.request([key(n) for n in range(40)])
    size = one.response_size(time.monotonic() + 5)
    tcp.receive(one._socket, size, time.monotonic() + 5)
    one.close()
    wait_for(lambda: server.connections == 0, "the peer has noticed")
    assert server._stats.whole("peer_served")["blocks"] <= 4  # of 40: what the two sockets hold


def test_what_goes_to_peers_is_bounded_and_in_turn(serving, store):
    lane = FairQueue(64 * MIB)
    server = serving(queue=lane)
    put(store, 1, 16 * MIB)
    readers = [connect(server) for _ in range(5)]
    for reader in readers:
        reader.request([key(1)])  # and no one reads
    wait_for(lambda: lane.waiting == 2, "three are served, two wait")
    assert lane.held_bytes == 48 * MIB
    for reader in readers:  # whoever reads makes room; a grant that runs out does, too
        size = reader.response_size(time.monotonic() + 10)
        if size:
            tcp.receive(reader._socket, size, time.monotonic() + 10)
        reader.close()
    wait_for(lambda: server.connections == 0 and lane.held_bytes == 0 and not lane.waiting, "all is given back")


def test_streams_that_a_tenant_does_not_read_fail_no_load_of_another(serving, store, monkeypatch):
    """24 held streams of one tenant: a load of another one, of the same node, is served in the meantime."""
    monkeypatch.setattr("kvpool_sidecar.peers.server._MAX_QUEUED_S", 0.05)
    monkeypatch.setattr("kvpool_sidecar.resilience.fair_queue._GRACE_S", 60.0)
    server = serving(queue=FairQueue(64 * MIB))
    put(store, 1, 16 * MIB - 4096)
    held = [connect(server) for _ in range(24)]
    for one in held:
        one.lane = 7
        one.request([key(1)])
    wait_for(lambda: server._stats.whole("refused").get("busy-peers") == 21, "three are served, the rest is refused")
    for lane, expected in ((7, 0), (8, 16 * MIB), (8, 16 * MIB)):
        other = connect(server)
        other.lane = lane
        other.request([key(1)])
        size = other.response_size(time.monotonic() + 10)
        assert size == expected
        if size:
            tcp.receive(other._socket, size, time.monotonic() + 10)
            wait_for(lambda: len(server._queue._grants) == 3, "its grant has ended")
        other.close()
    for one in held:
        one.close()


def test_a_peer_whose_turn_does_not_come_gets_a_miss_and_the_index_is_not_told(serving, store, monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.peers.server._MAX_QUEUED_S", 0.01)
    monkeypatch.setattr("kvpool_sidecar.resilience.fair_queue._GRACE_S", 60.0)
    absent = []
    lane = FairQueue(64 * MIB)
    server = serving(queue=lane, on_absent=absent.append)
    put(store, 1, 16 * MIB)
    held = [lane.acquire("another", 16 * MIB, 0.0) for _ in range(3)]
    assert all(held)
    assert lane.acquire("a third", 16 * MIB, 0.0)
    one = connect(server)
    one.request([key(1)])
    assert one.response_size(time.monotonic() + 5) == 0
    assert absent == []
    lane.release(held[0])
    one.request([key(1)])
    assert one.response_size(time.monotonic() + 5) > 16 * MIB
    assert server._stats.whole("refused") == {"busy-peers": 1}
    one.close()
