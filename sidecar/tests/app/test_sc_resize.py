"""Another capacity, order, quota or tenant for a sidecar that runs: real processes, under load, without a restart."""

from __future__ import annotations

import dataclasses
import os
import random
import threading

import pytest
from sc_nodes import MIB, Cluster, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import SECRET, GoneError, block_id, payload

from kvpool import config
from kvpool.protocol import keys
from kvpool.protocol.wire import CommitStatus

SIZE = 256 * 1024 - 4096
REFUSED = -1
ONE, TWO, THREE = 1_000_001, 1_000_002, 1_000_003


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """One for all tests of this file, in their order."""
    with Cluster(tmp_path_factory.mktemp("resize"), index=False) as c:
        local = (config.LocalTier("nvme", str(c.directory / "a" / "nvme"), 64 * MIB, reserve_free_percent=0),)
        yield c.node("a", tenants=("team-a", "team-b", "team-c"), local=local, admin_port=ADMIN_PORT)


def change(node, **fields) -> None:
    """Exchange the configuration's file as the kubelet does, and wait until it is in force."""
    node.pool = dataclasses.replace(node.pool, generation=node.pool.generation + 1, **fields)
    wanted = config.dumps(node.pool)
    (node.home / "new.json").write_text(wanted)
    os.replace(node.home / "new.json", node.home / "pool.json")
    wait_for(lambda: node.status()["config"]["generation"] == node.pool.generation, "the configuration is in force")
    assert node.status()["config"]["digest"] == config.digest(wanted)


def capacity(node, size: int):
    return (dataclasses.replace(node.pool.local[0], capacity_bytes=size),)


class Load:
    """One engine that stores and one that reads, as fast as they can, until told to stop."""

    def __init__(self, node, first: int) -> None:
        self.node = node
        self.first = self.stored = first
        self.read = 0
        self.refused = 0
        self.wrong: list[object] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(work,)) for work in (self.store, self.load)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(20)
        assert not self.wrong

    def run(self, work) -> None:
        try:
            with self.node.connect() as raw:
                while not self.stop.is_set() and self.stored < self.first + 20_000:
                    work(raw)
        except (AssertionError, GoneError, OSError) as e:
            self.wrong.append(e)

    def store(self, raw) -> None:
        (status,) = raw.put({block_id(self.stored): payload(self.stored, SIZE)})
        assert status in (CommitStatus.STORED, CommitStatus.HAVE, REFUSED)
        self.refused += status == REFUSED  # there is no room for the moment, and no failure of the engine
        self.stored += 1

    def load(self, raw) -> None:
        first = max(self.first, self.stored - 100)
        some = [random.randrange(first, self.stored + 1) for _ in range(8)]
        for n, data in zip(some, raw.get([block_id(n) for n in some]), strict=True):
            assert data is None or data == payload(n, SIZE)
            self.read += data is not None

    def goes_on(self) -> None:
        before = self.read
        wait_for(lambda: self.wrong or self.read > before + 50, "blocks are read")
        assert not self.wrong


def test_a_drive_is_shrunk_and_grown_under_load_and_no_request_fails(node):
    pid = node.process.pid
    with Load(node, 100_000) as load:
        wait_for(lambda: node.status()["used_bytes"] > 40 * MIB, "the drive fills")
        change(node, local=capacity(node, 12 * MIB))
        assert node.status()["capacity_bytes"] == 12 * MIB
        wait_for(lambda: node.status()["used_bytes"] <= 12 * MIB, "what is too much goes")
        load.goes_on()
        assert node.status()["used_bytes"] <= 12 * MIB
        change(node, local=capacity(node, 64 * MIB))
        wait_for(lambda: node.status()["used_bytes"] > 24 * MIB, "the new room is used")
        load.goes_on()
    assert node.process.pid == pid
    assert node.running


def test_the_order_is_changed_under_load(node):
    with Load(node, 200_000) as load:
        for policy in ("LRU", "S3FIFO", "PrefixAware"):
            change(node, cache=dataclasses.replace(node.pool.cache, eviction_policy=policy))
            wait_for(lambda policy=policy: f"in the order of {policy}" in node.log.read_text(), policy)
            load.goes_on()


def quotas(node, size: int):
    return (config.TenantConfig("team-a", "kvt:team-a:1", ("team-a",), quota_bytes=size),)


def test_the_quota_of_a_tenant_is_changed_and_costs_nobody_else_a_block(node):
    change(node, tenants=quotas(node, 16 * MIB))
    for tenant, first in (("team-a", 0), ("team-b", 1000)):
        with node.connect(tenant) as raw:
            for n in range(first, first + 40):
                assert raw.put({block_id(n): payload(n, SIZE)}) == [CommitStatus.STORED]

    def use(tenant):
        return node.status()["tenants"][keys.tenant_tag(SECRET, tenant).hex()]

    assert (use("kvt:team-a:1")["blocks"], use("team-b")["blocks"]) == (40, 40)
    change(node, tenants=quotas(node, 2 * MIB))
    wait_for(lambda: use("kvt:team-a:1")["over_quota"] == 32, "the quota holds")
    assert use("kvt:team-a:1")["used_bytes"] == 2 * MIB
    assert use("team-b")["blocks"] == 40
    with node.connect("team-b") as raw:
        assert all(raw.get([block_id(n) for n in range(1000, 1040)]))
    with node.connect("team-a") as raw:
        assert sum(data is not None for data in raw.get([block_id(n) for n in range(40)])) == 8


