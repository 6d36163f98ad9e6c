"""Block tables of a node: what clients find in them, what follows their lookups, and what never enters. Real sidecars.

`lookups(node)` counts the LOOKUP requests that the node has answered: those of the table are not among them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time

import pytest
from sc_nodes import Cluster, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import FINGERPRINT, SECRET, Raw, block_id, payload

from kvpool import config
from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.protocol import keys, wire
from kvpool.stats import Reason
from kvpool.transport.block_table import BlockTable

SIZE = 16 * 1024
LOCAL = [wire.Tier.LOCAL]
_next = iter(range(0, 10**9, 1000))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("tables"), index=False) as cluster:
        yield cluster.node("a", admin_port=ADMIN_PORT, salt_tags=True)


@pytest.fixture
def ids():
    first = next(_next)
    return [block_id(first + n) for n in range(16)]


@contextlib.contextmanager
def client_of(node, tenant="team-a", fingerprint=FINGERPRINT):
    """A client that has its table."""
    settings = ClientConfig(
        socket=str(node.sockets[tenant]), connect_retry_ms=50, deadlines=Deadlines(lookup_ms=5000, store_ms=20_000)
    )
    with contextlib.closing(Client(settings, fingerprint=fingerprint, labels={"model": "m"})) as client:
        assert client.wait_connected(20)
        wait_for(lambda: client._session._local._table, "the client has a table")
        yield client


def put(client, ids) -> None:
    assert all(r.stored for r in client.put_from(ids, [payload(n, SIZE) for n in range(len(ids))]))


def metric(node, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", node.get("/metrics").decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def lookups(node) -> float:
    return metric(node, 'kvpool_sidecar_requests_total{op="lookup"}')


def used(node) -> float:
    return metric(node, 'kvpool_sidecar_requests_total{op="used"}')


def mapped(raw: Raw) -> int:
    """The descriptor of the table that a connection is given."""
    (_, body), fds = raw.ask(wire.Op.MAP)
    assert body == b""
    (descriptor,) = fds
    return descriptor


def has_any(descriptor: int, ids) -> bool:
    """Whether the first bytes of one of these ids are anywhere in the file."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return any(one[:8] in data for one in ids)


# -- what clients find


@pytest.mark.parametrize(("stored", "asks"), [(0, 3), (8, 3), (16, 0)], ids=["nothing", "half", "all"])
def test_a_lookup_asks_nobody_if_all_of_its_blocks_are_here_and_every_number_stays_true(node, ids, stored, asks):
    with client_of(node) as client:
        put(client, ids[:stored])
        figures = node.status()["cache"]["sinceStart"]["models"].get("m", {})
        before = lookups(node), used(node), metric(node, "kvpool_sidecar_lookup_blocks_total")
        hits = metric(node, "kvpool_sidecar_lookup_hit_blocks_total")
        for _ in range(3):
            assert client.lookup(ids) == LOCAL * stored + [wire.Tier.MISS] * (16 - stored)
        wait_for(lambda: used(node) - before[1] == 3 - asks, "the sidecar counts those that sent no request")
        wait_for(lambda: lookups(node) - before[0] == asks, "and has answered the others")
        wait_for(lambda: metric(node, "kvpool_sidecar_lookup_blocks_total") - before[2] == 48, "all are counted")
        assert metric(node, "kvpool_sidecar_lookup_hit_blocks_total") - hits == 3 * stored
        client.report()
        tokens = node.pool.cache.block_tokens
        now = node.status()["cache"]["sinceStart"]["models"]["m"]
        grown = {name: now[name] - figures.get(name, 0) for name in ("tokensAsked", "tokensFound", "requests")}
        assert grown == {"tokensAsked": 48 * tokens, "tokensFound": 3 * stored * tokens, "requests": 3}
        assert now["complete"] - figures.get("complete", 0) == (3 if stored == 16 else 0)


