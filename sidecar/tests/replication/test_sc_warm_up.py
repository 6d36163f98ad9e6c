"""A node that joins is warmed: what is hot, roots first, within its bandwidth, and nothing that is not right."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_nodes import MIB, fresh_address, wait_for
from sc_raw import block_id, payload

from kvpool import config
from kvpool.errors import CorruptBlockError, ProtocolError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted, CorruptBlockReported
from kvpool_sidecar.blocks.popularity import HALF_LIFE_S, Popularity, roots_first
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.location_cache import ReplicaLocation
from kvpool_sidecar.peers import hottest
from kvpool_sidecar.peers.connection import dial
from kvpool_sidecar.peers.fetch import fetch_block
from kvpool_sidecar.peers.hottest import HotList, HotRow
from kvpool_sidecar.peers.server import PeerServer, PeerServerOptions
from kvpool_sidecar.replication.peer_copy import CopyRequest, CopyResult, Replicator
from kvpool_sidecar.replication.warm_up import is_cold, plan
from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key, put, read

SECRET = b"secret of the pool"
SIZE = 128 * 1024
FAST = 1 << 30


# -- what is hot


def test_what_is_found_more_often_is_hotter():
    heat = Popularity()
    heat.record_hits([key(1), key(2)], 0)
    heat.record_hits([key(1), key(3)], 0)
    heat.record_hits([key(3)], 0)
    heat.record_hits([key(3)], 0)
    assert [one.key for one in heat.hottest(9, 0)] == [key(1), key(3), key(2)]  # 1 precedes 3, which is hotter
    assert [one.score for one in heat.hottest(9, 0)] == [2, 3, 1]
    assert [one.key for one in heat.hottest(2, 0)] == [key(1), key(3)]


def test_heat_halves_with_time_also_over_years():
    heat = Popularity()
    for _ in range(8):
        heat.record_hits([key(1)], 0)
    heat.record_hits([key(2)], 3 * HALF_LIFE_S)
    assert [round(one.score, 6) for one in heat.hottest(9, 3 * HALF_LIFE_S)] == [1, 1]
    for hour in range(3, 500):
        heat.record_hits([key(3)], hour * HALF_LIFE_S)
    assert heat.hottest(1, 500 * HALF_LIFE_S)[0].key == key(3)
    heat.record_hits([key(4)], 1e9)
    assert heat.hottest(1, 1e9)[0] == (key(4), 1.0, None)


def test_heat_is_kept_of_the_latest_blocks_only():
    heat = Popularity(max_blocks=3)
    heat.record_hits([key(n) for n in range(5)], 0)
    assert len(heat) == 3
    assert {one.key for one in heat.hottest(9, 0)} == {key(2), key(3), key(4)}


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0, 100), max_size=30),
    st.dictionaries(st.integers(0, 30), st.integers(0, 30), max_size=30),
    st.integers(0, 40),
)
def test_each_comes_once_and_never_before_its_parents(heat, parents, count):
    heat = {key(n): h for n, h in heat.items()}
    parents = {key(n): key(p) for n, p in parents.items() if p < n}
    order = roots_first(heat, parents, count)
    assert len(order) == len(set(order)) == min(count, len(heat))
    place = {k: n for n, k in enumerate(order)}
    assert all(place[parents[k]] < n for k, n in place.items() if parents.get(k) in heat)


def test_a_circle_of_parents_ends():
    heat = {key(1): 1.0, key(2): 2.0}
    assert sorted(roots_first(heat, {key(1): key(2), key(2): key(1)}, 9)) == sorted(heat)


# -- the list on the wire

ROWS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 1 << 40), st.integers(0, 1 << 20).map(float)),
    max_size=20,
    unique_by=lambda t: t[0],
)


@given(ROWS, st.integers(0, 20))
def test_a_list_survives_the_wire(rows, parent):
    made = [
        HotRow(key(n), length, heat, key(rows[parent][0]) if parent < len(rows) else None) for n, length, heat in rows
    ]
    sent = HotList(7, 9, made)
    assert hottest.unpack(hottest.pack(sent), hottest.MAX_ROWS) == sent


@given(st.binary(max_size=400))
def test_a_hostile_list_is_a_protocol_error_and_nothing_else(body):
    try:
        found = hottest.unpack(body, 5)
    except ProtocolError:
        return
    assert len(found.rows) <= 5
    assert all(row.score >= 0 for row in found.rows)


def test_a_peer_cannot_send_more_than_was_asked_for():
    body = hottest.pack(HotList(0, 0, [HotRow(key(n), 1, 1.0, None) for n in range(6)]))
    with pytest.raises(ProtocolError):
        hottest.unpack(body, 5)


# -- what to copy

A, B, C = (NodeInfo(name, "127.0.0.1", n, 1) for n, name in enumerate("abc", 1))


def test_a_node_is_cold_if_its_peers_hold_more_than_twice_as_much():
    assert is_cold(0, [10, 10, 0])
    assert not is_cold(5, [10, 10, 10])
    assert not is_cold(0, [0, 0, 10])  # one full node among empty ones is no reason
    assert not is_cold(0, [])


def test_the_plan_adds_up_what_the_peers_say():
    lists = {
        A: HotList(1, 1, [HotRow(key(1), 10, 1, None), HotRow(key(2), 20, 3, key(1)), HotRow(key(9), 0, 9, None)]),
        B: HotList(1, 1, [HotRow(key(3), 30, 3.5, None), HotRow(key(2), 20, 1, key(1))]),
    }
    asked = []

    def locate(keys):
        asked.extend(keys)
        return [ReplicaLocation(3, C, 90)]

    wanted = plan(lists, locate)
    assert asked == [key(9)]
    assert [(w.key, w.payload_len) for w in wanted] == [(key(9), 90), (key(1), 10), (key(2), 20), (key(3), 30)]
    assert wanted[0].sources == (C,)
    assert set(wanted[2].sources) == {A, B}


def test_peers_that_do_not_agree_on_a_length_are_not_both_asked():
    lists = {A: HotList(1, 1, [HotRow(key(1), 10, 1, None)]), B: HotList(1, 1, [HotRow(key(1), 11, 1, None)])}
    assert plan(lists, lambda keys: []) == [CopyRequest(key(1), 10, (A,))]


# -- copying


class Peer:
    """A peer's server over a store in memory."""

    def __init__(self) -> None:
        self.store = MemoryStore(1 << 30)
        self.heat = Popularity()
        self.server = PeerServer(fresh_address(), 0, self.store, Stats(), PeerServerOptions(secret=SECRET))
        self.server.register(
            wire.Op.HOTTEST,
            lambda request, _flags: hottest.build_response(
                self.heat.hottest, lambda _k: SIZE, self.store.usage, request
            ),
        )
        self.server.start()
        host, port = self.server._listener.getsockname()
        self.info = NodeInfo("peer", host, port, 1)

    def dial(self, info=None, timeout_s=5.0):
        info = info or self.info
        return dial(info.host, info.port, secret=SECRET, timeout_s=timeout_s)

    def spoil(self, n: int) -> None:
        """Flip one bit of the payload."""
        whole = bytearray(os.pread(self.store._files[key(n)], 1 << 30, 0))
        whole[-1] ^= 1
        fd = os.memfd_create("rotten")
        os.write(fd, whole)
        os.close(self.store._files[key(n)])
        self.store._files[key(n)] = fd

    def close(self) -> None:
        self.server.stop()
        self.store.close()


