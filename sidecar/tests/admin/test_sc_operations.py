"""Purge, verify and warm: real sidecars, a real index, a shared directory and an object store."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace

import pytest
from sc_nodes import MIB, Node, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import FINGERPRINT, SECRET, block_id, payload

from kvpool import config
from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import block, keys, wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.admin.context import CancelledError, Context
from kvpool_sidecar.admin.purge import Purge
from kvpool_sidecar.admin.purge_filter import PurgeFilter
from kvpool_sidecar.admin.verify import Verify
from kvpool_sidecar.admin.warm import Warm
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.replication.write_back import WriteBack
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.storage.tombstones import LIFE_S, PurgeTombstones
from kvpool_testing.blocks import key, put
from kvpool_testing.faulty_store import FaultyStore

SIZE = 64 * 1024
SHARED = {"tier": "Shared"}
LOCAL = {"tier": "Local"}


def blocks(first: int, count: int) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, SIZE) for n in range(first, first + count)}


# -- which blocks


def made(**changes) -> block.BlockHeader:
    fields = {"fingerprint": FINGERPRINT, "tenant_tag": keys.tenant_tag(SECRET, "team-a"), "created_ms": 1000}
    return block.BlockHeader(key(1), bytes(32), payload_len=1, payload_sum=bytes(16), **{**fields, **changes})


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({"tenant": "team-a"}, True),
        ({"tenant": "team-b"}, False),
        ({"fingerprint": FINGERPRINT.hex()}, True),
        ({"fingerprint": FINGERPRINT.hex()[:8]}, True),
        ({"fingerprint": "0" * 64}, False),
        ({"made_before_ms": 1001}, True),
        ({"made_before_ms": 1000}, False),
        ({"tenant": "team-a", "made_before_ms": 1000}, False),
        ({"tenant": "team-b", "made_before_ms": 1001}, False),
        ({"tenant": "team-a", "fingerprint": FINGERPRINT.hex(), "made_before_ms": 1001}, True),
        ({"all": True}, True),
    ],
)
def test_all_that_is_given_must_fit(params, fits):
    assert PurgeFilter.parse(params, SECRET).matches(made()) is fits
    assert PurgeFilter.parse(params, SECRET).matches(None)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"all": False},
        {"all": 1},
        {"all": True, "tenant": "a"},
        {"salt": "x", "tenant": "a"},
        {"tenant": ""},
        {"tenant": 7},
        {"tenant": "x" * 600},
        {"fingerprint": "abc"},
        {"fingerprint": "G" * 64},
        {"made_before_ms": -1},
        {"made_before_ms": "1"},
        {"tenant": None, "all": False},
    ],
)
def test_a_wish_that_is_not_understood_removes_nothing(params):
    with pytest.raises(ProtocolError):
        PurgeFilter.parse(params, SECRET)


@pytest.mark.parametrize("params", [{}, {"tier": "Local"}, {"tier": "Local", "bytes_per_s": 0}, {"bytes_per_s": True}])
def test_a_verification_needs_its_parameters(params):
    with pytest.raises(ProtocolError):
        Verify(None, None)(params, Context())
    with pytest.raises(ProtocolError):
        Warm(None)(params, Context())


def test_a_purge_that_is_cancelled_ends_between_two_batches():
    store = MemoryStore(1 << 30)
    for n in range(200):
        put(store, n, 100)
    context = Context()
    faulty = FaultyStore(store)
    gate = faulty.hang("remove")
    purge = Purge(SECRET, MemoryStore(1), None)
    ended = []

    def run() -> None:
        try:
            purge._purge(PurgeFilter(), faulty, context, lambda _keys: None)
        except CancelledError as e:
            ended.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: faulty.calls["remove"], "it is at work")
    context.cancelled.set()
    gate.set()
    thread.join(30)
    assert ended
    assert 0 < store.usage().blocks < 200
    assert context.counts["blocks"] == 200 - store.usage().blocks
    store.close()


def test_a_copy_that_was_on_its_way_during_a_purge_does_not_arrive():
    local, inner = MemoryStore(1 << 30), MemoryStore(1 << 30)
    put(local, 1, 100)
    shared = SharedTier(FaultyStore(inner))
    purge = Purge(SECRET, local, shared)
    copier = WriteBack(local, shared, Stats())
    gate = shared.store.hang("seal")
    copying = threading.Thread(target=copier._copy, args=(key(1),))
    copying.start()
    wait_for(lambda: shared.store.calls["seal"], "the copy is on its way")
    local.scanned = True
    purge({"all": True, **LOCAL}, Context())
    assert local.usage().blocks == 0
    gate.set()
    copying.join(30)
    assert inner.usage().blocks == 0
    assert shared.available
    for store in (local, inner):
        store.close()


def test_what_is_stored_after_a_purge_is_kept_and_the_bar_ends():
    now = [0.0]
    bars = PurgeTombstones(lambda: now[0])
    bars.add(PurgeFilter(fingerprint=FINGERPRINT.hex()).matches, 1000)
    assert bars.rejects(made(created_ms=999))
    assert not bars.rejects(made(created_ms=1000))
    assert not bars.rejects(made(created_ms=999, fingerprint=bytes(32)))
    now[0] = LIFE_S + 1
    assert not bars.rejects(made(created_ms=999))
    for n in range(200):
        bars.add(PurgeFilter().matches, n)
    assert len(bars._bars) == 64


@pytest.fixture
def drive(tmp_path):
    tier = config.LocalTier("nvme", str(tmp_path / "nvme"), 64 * MIB, reserve_free_percent=0)
    store = open_local([tier], config.CacheConfig(), "pool-uid")
    store.start()
    wait_for(lambda: store.scanned, "it has been scanned")
    for n in range(4):
        put(store, n, 1000)
    yield store
    store.close()


def test_a_bad_spot_of_a_drive_costs_its_block_and_the_rest_is_looked_at(drive, monkeypatch):
    whole = blockfile.verify

    def verify(fd, one, size):
        if one == key(2):
            raise OSError(errno.EIO, "Input/output error")
        return whole(fd, one, size)

    monkeypatch.setattr(blockfile, "verify", verify)
    context = Context()
    Verify(drive, None)({"bytes_per_s": 1 << 30, **LOCAL}, context)
    assert (context.counts["blocks"], context.counts["corrupt"]) == (4, 1)
    assert [drive.contains(key(n)) for n in range(4)] == [True, True, False, True]
    monkeypatch.setattr(drive.drives[0], "peek", lambda one: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
    Purge(SECRET, drive, None)({"tenant": "nobody", **LOCAL}, context)
    assert drive.usage().blocks == 0  # what cannot be read is of no use, and might be the tenant's


def test_a_drive_that_is_fenced_is_not_said_to_be_whole(drive):
    for _ in range(20):
        drive.drives[0].health.record_error(OSError(errno.EIO, "bad"))
    assert drive.drives[0].health.fenced
    with pytest.raises(PoolUnavailableError):
        Verify(drive, None)({"bytes_per_s": 1 << 30, **LOCAL}, Context())


# -- real sidecars


def test_a_tenant_is_purged_from_every_tier_and_the_others_keep_theirs(cluster):
    c = cluster(shared=True)
    a, b = (c.node(name, admin_port=ADMIN_PORT) for name in "ab")
    mine, theirs = blocks(0, 8), blocks(100, 8)
    with a.connect("team-a") as one, a.connect("team-b") as two:
        one.put(mine)
        two.put(theirs)
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 16, "both are on the shared tier")
    with b.connect("team-a") as one:  # a copy on the other node, too
        one.put(mine)
        reader = one.open(list(mine)[:1])[0]
        try:
            for node in (a, b):
                done = Operator.of(node).run("uid-0", "purge", tenant="team-a", **LOCAL)
                assert done["state"] == "Succeeded", done
                assert (done["counts"]["blocks"], done["counts"]["bytes"]) == (8, 8 * (HEADER_BYTES + SIZE))
            done = Operator.of(b).run("uid-1", "purge", tenant="team-a", **SHARED)
            assert (done["counts"]["blocks"], done["counts"]["bytes"]) == (8, 8 * (HEADER_BYTES + SIZE))
            assert os.pread(reader.fd, SIZE, HEADER_BYTES) == payload(0, SIZE)  # who reads, reads to the end
        finally:
            os.close(reader.fd)
    with b.connect("team-a") as one:  # the index knows it, too: no one is sent to the other node unsuccessfully
        wait_for(lambda: not any(one.lookup(list(mine))), "the index has forgotten them")
    for node in (a, b):
        with node.connect("team-a") as one, node.connect("team-b") as two:
            assert one.get(list(mine)) == [None] * 8
            assert two.get(list(theirs)) == list(theirs.values())
    assert {header_of(f).tenant_tag for f in a.files()} == {keys.tenant_tag(SECRET, "team-b")}
    again = Operator.of(a).run("uid-2", "purge", tenant="team-a", **LOCAL)
    assert again["counts"]["blocks"] == 0
    with a.connect("team-a") as one:  # and the tenant may begin again
        assert one.put(mine) == [wire.CommitStatus.STORED] * 8
        assert one.get(list(mine)) == list(mine.values())


def header_of(file) -> block.BlockHeader:
    return block.decode_header(file.read_bytes()[:HEADER_BYTES])


def test_a_purge_by_age_keeps_what_was_made_since_and_takes_what_is_in_quarantine(cluster):
    a = cluster(index=False).node("a", admin_port=ADMIN_PORT)
    operator = Operator.of(a)
    with a.connect() as one:
        one.put(blocks(0, 4))
        between = wait_for(lambda: int(time.time() * 1000) + 1, "a time")
        wait_for(lambda: time.time() * 1000 > between + 5, "it is over")
        one.put(blocks(10, 4))
    spoil(next(f for f in a.files() if header_of(f).created_ms < between))
    verified = operator.run("v-1", "verify", bytes_per_s=1 << 30, **LOCAL)
    assert (verified["counts"]["blocks"], verified["counts"]["corrupt"]) == (8, 1)
    assert len(a.files("quarantine")) == 1
    done = operator.run("p-1", "purge", made_before_ms=between, **LOCAL)
    assert (done["counts"]["blocks"], done["counts"]["quarantined"]) == (3, 1)
    assert a.files("quarantine") == []
    with a.connect() as one:
        assert one.get(list(blocks(0, 4))) == [None] * 4
        assert one.get(list(blocks(10, 4))) == list(blocks(10, 4).values())
    assert operator.run("p-2", "purge", fingerprint="0" * 12, **LOCAL)["counts"]["blocks"] == 0
    assert operator.run("p-3", "purge", fingerprint=FINGERPRINT.hex()[:12], **LOCAL)["counts"]["blocks"] == 4
    assert a.files() == []
    assert a.status()["used_bytes"] == 0


def spoil(file, at: int = HEADER_BYTES + 100) -> None:
    """Flip a bit of its payload, behind everybody's back."""
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    file.chmod(0o400)