def test_read_ahead_hears_of_a_lookup_that_asked_nobody(node, ids):
    with client_of(node) as client:
        put(client, ids)

        def looked_at() -> float:
            text = node.get("/metrics").decode()
            return sum(float(n) for n in re.findall(r"^kvpool_sidecar_prefetch\S* (\S+)$", text, re.MULTILINE))

        before = looked_at()
        assert client.lookup(ids) == LOCAL * 16
        wait_for(lambda: looked_at() > before, "read-ahead has looked at the blocks")


def test_what_one_client_stores_another_finds_without_asking(node, ids):
    with client_of(node) as one, client_of(node) as two:
        put(one, ids)
        before = lookups(node), used(node)
        assert two.lookup(ids) == LOCAL * 16
        wait_for(lambda: used(node) == before[1] + 1, "the sidecar counts it")
        assert lookups(node) == before[0]


@pytest.mark.parametrize("how", ["purge", "vanished"])
def test_a_block_that_is_gone_is_not_found(node, ids, how):
    with client_of(node) as client:
        put(client, ids)
        assert client.lookup(ids) == LOCAL * 16
        if how == "purge":
            report = Operator.of(node).run(f"p-{os.urandom(4).hex()}", "purge", tier="Local", all=True)
            assert report["state"] == "Succeeded", report
            assert client.lookup(ids) == [wire.Tier.MISS] * 16
        else:
            key = keys.block_key(SECRET, "team-a", ids[3]).hex()
            next(file for file in node.files() if file.name == key).unlink()
            results = client.get_into(ids, [bytearray(SIZE) for _ in ids], time.monotonic() + 20)
            assert [r.ok for r in results] == [n != 3 for n in range(16)]
            assert client.lookup(ids) == LOCAL * 3 + [wire.Tier.MISS] * 13


def test_evicted_blocks_are_not_found(tmp_path):
    tier = config.LocalTier("nvme", str(tmp_path / "a" / "nvme"), 256 * SIZE, reserve_free_percent=0)
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", local=(tier,))
        with client_of(node) as client:
            everything = [block_id(10**8 + n) for n in range(300)]
            for n, one in enumerate(everything):
                put(client, [one])
                client.lookup(everything[max(0, n - 10) : n + 1])
            wait_for(lambda: node.status()["blocks"] < 300, "blocks are evicted")
            wait_for(
                lambda: sum(map(bool, client.lookup(everything, exhaustive=True))) == node.status()["blocks"],
                "the client finds what is there",
            )
            there = {file.name for file in node.files()}
            for one in everything:
                is_there = keys.block_key(SECRET, "team-a", one).hex() in there
                assert bool(client.lookup([one])[0]) == is_there


def test_a_client_never_finds_anything_in_the_table_of_a_sidecar_that_was_killed(node, ids):
    with client_of(node) as client:
        put(client, ids)
        table = client._session._local._table
        assert client.lookup(ids) == LOCAL * 16
        node.kill()
        wait_for(lambda: not client.reachable, "the client knows")
        assert client.find(ids).reason == Reason.NO_SIDECAR
        wait_for(lambda: not table.is_valid, "the table's time is over")
        node.start()
        node.ready()
        wait_for(lambda: client.reachable and node.status()["scanned"], "it is back")
        assert client.lookup(ids) == LOCAL * 16  # asks: no table knows blocks of an earlier process
        wait_for(lambda: client.lookup(ids) == LOCAL * 16 and used(node), "the sidecar has learned the blocks")


def test_a_forked_child_has_a_table_of_its_own(node, ids):
    with client_of(node) as client:
        put(client, ids)
        assert client.lookup(ids) == LOCAL * 16
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                client.lookup(ids)  # connects
                assert client.wait_connected(20)
                wait_for(lambda: client._session._local._table, "the child has a table")
                before = used(node)
                assert client.lookup(ids) == LOCAL * 16
                wait_for(lambda: used(node) > before, "the sidecar counts the child's lookup")
                status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.lookup(ids) == LOCAL * 16


# -- what never enters