def one_tenant(*namespaces: str):
    return (config.TenantConfig("both", "kvt:both:7", namespaces),)


def test_namespaces_that_become_one_tenant_share_and_when_they_part_find_nothing_of_it(node):
    change(node, tenants=())
    a, b = node.connect("team-a"), node.connect("team-b")
    assert a.put({block_id(ONE): payload(ONE, SIZE)}) == [CommitStatus.STORED]
    change(node, tenants=one_tenant("team-a", "team-b"))
    for raw in (a, b):  # who they are is said when they connect: these connections are of another tenant
        with pytest.raises(GoneError):
            raw.lookup([block_id(ONE)])
        raw.close()
    with node.connect("team-a") as a, node.connect("team-b") as b, node.connect("team-c") as c:
        assert a.get([block_id(ONE)]) == [None]  # it was the namespace's own
        assert a.put({block_id(TWO): payload(TWO, SIZE)}) == [CommitStatus.STORED]
        assert b.get([block_id(TWO)]) == [payload(TWO, SIZE)]
        assert c.get([block_id(ONE), block_id(TWO)]) == [None, None]
        change(node, tenants=one_tenant("team-a"))
        assert a.get([block_id(TWO)]) == [payload(TWO, SIZE)]
        with pytest.raises(GoneError):
            b.lookup([block_id(TWO)])
    with node.connect("team-b") as b:
        assert b.get([block_id(TWO)]) == [None]
    purged = Operator.of(node).run("purge-2", "purge", tenant="kvt:both:7", tier="Local")
    assert purged["counts"]["blocks"] == 1
    with node.connect("team-a") as a:
        assert a.get([block_id(TWO)]) == [None]
    change(node, tenants=())
    with node.connect("team-a") as a:
        assert a.get([block_id(ONE), block_id(TWO)]) == [payload(ONE, SIZE), None]


def test_what_needs_a_restart_and_what_cannot_be_read_is_told_and_has_no_effect(node):
    before = node.status()
    peer = dataclasses.replace(node.pool.peer, port=17500)
    text = config.dumps(dataclasses.replace(node.pool, peer=peer, local=capacity(node, MIB)))
    (node.home / "pool.json").write_text(text)
    reported = wait_for(lambda: node.status()["config"]["problem"], "it is reported")
    assert reported == "needs a restart: peer.port"
    assert node.status()["config"]["needs_restart"]
    (node.home / "pool.json").write_text(text[:100])
    wait_for(lambda: "not JSON" in node.status()["config"]["problem"], "it is reported")
    after = node.status()
    assert after["config"]["digest"] == before["config"]["digest"]
    assert after["capacity_bytes"] == before["capacity_bytes"]
    with node.connect() as raw:
        assert raw.put({block_id(THREE): payload(THREE, SIZE)}) == [CommitStatus.STORED]
    change(node, local=capacity(node, 32 * MIB))
    assert node.status()["config"]["problem"] == ""
    assert node.status()["capacity_bytes"] == 32 * MIB


def test_the_operator_brings_a_configuration_before_the_kubelet_does_and_an_older_file_does_not_undo_it(node):
    change(node, local=capacity(node, 64 * MIB))
    operator = Operator.of(node)

    def given(pool) -> dict:
        return operator.run(f"reload-{pool.generation}", "reload", config=config.dumps(pool))

    newest = dataclasses.replace(node.pool, generation=node.pool.generation + 2, local=capacity(node, 24 * MIB))
    assert given(newest)["counts"] == {"taken": 1}
    assert node.status()["capacity_bytes"] == 24 * MIB
    assert node.status()["config"]["digest"] == config.digest(config.dumps(newest))
    between = dataclasses.replace(newest, local=capacity(node, 48 * MIB))  # the kubelet was late: it brings this first
    (node.home / "pool.json").write_text(config.dumps(between))
    older = given(dataclasses.replace(node.pool, generation=node.pool.generation, local=capacity(node, 40 * MIB)))
    assert older["state"] == "Succeeded"  # passed over
    reported = given(dataclasses.replace(newest, generation=newest.generation + 1, http_port=17999))
    assert (reported["state"], reported["message"]) == ("Failed", "needs a restart: http_port")
    assert operator.run("no-config", "reload", text="x")["state"] == "Failed"
    assert operator.run("no-json", "reload", config="{")["state"] == "Failed"
    assert node.status()["capacity_bytes"] == 24 * MIB
    node.pool = newest
    change(node, local=capacity(node, 32 * MIB))  # a newer one is taken at once
    assert node.status()["capacity_bytes"] == 32 * MIB


def test_a_namespace_that_is_admitted_no_more_is_served_no_more_at_once(node):
    a, b = node.connect("team-a"), node.connect("team-b")
    change(node, allowed_namespaces=("team-b",))
    with pytest.raises(GoneError):
        a.lookup([block_id(ONE)])
    b.lookup([block_id(ONE)])
    with pytest.raises(ConnectionRefusedError):
        type(a)(node.sockets["team-a"])
    a.close()
    b.close()
