"""A node that is drained: what is hot and nowhere else gets a copy elsewhere, and nothing hotter pays for it."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_drain import ADMIN_PORT, SIZE, drain, loads, nodes, reported, selective, store
from sc_nodes import MIB, wait_for

from kvpool import config
from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.popularity import PopularBlock
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers.migration import Headroom, request_headroom, request_receive
from kvpool_sidecar.replication.drain_source import in_order
from kvpool_sidecar.replication.peer_selector import Migration, _choices
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key, put
from kvpool_testing.drives import make_drive

A, B, C = (NodeInfo(name, "127.0.0.1", n, 1) for n, name in enumerate("abc", 1))


# -- in which order


def test_what_lookups_found_most_goes_first_then_what_was_used_last():
    used = [(key(n), SIZE, idle) for n, idle in ((1, 500.0), (2, 10.0), (3, 12.0), (4, 70.0), (5, 11.0))]
    hot = [PopularBlock(key(4), 9, None), PopularBlock(key(9), 8, None), PopularBlock(key(1), 1, None)]
    # 9 is not here; 3, 5 and 2 were used within one minute, and 3 first: a prompt is stored from its root on
    assert [move.key for move in in_order(hot, used)] == [key(4), key(1), key(3), key(5), key(2)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1e4)), unique_by=lambda t: t[0]), st.lists(st.integers(0, 50))
)
def test_each_block_that_is_here_is_moved_once(used, hot):
    hot = [PopularBlock(key(n), 1.0, None) for n in dict.fromkeys(hot)]
    moves = in_order(hot, [(key(n), SIZE, idle) for n, idle in used])
    assert sorted(move.key for move in moves) == sorted(key(n) for n, _ in used)


# -- to whom


def test_who_has_room_is_asked_first_and_who_is_colder_then():
    rooms = {A: Headroom(0, 50.0, False), B: Headroom(2 * SIZE, 0.0, False), C: Headroom(0, 5.0, False)}
    assert _choices(rooms, Migration(key(1), SIZE, 20.0)) == [
        (B, False),
        (A, True),
    ]  # c's blocks are hotter than this one
    assert _choices(rooms, Migration(key(1), SIZE, 1.0)) == [(B, False), (A, True), (C, True)]
    assert _choices(rooms, Migration(key(1), 4 * SIZE, 60.0)) == []


@given(st.integers(0, 1 << 60), st.floats(0, 1e9), st.booleans())
def test_a_room_survives_the_wire(spare, idle, leaving):
    class Link:
        def send_request(self, op, keys, flags=0):
            assert (op, len(keys[0])) == (wire.Op.HEADROOM, 32)

        def response_body(self, limit, deadline):
            return Headroom(spare, idle, leaving).pack()

    assert request_headroom(Link(), 0) == Headroom(spare, idle, leaving)


@pytest.mark.parametrize(
    "body",
    [None, b"", b"x", bytes(23), bytes(25), Headroom(1, math.nan, False).pack(), Headroom(1, -1.0, False).pack()],
)
def test_a_hostile_answer_is_a_protocol_error(body):
    class Link:
        def send_request(self, op, keys, flags=0):
            pass

        def response_body(self, limit, deadline):
            return body

    with pytest.raises(ProtocolError):
        request_headroom(Link(), 0)
    if body is None or body[:1] == b"x":
        with pytest.raises(ProtocolError):
            request_receive(Link(), key(1), 0, evict=False)


# -- what a drive tells


@pytest.fixture
def drive(tmp_path):
    made = []

    def make(capacity: int = 64 * MIB, clock=None) -> LocalStore:
        limits = quota.CapacityLimits(capacity, 85, 75, 1000)
        root = make_drive("nvme", str(tmp_path / f"r{len(made)}"), limits, pool_uid="u", clock=clock)
        root.scan()
        made.append(LocalStore([root]))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_was_used_lately_is_told_and_what_is_coldest(drive):
    clock = [time.time()]
    local = drive(clock=lambda: clock[0])
    for n in range(20):
        put(local, n, SIZE)
    assert {found[0] for found in local.used_since(60)} == {key(n) for n in range(20)}
    clock[0] += 5000
    assert local.coldest_idle_s() == pytest.approx(5000, abs=5)
    local.open_many([key(n) for n in range(17)])
    found = local.used_since(3600)
    assert {one for one, _, _ in found} == {key(n) for n in range(17)}
    assert all(length == SIZE and idle < 1 for _, length, idle in found)
    assert local.coldest_idle_s() == pytest.approx(5000, abs=5)  # a tenth is colder still
    local.open_many([key(n) for n in range(19)])
    assert local.coldest_idle_s() < 1


# -- real sidecars; more of them are in sidecar/tests_nodes

POLICIES = {"peers": False, "shared": True}


@pytest.mark.parametrize("where", POLICIES)
def test_what_a_drained_node_had_is_found_after_it_has_gone(cluster, where):
    a, b, d = nodes(cluster, "abd", shared=POLICIES[where], cache=selective() if POLICIES[where] else None)
    numbers, later = list(range(60)), list(range(100, 110))
    store(d, numbers)
    store(d, [500], tenant="team-b")
    assert reported(d) == {
        "leaving": False, "leaving_for": [], "clean": False, "moved_blocks": 0, "moved_bytes": 0, "remaining_blocks": 0,
        "remaining_bytes": 0, "problem": "",
    }  # fmt: skip
    report = drain(d, wait_s=60)  # once, as an operation
    assert report["state"] == "Succeeded", report
    assert report["counts"] == {"blocks": 61, "bytes": 61 * (SIZE + HEADER_BYTES)}
    assert not reported(d)["leaving"]
    assert drain(d)["state"] == "Succeeded"
    assert reported(d)["leaving_for"] == ["node"]
    store(d, later)  # it serves on, and is not left alone with what comes now
    wait_for(
        lambda: reported(d)["clean"] and reported(d)["moved_blocks"] == 10, "new blocks are moved, too", timeout=30
    )
    assert loads(d, numbers) == numbers
    d.kill()
    for node in (a, b):
        assert node.status()["blocks"] == 0 if where == "shared" else node.status()["blocks"] > 20
        wait_for(lambda node=node: loads(node, numbers + later) == numbers + later, "all of it is found", timeout=30)
        assert loads(node, numbers + later, tenant="team-b") == []
        assert loads(node, [500], tenant="team-b") == [500]
    result = "shared" if where == "shared" else "peers"
    assert b"kvpool_sidecar_drain_received_blocks_total 0.0" not in a.get("/metrics") or result == "shared"


def test_a_drain_without_a_key_of_the_shared_tier_moves_blocks_to_peers(cluster):
    """The tier is not at fault: its breaker stays closed."""
    c = cluster(shared=True)
    encrypted = config.SharedTier("shared", str(c.shared), encryption="AES256GCM")
    _, d = (c.node(name, shared=encrypted, cache=selective(), admin_port=ADMIN_PORT) for name in "ad")
    store(d, list(range(10)))
    report = drain(d, wait_s=60)
    assert report["state"] == "Succeeded", report
    assert report["counts"]["blocks"] == 10
    status = d.status()
    assert not status["breakers"]["shared"], status["breakers"]
    assert [f for f in (c.shared / "blocks").rglob("*") if f.is_file()] == []