@pytest.fixture
def peer():
    one = Peer()
    yield one
    one.close()


@pytest.fixture
def drive(tmp_path):
    made = []

    def make(capacity: int = 64 * MIB) -> LocalStore:
        root = Drive(
            "nvme", str(tmp_path / f"r{len(made)}"), quota.CapacityLimits(capacity, 85, 75, 1000), pool_uid="u"
        )
        root.scan()
        made.append(LocalStore([root]))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fast() -> RateLimiter:
    return RateLimiter(lambda: FAST, threading.Event().wait)


def test_a_peer_tells_its_hottest_blocks_to_who_can_prove(peer):
    peer.heat.record_hits([key(1), key(2)], time.monotonic())
    put(peer.store, 1, SIZE)
    link = peer.dial()
    found = hottest.request_hot_list(link, 10, time.monotonic() + 5)
    assert [(row.key, row.payload_len, row.parent) for row in found.rows] == [
        (key(1), SIZE, None),
        (key(2), SIZE, key(1)),
    ]
    assert found.used_bytes == peer.store.usage().used_bytes > SIZE
    assert len(hottest.request_hot_list(link, 1, time.monotonic() + 5).rows) == 1
    link.close()


def test_a_block_is_verified_before_it_has_a_name(peer, drive):
    local = drive()
    put(peer.store, 1, SIZE)
    put(peer.store, 2, SIZE)
    peer.spoil(1)
    link = peer.dial()
    with pytest.raises(CorruptBlockError):
        fetch_block(link, key(1), SIZE, local, fast())
    assert not local.contains(key(1))
    assert fetch_block(link, key(2), SIZE, local, fast()) == CommitOutcome.STORED  # the link is in order
    assert fetch_block(link, key(2), SIZE, local, fast()) == CommitOutcome.ALREADY_PRESENT
    assert fetch_block(link, key(3), SIZE, local, fast()) is None
    assert read(local, 2) == read(peer.store, 2)
    assert local.usage().blocks == 1
    link.close()