def test_a_table_has_no_block_of_another_tenant_fingerprint_or_salt(node, ids):
    salted, others = [block_id(one) for one in ids], [block_id(one[::-1]) for one in ids]
    data = dict(zip(ids, [payload(n, SIZE) for n in range(16)], strict=True))
    with node.connect("team-a") as a, node.connect("team-b") as b, client_of(node, fingerprint=bytes(31) + b"x") as c:
        table_a, table_b = mapped(a), mapped(b)
        a.put(data)
        a.put(dict(zip(salted, data.values(), strict=True)), "salt")
        b.put(dict(zip(others, data.values(), strict=True)))
        assert a.lookup(salted) == LOCAL * 16
        assert BlockTable(table_a).has_all(ids)
        assert not has_any(table_a, salted)
        assert not has_any(table_a, others)
        assert BlockTable(table_b).has_all(others)
        assert not has_any(table_b, [*ids, *salted])
        before = lookups(node)
        assert c.lookup(ids) == LOCAL * 16  # the sidecar is asked: another fingerprint has another table
        wait_for(lambda: lookups(node) == before + 1, "it was asked")
        os.close(table_a)
        os.close(table_b)


def test_blocks_that_a_tenant_may_read_by_a_grant_stay_out_of_its_table(tmp_path):
    tenants = (
        config.TenantConfig("base", "kvt:base:1", ("base",)),
        config.TenantConfig("reader", "kvt:reader:2", ("reader",), reads_from=("kvt:base:1",)),
    )
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", tenants=("base", "reader"), pool="test")
        node.pool = dataclasses.replace(node.pool, generation=node.pool.generation + 1, tenants=tenants)
        node.write_config()
        wait_for(lambda: node.status()["config"]["generation"] == node.pool.generation, "the tenants are known")
        names = [block_id(n) for n in range(8)]
        with client_of(node, "base") as base, client_of(node, "reader") as reader:
            put(base, names)
            before = lookups(node)
            for _ in range(3):
                assert reader.lookup(names) == LOCAL * 8
            wait_for(lambda: lookups(node) == before + 3, "the sidecar was asked each time")
            with node.connect("reader", granted=True) as raw:
                descriptor = mapped(raw)
                assert not has_any(descriptor, names)
                os.close(descriptor)


def test_a_table_of_a_tenant_whose_pods_change_is_replaced(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", tenants=("team-a", "team-b"))
        with client_of(node) as client:
            names = [block_id(n) for n in range(8)]
            put(client, names)
            old = client._session._local._table
            tenants = (config.TenantConfig("both", "kvt:both:1", ("team-a", "team-b")),)
            node.pool = dataclasses.replace(node.pool, generation=node.pool.generation + 1, tenants=tenants)
            node.write_config()
            wait_for(lambda: not old.is_valid, "the old table is void")
            wait_for(lambda: client._session._local._table not in (None, old), "the client has another table")
            assert client.lookup(names) == [wire.Tier.MISS] * 8  # they belong to the tenant that it was


# -- bounds


def test_a_tenant_with_many_fingerprints_keeps_eight_tables_and_takes_none_of_others(node):
    with client_of(node, "team-b") as other:
        kept = other._session._local._table
        for n in range(20):
            with Raw(node.sockets["team-a"], hello=False) as raw:
                raw.ask(wire.Op.HELLO, wire.ClientHello(n.to_bytes(32, "big")).pack())
                os.close(mapped(raw))
        assert kept.is_valid
        status = node.status()["block_tables"]
        assert status["tables"] <= 8 + 1
        assert status["bytes"] < 4 << 20


def test_malformed_reports_of_uses_end_the_connection(node):
    for body, count in ((b"", 0), (bytes(3), 0), (bytes(4 + 32), 2), (bytes(4 + 31), 1), (bytes(4 + 32), 0)):
        with node.connect() as raw:
            raw.send(wire.pack(wire.Op.USED, body, count=count, request=1))
            head, _, _ = raw.receive()
            assert head.op == wire.Op.ERROR | wire.REPLY
