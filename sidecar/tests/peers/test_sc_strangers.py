"""Strangers that connect to the peer port and say nothing do not keep a node's peers out."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import pytest
from sc_nodes import MIB, PEER_PORT, fresh_address, wait_for
from sc_raw import Raw, block_id, payload

from kvpool.errors import KVPoolError
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import unproven
from kvpool_sidecar.peers.connection import dial
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.peers.unproven import UnprovenConnections
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import key, put

SECRET = b"secret of the pool"
STRANGERS, TRIES, BLOCKS = 80, 12, 16


class Strangers:
    """Connections that say nothing, each made again as soon as it is closed; `hosts` are their own addresses."""

    def __init__(self, address: tuple[str, int], hosts: list[str]) -> None:
        self._address = address
        self._stop = threading.Event()
        self.renewed = itertools.count()
        sources = itertools.islice(itertools.cycle(hosts), STRANGERS)
        self._threads = [threading.Thread(target=self._renew, args=(host,), daemon=True) for host in sources]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _renew(self, host: str) -> None:
        while not self._stop.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._address, timeout=0.5, source_address=(host, 0)) as sock,
            ):
                next(self.renewed)
                while not self._stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not sock.recv(4096):
                            break
            self._stop.wait(0.005)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pair():
    made = []

    def make() -> socket.socket:
        made.append(socket.socket())
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_oldest_connection_of_an_address_makes_room_and_no_address_has_all_of_it(pair):
    clock = Clock()
    room = UnprovenConnections(set, clock)
    first = pair()
    assert room.enter(first, "10.0.0.1") == (True, None)
    clock.now += 1
    others = [pair() for _ in range(unproven._OTHERS_PER_ADDRESS - 1)]
    assert all(room.enter(sock, "10.0.0.1") == (True, None) for sock in others)
    assert room.enter(pair(), "10.0.0.1") == (True, first)
    assert room.enter(pair(), "10.0.0.1") == (False, None)  # the oldest has not had its time yet
    assert room.enter(pair(), "10.0.0.2") == (True, None)
    assert not room.leave(first)
    assert room.leave(others[0])
    assert room.enter(pair(), "10.0.0.1") == (True, None)


def test_strangers_of_many_addresses_leave_room_for_addresses_of_the_pool(pair):
    clock = Clock()
    room = UnprovenConnections(lambda: {"10.0.0.1"}, clock)
    for n in range(200):
        clock.now += 0.001
        room.enter(pair(), f"10.1.0.{n}")
    assert len(room) == unproven._PER_ROOM
    mine = [pair() for _ in range(unproven._KNOWN_PER_ADDRESS)]
    assert all(room.enter(sock, "10.0.0.1") == (True, None) for sock in mine)
    assert room.enter(pair(), "10.0.0.1") == (True, mine[0])  # without a pause: no stranger has this address


def test_a_connection_keeps_its_place_while_it_begins_tls(pair):
    clock = Clock()
    room = UnprovenConnections(set, clock)
    plain, tls = pair(), pair()
    room.enter(plain, "10.0.0.1")
    clock.now += 1
    for _ in range(unproven._OTHERS_PER_ADDRESS - 1):
        room.enter(pair(), "10.0.0.1")
    room.replace(plain, tls)
    assert room.enter(pair(), "10.0.0.1") == (True, tls)


@pytest.mark.parametrize("sources", [1, STRANGERS], ids=["one address", "an address each"])
def test_a_peer_is_served_beside_silent_strangers(sources):
    store, stats = MemoryStore(1 << 30), Stats()
    put(store, 1)
    options = PeerServerOptions(secret=SECRET, roster=lambda: {"127.0.0.1"})
    server = PeerServer(fresh_address(), 0, store, stats, options)
    server.start()
    address = server._listener.getsockname()
    try:
        with Strangers(address, [f"127.9.{sources}.{n + 1}" for n in range(sources)]):
            wait_for(lambda: stats.whole("refused").get("peer-connections", 0) > STRANGERS, "the strangers renew")
            for _ in range(TRIES):
                link = dial(*address, secret=SECRET, timeout_s=10)
                link.request([key(1)])
                assert link.response_size(time.monotonic() + 10) > 0
                link.close()
    finally:
        server.stop()
        store.close()


def test_who_says_nothing_within_a_second_is_disconnected_and_who_greets_has_longer():
    store, stats = MemoryStore(1 << 30), Stats()
    server = PeerServer(fresh_address(), 0, store, stats, PeerServerOptions(secret=SECRET))
    server.start()
    try:
        silent = socket.create_connection(server._listener.getsockname(), timeout=30)
        greets = socket.create_connection(server._listener.getsockname(), timeout=30)
        greets.sendall(b"K")
        while silent.recv(4096):
            pass
        assert len(server._unproven) == 1
        silent.close()
        greets.close()
    finally:
        server.stop()
        store.close()


def test_every_block_of_a_peer_is_loaded_in_every_try_beside_silent_strangers(cluster):
    both = cluster()
    a = both.node("a", shared=None)
    b = both.node("b", shared=None)
    names = [block_id(n) for n in range(BLOCKS)]
    with Raw(a.sockets["team-a"]) as raw:
        raw.put({name: payload(n, MIB // 4) for n, name in enumerate(names)})
    a.wait_announced()
    with Strangers((a.address, PEER_PORT), ["127.9.8.7"]) as strangers:
        wait_for(lambda: next(strangers.renewed) > STRANGERS, "the strangers have connected")
        for _ in range(TRIES):
            with Raw(b.sockets["team-a"], timeout=30) as raw:  # a connection of its own to the peer
                wait_for(lambda raw=raw: 0 not in raw.lookup(names), "the peer's blocks are found")
                loaded = [None]
                with contextlib.suppress(KVPoolError):
                    loaded = raw.get(names, ms=10_000)
                assert loaded == [payload(n, MIB // 4) for n in range(BLOCKS)]
