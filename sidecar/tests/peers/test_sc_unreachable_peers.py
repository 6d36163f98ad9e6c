"""Real sidecars whose peer cannot be read from: not promised, in /status, logged once, and used again later."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
from sc_nodes import PEER_PORT, fresh_address, wait_for
from sc_raw import FINGERPRINT, SECRET, block_id, payload

from kvpool.client import Client
from kvpool.config import ClientConfig, IndexConfig
from kvpool.protocol.wire import Tier
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.tenancy.identity import Tenant

IDS = [block_id(n) for n in range(4)]


def rows(node) -> dict[str, dict]:
    return {row["node"]: row for row in node.status()["reachability"]["rows"]}


def state(node, peer: str) -> str:
    return rows(node).get(peer, {}).get("state", "")


def lines(node, text: str) -> int:
    return node.log.read_text().count(text)


@pytest.fixture
def client_of():
    made = []

    def make(node):
        client = Client(ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT)
        made.append(client)
        wait_for(lambda: client.connected, "connected")
        return client

    yield make
    for client in made:
        client.close()


def test_two_nodes_verify_each_other(cluster):
    c = cluster()
    a, b = c.node("a"), c.node("b")
    wait_for(lambda: state(a, "b") == state(b, "a") == "reachable", "both read from the other", timeout=30)
    assert a.status()["reachability"]["peers"] == 1
    assert b"kvpool_sidecar_peers_reachable 1.0" in a.get("/metrics")


def test_a_peer_that_hangs_is_not_promised_until_it_answers_again(cluster, client_of):
    c = cluster()
    # a lease that outlasts the test: the index names a all the time
    index = IndexConfig(c.index_url, username="kvpool", lookup_timeout_ms=1000, lease_s=120)
    a, b = c.node("a", index=index), c.node("b", index=index)
    with a.connect() as raw:
        raw.put({one: payload(n) for n, one in enumerate(IDS)})
    a.wait_announced()
    reader, buffers = client_of(b), [bytearray(64 * 1024) for _ in IDS]
    wait_for(lambda: reader.lookup(IDS, time.monotonic() + 5) == [Tier.PEER] * 4, "b knows that a has them")
    a.send(signal.SIGSTOP)
    try:

        def found_out() -> bool:
            reader.get_into(IDS, buffers, time.monotonic() + 0.3)  # as engines do
            return state(b, "a") == "unreachable"

        wait_for(found_out, "b finds out", timeout=60)
        assert rows(b)["a"]["reason"] == "timeout"
        for _ in range(3):
            assert reader.lookup(IDS, time.monotonic() + 5) == [Tier.MISS] * 4, "not promised"
        assert b"kvpool_sidecar_peers_unreachable 1.0" in b.get("/metrics")
    finally:
        a.send(signal.SIGCONT)
    wait_for(lambda: state(b, "a") == "reachable", "b reads from a again", timeout=90)
    wait_for(lambda: reader.lookup(IDS, time.monotonic() + 5) == [Tier.PEER] * 4, "promised again", timeout=30)
    assert all(result.ok for result in reader.get_into(IDS, buffers, time.monotonic() + 10))


def test_a_peer_whose_address_is_unreachable_while_its_heartbeat_goes_on(cluster, client_of):
    c = cluster()
    b = c.node("b")
    ghost = NodeInfo("ghost", fresh_address(), PEER_PORT, 7)
    index = RedisIndex(
        c.index_url, credentials=IndexCredentials("kvpool", Passwords(lambda: ("index password",))), lease_s=2
    )
    end = threading.Event()

    def beat() -> None:
        while not end.wait(0.5):
            with contextlib.suppress(Exception):
                index.join(ghost)

    number = index.join(ghost)
    tenant = Tenant(SECRET, "team-a")
    index.announce([(tenant.block_key(one), Record(number, 64 * 1024, 7)) for one in IDS])
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        reader, buffers = client_of(b), [bytearray(64 * 1024) for _ in IDS]
        wait_for(lambda: b.status()["index"]["peers"] == 1, "b knows ghost")
        promised = sum(Tier.PEER in reader.lookup(IDS, time.monotonic() + 5) for _ in range(3))
        assert not any(result.ok for result in reader.get_into(IDS, buffers, time.monotonic() + 5)), promised
        wait_for(lambda: state(b, "ghost") == "unreachable", "b finds out", timeout=30)
        assert rows(b)["ghost"]["reason"] == "unreachable"
        assert b.status()["index"]["peers"] == 1, "its lease is valid all the time"
        for _ in range(30):  # longer than the first pauses
            assert reader.lookup(IDS, time.monotonic() + 5) == [Tier.MISS] * 4, "not promised"
            time.sleep(0.2)
        assert lines(b, "peer ghost at") == 1, "logged once"
    finally:
        end.set()
        thread.join()
        index.close()