def test_a_peer_that_sends_another_length_is_not_believed(peer, drive):
    local = drive()
    put(peer.store, 1, SIZE)
    link = peer.dial()
    with pytest.raises(ProtocolError):
        fetch_block(link, key(1), SIZE + 1, local, fast())
    assert local.usage().blocks == 0
    link.close()


def replicator(local, peer, stop=None, **kw):
    stats = Stats()
    stored, corrupt = [], []
    events = BlockEvents()
    events.subscribe(BlockPromoted, lambda event: stored.append(event.block_key))
    events.subscribe(CorruptBlockReported, lambda event: corrupt.append(event.block_key))
    stop = stop or threading.Event()
    one = Replicator(local, peer.dial, events, stats, max_block_bytes=1 << 20, family="warm_up", stop=stop)
    return one, stats, stored, corrupt


def test_nothing_is_evicted_for_it(peer, drive):
    local = drive(capacity=2 * MIB)
    for n in range(40):
        put(peer.store, n, SIZE)
    put(local, 100, SIZE)
    one, _, stored, _ = replicator(local, peer)
    assert one.copy([CopyRequest(key(n), SIZE, (peer.info,)) for n in range(40)], fast()) == CopyResult.FULL
    assert local.contains(key(100))
    room = (SIZE + HEADER_BYTES + 4095) // 4096 * 4096
    assert local.usage().used_bytes <= 2 * MIB * 75 // 100 < local.usage().used_bytes + room
    assert stored == [key(n) for n in range(len(stored))]


def test_a_bad_block_is_told_and_the_rest_is_copied(peer, drive):
    local = drive()
    for n in range(4):
        put(peer.store, n, SIZE)
    peer.spoil(1)
    one, stats, stored, corrupt = replicator(local, peer)
    wanted = [CopyRequest(key(n), SIZE, (peer.info,)) for n in (0, 1, 2, 7, 3)]
    assert one.copy(wanted, fast()) == CopyResult.DONE
    assert stored == [key(0), key(2), key(3)]
    assert corrupt == [key(1)]
    assert stats.whole("warm_up") == {
        "blocks": 3, "bytes": 3 * (SIZE + HEADER_BYTES), "corrupt": 1, "missing": 1,
    }  # fmt: skip
    one.copy(wanted, fast())
    assert corrupt == [key(1)]  # not asked of that peer again


def test_what_one_peer_does_not_deliver_comes_from_another(peer, drive):
    other, local = Peer(), drive()
    for n in range(3):
        put(peer.store, n, SIZE)
        put(other.store, n, SIZE)
    peer.spoil(1)
    peer.store.delete(key(2))
    one, _, stored, _ = replicator(local, peer)
    one.copy([CopyRequest(key(n), SIZE, (peer.info, other.info._replace(node="other"))) for n in range(3)], fast())
    other.close()
    assert stored == [key(0), key(1), key(2)]


def test_a_slow_pace_does_not_stretch_one_block_for_ever(monkeypatch):
    pace = RateLimiter(lambda: 1000.0, threading.Event().wait)
    began = time.monotonic()
    pace.acquire(1_000_000, began + 0.05)  # would take 1000 s
    assert pace._free_at - began > 900  # it is owed


# -- with real sidecars


def cache(bandwidth: int) -> config.CacheConfig:
    return config.CacheConfig(warm_up_bytes_per_s=bandwidth, prefetch_bytes=0)


def store(node, numbers, size: int = SIZE) -> None:
    with node.connect() as raw:
        assert set(raw.put({block_id(n): payload(n, size) for n in numbers})) == {wire.CommitStatus.STORED}
    node.wait_announced()


def look_up(node, numbers, times: int = 1) -> None:
    with node.connect() as raw:
        for _ in range(times):
            assert all(raw.lookup([block_id(n) for n in numbers]))


def warm(node) -> dict:
    return node.status()["warm_up"]


def has(node, numbers) -> list[int]:
    with node.connect() as raw:
        tiers = raw.lookup([block_id(n) for n in numbers], flags=wire.Flag.EXHAUSTIVE)
    return [n for n, tier in zip(numbers, tiers, strict=True) if tier == wire.Tier.LOCAL]