def test_a_verification_finds_what_is_bad_on_either_tier_and_leaves_the_rest(cluster):
    c = cluster(shared=True)
    a = c.node("a", admin_port=ADMIN_PORT)
    operator = Operator.of(a)
    data = blocks(0, 6)
    with a.connect() as one:
        one.put(data)
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 6, "all are on the shared tier")
    for file in a.files()[:2]:
        spoil(file)
    here = operator.run("v-1", "verify", bytes_per_s=1 << 30, **LOCAL)
    assert here["counts"] == {"blocks": 6, "bytes": 6 * (HEADER_BYTES + SIZE), "corrupt": 2}
    spoil(next(f for f in (c.shared / "blocks").rglob("*") if f.is_file()))
    there = operator.run("v-2", "verify", bytes_per_s=1 << 30, **SHARED)
    assert there["counts"] == {"blocks": 6, "bytes": 6 * (HEADER_BYTES + SIZE), "corrupt": 1}
    assert len(a.files()) == 4
    again = operator.run("v-3", "verify", bytes_per_s=1 << 30, **LOCAL)
    assert (again["counts"]["blocks"], again["counts"]["corrupt"]) == (4, 0)
    with a.connect() as one:
        found = one.get(list(data))
    assert [f for f in found if f is not None] == [
        d for d, f in zip(data.values(), found, strict=True) if f is not None
    ]


