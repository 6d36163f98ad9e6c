"""Loads by kept descriptors: what needs no request, what the sidecar hears of it, and what is never given any more.

Real sidecars. `asked(client)` counts the requests of the client's loads.
"""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from sc_nodes import Cluster, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import SECRET, block_id, payload
from test_sc_block_tables import LOCAL, SIZE, client_of, metric, put

from kvpool import config
from kvpool.protocol import keys, wire
from kvpool.stats import Reason
from kvpool.transport import hot_blocks

_next = iter(range(10**9, 2 * 10**9, 1000))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("hot"), index=False) as cluster:
        yield cluster.node("a", admin_port=ADMIN_PORT, salt_tags=True)


@pytest.fixture
def ids():
    first = next(_next)
    return [block_id(first + n) for n in range(16)]


def asked(client) -> int:
    slots = client._session.connections._slots.slots
    return sum(slot.connection._request for slot in slots if "load" in slot.roles)


def served(node) -> float:
    return metric(node, 'kvpool_sidecar_opened_blocks_total{tier="local"}')


def load(client, ids, seconds: float = 20.0):
    """Results of a load, and the blocks' bytes."""
    views = [bytearray(SIZE) for _ in ids]
    return client.get_into(ids, views, time.monotonic() + seconds), views


def expected(ids) -> list[bytes]:
    return [payload(n, SIZE) for n in range(len(ids))]