def test_a_fourth_node_gets_what_is_hot_at_the_three(cluster):
    c = cluster()
    nodes = [c.node(name, cache=cache(FAST)) for name in "abc"]
    hot: list[int] = []
    for at, node in enumerate(nodes):
        numbers = range(at * 100, at * 100 + 10)
        store(node, numbers)
        look_up(node, numbers[:5], times=2)
        hot += numbers[:5]
    look_up(nodes[0], range(100, 105))  # that is on b: a knows that it is hot, b has it
    d = c.node("d", cache=cache(FAST))
    wait_for(lambda: warm(d)["state"] == "done", "d is warm")
    assert warm(d)["blocks"] == len(hot)
    assert warm(d)["bytes"] == len(hot) * (SIZE + HEADER_BYTES)
    everything = [at * 100 + n for at in range(3) for n in range(10)]
    assert has(d, everything) == hot  # and nothing that is cold
    for node in nodes:
        node.kill()
    with d.connect() as raw:
        assert raw.get([block_id(n) for n in hot]) == [payload(n, SIZE) for n in hot]
    with d.connect("team-b") as raw:
        assert raw.lookup([block_id(n) for n in hot]) == [0] * len(hot)
    assert b"kvpool_sidecar_warm_up_blocks_total 15.0" in d.get("/metrics")


def test_the_bandwidth_is_kept(cluster):
    c, rate = cluster(), 2 * MIB
    a = c.node("a", cache=cache(rate))
    store(a, range(64))
    look_up(a, range(64))
    began = time.monotonic()
    d = c.node("d", cache=cache(rate))

    def half_done() -> bool:
        copied = warm(d)["bytes"]
        assert copied <= rate * (time.monotonic() - began) + SIZE
        return copied >= 4 * MIB

    wait_for(half_done, "half of it is copied", timeout=60)
    assert time.monotonic() - began > 1.9


def test_a_block_that_is_corrupt_at_the_peer_is_not_taken(cluster):
    c = cluster()
    a = c.node("a", cache=cache(FAST))
    store(a, range(6))
    look_up(a, range(6))
    spoiled = sorted(a.files())[2]
    spoiled.chmod(0o600)
    with spoiled.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    d = c.node("d", cache=cache(FAST))
    wait_for(lambda: warm(d)["state"] == "done", "d is warm")
    assert (warm(d)["blocks"], warm(d)["corrupt"]) == (5, 1)
    assert len(d.files()) == 5
    assert spoiled.name not in {f.name for f in d.files()}
    wait_for(lambda: not spoiled.exists(), "the peer had a look and quarantined it")


def test_a_peer_that_dies_half_way_does_no_harm(cluster):
    c = cluster()
    nodes = [c.node(name, cache=cache(FAST)) for name in "ab"]
    for at, node in enumerate(nodes):
        store(node, range(at * 100, at * 100 + 24))
        look_up(node, range(at * 100, at * 100 + 24))
    d = c.node("d", cache=cache(2 * MIB))
    wait_for(lambda: warm(d)["blocks"] >= 3, "d has begun")
    nodes[0].kill()
    wait_for(lambda: warm(d)["state"] == "done", "d went on with the other", timeout=60)
    assert has(d, range(100, 124)) == list(range(100, 124))
    there = has(d, range(24))
    assert len(there) < 24
    assert not list((d.nvme / "tmp").iterdir())
    with d.connect() as raw:
        wanted = [*there, *range(100, 124)]
        assert raw.get([block_id(n) for n in wanted]) == [payload(n, SIZE) for n in wanted]


def test_after_a_restart_it_goes_on(cluster):
    c = cluster()
    a = c.node("a", cache=cache(FAST))
    store(a, range(40))
    look_up(a, range(40))
    d = c.node("d", cache=cache(MIB))
    wait_for(lambda: warm(d)["blocks"] >= 2, "d has begun")
    assert d.stop() == 0
    kept = len(d.files())
    assert 2 <= kept < 20
    d.pool = config.PoolConfig(**{**d.pool.__dict__, "cache": cache(FAST)})
    d.write_config()
    d.start().ready()
    wait_for(lambda: warm(d)["state"] == "done", "d is warm")
    assert warm(d)["blocks"] == 40 - kept
    assert has(d, range(40)) == list(range(40))


def test_who_holds_enough_copies_nothing(cluster):
    c = cluster()
    a, d = (c.node(name, cache=cache(FAST)) for name in "ad")
    store(a, range(8))
    store(d, range(100, 106))
    look_up(a, range(8), times=3)
    assert d.stop() == 0
    d.start().ready()
    wait_for(lambda: warm(d)["state"] == "unneeded", "d has had a look")
    assert warm(d)["blocks"] == 0


def test_switched_off_nothing_is_counted_nor_copied(cluster):
    c = cluster()
    a = c.node("a", cache=cache(0))
    store(a, range(4))
    look_up(a, range(4))
    d = c.node("d", cache=cache(FAST))
    wait_for(lambda: warm(d)["state"] == "done", "d has asked a, who knows of nothing hot")
    assert warm(d)["blocks"] == 0
    assert warm(a) == {"state": "off"}