def test_a_verification_keeps_to_its_bandwidth_and_ends_when_it_is_cancelled(cluster):
    a = cluster(index=False).node("a", admin_port=ADMIN_PORT)
    with a.connect() as one:
        one.put(blocks(0, 40))
    operator = Operator.of(a)
    assert operator.start("v-1", "verify", bytes_per_s=SIZE // 8, **LOCAL)[0] == 200  # five minutes at this pace
    wait_for(lambda: operator.poll("v-1")["progress"]["done"] >= 1, "it has begun")
    assert operator.poll("v-1")["progress"]["done"] < 40
    assert operator.call("DELETE", "/v1/operations/v-1")[0] == 200
    ended = wait_for(lambda: (r := operator.poll("v-1"))["state"] != "Running" and r, "it ends")
    assert (ended["state"], ended["message"]) == ("Failed", "cancelled")
    assert ended["counts"]["blocks"] < 40
    for name, kind, params in (  # there is no shared tier here, and no one pretends
        ("a", "purge", {"all": True, **SHARED}),
        ("b", "verify", {"bytes_per_s": 1000, **SHARED}),
        ("c", "purge", {"all": True, "tier": "Other"}),
        ("d", "warm", {"bytes_per_s": 1000}),
    ):
        assert operator.run(name, kind, **params)["state"] == "Failed"


def test_a_purge_that_a_kill_cut_short_is_done_by_the_next_one(cluster):
    a = cluster(index=False).node("a", admin_port=ADMIN_PORT)
    with a.connect() as one:
        for first in range(0, 480, 32):
            one.put({block_id(n): payload(n, 4096) for n in range(first, first + 32)})
    operator = Operator.of(a)
    operator.start("p-1", "purge", tenant="team-a", **LOCAL)
    a.kill()
    a.start()
    a.ready()
    assert operator.call("GET", "/v1/operations/p-1")[0] == 404
    assert operator.run("p-1", "purge", tenant="team-a", **LOCAL)["state"] == "Succeeded"
    assert a.files() == []


def test_a_node_is_warmed_by_order_though_it_is_not_cold(cluster):
    c = cluster()
    cache = config.CacheConfig(warm_up_bytes_per_s=64 * MIB)
    a = c.node("a", admin_port=ADMIN_PORT, cache=cache)
    hot, own = blocks(0, 12), blocks(100, 12)
    with a.connect() as one:
        one.put(hot)
        one.lookup(list(hot))
    a.wait_announced()
    b = c.node("b", admin_port=ADMIN_PORT, cache=config.CacheConfig(warm_up_bytes_per_s=1))
    with b.connect() as one:
        one.put(own)
    wait_for(lambda: b.status()["warm_up"]["state"] != "waiting", "its own warm-up has made up its mind")
    before = b.status()["blocks"]
    done = Operator.of(b).run("w-1", "warm", bytes_per_s=1 << 30)
    assert done["state"] == "Succeeded", done
    assert done["counts"]["blocks"] == 24 - before
    assert b.status()["blocks"] == 24
    a.kill()
    with b.connect() as one:
        assert one.get(list(hot)) == list(hot.values())


def test_an_object_store_is_purged_by_what_its_objects_say(tmp_path, cluster):
    c = cluster(index=False)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    tier = config.FsspecTier("cold", f"file://{bucket}/p")
    a = c.node("a", admin_port=ADMIN_PORT, fsspec=tier)
    mine, theirs = blocks(0, 3), blocks(100, 3)
    with a.connect("team-a") as one, a.connect("team-b") as two:
        one.put(mine)
        two.put(theirs)
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 6, "all are in the object store")
    operator = Operator.of(a)
    done = operator.run("p-1", "purge", tenant="team-b", **SHARED)
    assert (done["state"], done["counts"]["blocks"]) == ("Succeeded", 3), done
    operator.run("p-2", "purge", all=True, **LOCAL)
    with a.connect("team-a") as one, a.connect("team-b") as two:
        assert two.get(list(theirs)) == [None] * 3
        assert one.get(list(mine)) == list(mine.values())


def test_a_tenant_of_several_namespaces_is_purged_as_one(cluster):
    acme = config.TenantConfig("acme", "kvt:acme:0123", ("team-a", "team-b"))
    c = cluster(index=False)
    a = Node(c, "a", tenants=("team-a", "team-b", "team-c"), admin_port=ADMIN_PORT)
    c.nodes.append(a)
    a.pool = replace(a.pool, tenants=(acme,))
    a.write_config()
    a.start()
    a.ready()
    mine, theirs = blocks(0, 3), blocks(0, 3)
    with a.connect("team-a") as one, a.connect("team-b") as two, a.connect("team-c") as three:
        one.put(mine)
        three.put(theirs)
        assert two.get(list(mine)) == list(mine.values())
        operator = Operator.of(a)
        assert operator.run("p-1", "purge", tenant="team-a", **LOCAL)["counts"]["blocks"] == 0
        assert operator.run("p-2", "purge", tenant="kvt:acme:0123", **LOCAL)["counts"]["blocks"] == 3
        assert one.get(list(mine)) == two.get(list(mine)) == [None] * 3
        assert three.get(list(theirs)) == list(theirs.values())