def descriptors_of(node) -> list[str]:
    """Block files of this node that this process has open, removed or not."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{one}"))
    return [path for path in found if f"{node.pool.local[0].path}/blocks/" in path]


def warm(client, ids) -> int:
    """Store blocks and load them until the client has their descriptors. Return the number of loads."""
    put(client, ids)
    for count in range(1, 20):
        results, views = load(client, ids)
        assert all(r.ok for r in results)
        assert [bytes(view) for view in views] == expected(ids)
        if len(client._session._hot) >= len(ids):
            return count
    raise AssertionError("the client does not keep them")


def file_of(node, one: bytes):
    key = keys.block_key(SECRET, "team-a", one).hex()
    return next(file for file in node.files() if file.name == key)


# -- what needs no request


def test_a_second_load_asks_nobody_and_every_number_stays_true(node, ids):
    with client_of(node) as client:
        first = served(node)
        count = warm(client, ids)
        wait_for(lambda: served(node) - first == count * 16, "the sidecar counts them")
        before, hits = asked(client), client.stats()["hits"]["local"]
        for _ in range(5):
            results, views = load(client, ids)
            assert results == [(True, wire.Tier.LOCAL, Reason.NONE, SIZE)] * 16
            assert [bytes(view) for view in views] == expected(ids)
        assert client.stats()["hits"]["local"] - hits == 5 * 16
        wait_for(lambda: served(node) - first == (count + 5) * 16, "the sidecar counts these too")
        assert asked(client) == before


def test_a_load_asks_for_the_blocks_that_are_not_here_only(node, ids):
    with client_of(node) as client:
        warm(client, ids[:8])
        assert all(r.stored for r in client.put_from(ids[8:12], [payload(n, SIZE) for n in range(8, 12)]))
        results, views = load(client, ids)
        assert [r.ok for r in results] == [True] * 12 + [False] * 4
        assert [bytes(view) for view in views[:12]] == expected(ids)[:12]
        wait_for(lambda: len(client._session._hot) >= 12 or not load(client, ids[:12]), "all of them are kept")
        before = asked(client)
        assert all(r.ok for r in load(client, ids[:12])[0])
        assert asked(client) == before


def test_a_block_that_is_requested_twice_in_a_load_is_loaded_twice(node, ids):
    with client_of(node) as client:
        warm(client, ids[:1])
        for _ in range(3):
            results, views = load(client, [ids[0], ids[0]])
            assert all(r.ok for r in results)
            assert [bytes(view) for view in views] == [payload(0, SIZE)] * 2
        assert len(client._session._hot) == 1
        wait_for(lambda: len(descriptors_of(node)) == 1, "one descriptor is kept")


def test_a_large_load_that_several_threads_copy_is_right_and_asks_nobody(node, ids):
    size = 4 << 20
    with client_of(node) as client:
        payloads = [bytes([n + 1]) * size for n in range(12)]
        assert all(r.stored for r in client.put_from(ids[:12], payloads))
        views = [bytearray(size) for _ in payloads]
        wait_for(
            lambda: (
                all(r.ok for r in client.get_into(ids[:12], views, time.monotonic() + 20))
                and len(client._session._hot) >= 12
            ),
            "all of them are kept",
        )
        before = asked(client)
        for _ in range(3):
            views = [bytearray(size) for _ in payloads]
            assert all(r.ok for r in client.get_into(ids[:12], views, time.monotonic() + 20))
            assert all(view == payload for view, payload in zip(views, payloads, strict=True))
        assert asked(client) == before


def test_a_load_whose_deadline_has_passed_is_a_miss_and_writes_nothing(node, ids):
    with client_of(node) as client:
        warm(client, ids)
        results, views = load(client, ids, seconds=-1.0)
        assert {(r.ok, r.reason) for r in results} == {(False, Reason.DEADLINE)}
        assert views == [bytearray(SIZE)] * 16


# -- what is never given any more


def test_a_purged_block_is_a_miss_at_once_and_its_descriptor_is_closed(node, ids):
    with client_of(node) as client:
        warm(client, ids)
        report = Operator.of(node).run(f"p-{os.urandom(4).hex()}", "purge", tier="Local", all=True)
        assert report["state"] == "Succeeded", report
        assert not any(r.ok for r in load(client, ids)[0])
        wait_for(lambda: not descriptors_of(node), "no file of a removed block stays open")
        others = [payload(100 + n, SIZE) for n in range(16)]
        assert all(r.stored for r in client.put_from(ids, others))
        for _ in range(2):
            results, views = load(client, ids)
            assert all(r.ok for r in results)
            assert [bytes(view) for view in views] == others


def test_descriptors_of_a_client_that_loads_nothing_are_closed_after_a_purge(node, ids):
    with client_of(node) as client:
        warm(client, ids)
        report = Operator.of(node).run(f"p-{os.urandom(4).hex()}", "purge", tier="Local", all=True)
        assert report["state"] == "Succeeded", report
        wait_for(lambda: not descriptors_of(node), "no file of a removed block stays open")


@pytest.mark.parametrize("how", ["cut", "other bytes"])
def test_a_file_that_changes_below_its_descriptor_is_a_miss(node, ids, how):
    with client_of(node) as client:
        warm(client, ids)
        file = file_of(node, ids[5])
        file.chmod(0o600)
        if how == "cut":
            os.truncate(file, 4096)
        else:
            with file.open("r+b") as changed:
                changed.seek(4096 + 100)
                changed.write(b"no such bytes")
        results, views = load(client, ids)
        assert [r.ok for r in results] == [n != 5 for n in range(16)]
        assert [bytes(view) for n, view in enumerate(views) if n != 5] == expected(ids)[:5] + expected(ids)[6:]


def test_salted_blocks_are_never_kept(node, ids):
    with client_of(node) as client:
        assert client.wants_salts
        stored = client.put_from(ids, [payload(n, SIZE) for n in range(16)], salts=["user"] * 16)
        assert all(r.stored for r in stored)
        before = asked(client)
        for _ in range(2):
            assert all(r.ok for r in load(client, ids)[0])
        assert asked(client) == before + 2
        assert len(client._session._hot) == 0
        wait_for(lambda: not descriptors_of(node), "nothing is open")


def test_a_client_without_its_sidecar_gives_nothing_and_keeps_nothing(node, ids):
    with client_of(node) as client:
        warm(client, ids)
        node.kill()
        try:
            wait_for(lambda: not client.reachable, "the client knows")
            assert {r.reason for r in load(client, ids)[0]} == {Reason.NO_SIDECAR}
            wait_for(lambda: not descriptors_of(node), "nothing is open")
        finally:
            node.start()
            node.ready()
        wait_for(lambda: all(r.ok for r in load(client, ids)[0]), "it is back")


# -- bounds and others


def test_idle_descriptors_are_closed(node, ids, monkeypatch):
    monkeypatch.setattr(hot_blocks, "IDLE_S", 0.2)
    with client_of(node) as client:
        put(client, ids)
        assert all(r.ok for r in load(client, ids)[0])
        wait_for(lambda: not descriptors_of(node), "no load uses them")
        assert all(r.ok for r in load(client, ids)[0])


def test_a_forked_child_closes_its_copies_and_the_parent_keeps_its_own(node, ids):
    with client_of(node) as client:
        warm(client, ids)
        child = os.fork()
        if child == 0:
            os._exit(len(descriptors_of(node)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        before = asked(client)
        assert all(r.ok for r in load(client, ids)[0])
        assert asked(client) == before


def test_a_block_that_is_loaded_again_and_again_is_not_evicted(tmp_path):
    tier = config.LocalTier("nvme", str(tmp_path / "a" / "nvme"), 256 * SIZE, reserve_free_percent=0)
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", local=(tier,))
        with client_of(node) as client:
            hot = [block_id(3 * 10**9 + n) for n in range(4)]
            warm(client, hot)
            before = asked(client)
            for n in range(600):
                put(client, [block_id(4 * 10**9 + n)])
                assert all(r.ok for r in load(client, hot)[0])
                if n % 20 == 0:
                    counted = served(node)
                    assert all(r.ok for r in load(client, hot)[0])
                    wait_for(lambda counted=counted: served(node) >= counted + 4, "the sidecar hears of the uses")
            assert node.status()["blocks"] < 600
            assert client.lookup(hot) == LOCAL * 4
            assert asked(client) == before


def test_malformed_reports_of_loads_end_the_connection(node):
    for body, count in ((b"", 0), (bytes(3), 0), (bytes(4 + 32), 2), (bytes(4 + 31), 1), (bytes(4 + 32), 0)):
        with node.connect() as raw:
            raw.send(wire.pack(wire.Op.LOADED, body, count=count, request=1))
            head, _, _ = raw.receive()
            assert head.op == wire.Op.ERROR | wire.REPLY


def test_a_report_of_loads_that_never_were_changes_no_block(node, ids):
    with node.connect() as raw:
        raw.send(wire.pack(wire.Op.LOADED, wire.USED_HEAD.pack(3) + b"".join(ids), count=16, request=1))
        assert raw.lookup(ids) == [wire.Tier.MISS] * 16


def test_the_sidecar_says_that_it_accepts_reports_of_loads(node):
    with client_of(node) as client, client._session.connections.acquire("store", time.monotonic() + 5) as connection:
        assert connection.server.load_reports
        assert wire.ServerHello.unpack(connection.server.pack()) == connection.server
