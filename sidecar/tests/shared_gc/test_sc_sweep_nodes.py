"""Housekeeping of a shared directory by real sidecars: one sweeps, and another takes over when it is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from sc_nodes import wait_for
from sc_raw import FINGERPRINT, SECRET, block_id, payload

from kvpool import config
from kvpool.protocol import block, keys
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore

SIZE = 16 * 1024
FILE = SIZE + block.HEADER_BYTES


def settings(cluster, *, cache=None, **kw):
    fields = {"sweep_lease_s": 1, "sweep_every_s": 1, "sweep_entries_per_s": 5000, **kw}
    return {
        "shared": config.SharedTier("shared", str(cluster.shared), **fields),
        "cache": config.CacheConfig(**(cache or {})),
    }


def sweep_of(node):
    return node.status()["shared"]["sweep"]


def holders(*nodes):
    return [node for node in nodes if sweep_of(node)["holder"]]


def one_holder(*nodes):
    return wait_for(lambda: len(found := holders(*nodes)) == 1 and found[0], "one holds the lease", timeout=30)


def blocks_of(directory):
    return [file for file in directory.rglob("blocks/*/*/*") if file.is_file()]


def store(node, numbers, tenant="team-a"):
    with node.connect(tenant) as raw:
        raw.put({block_id(n): payload(n, SIZE) for n in numbers})


def place(cluster, numbers, idle=86400.0, tenant="team-a"):
    """Blocks that lie there from before, as a sidecar would have copied them."""
    for n in numbers:
        data = payload(n, SIZE)
        key = keys.block_key(SECRET, tenant, block_id(n))
        head = block.BlockHeader(
            key, block_id(n), FINGERPRINT, keys.tenant_tag(SECRET, tenant), SIZE, block.checksum(data),
            created_ms=int((time.time() - idle) * 1000),
        )  # fmt: skip
        name = key.hex()
        file = cluster.shared / "blocks" / name[:2] / name[2:4] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(block.encode_header(head) + data)
        os.utime(file, (time.time() - idle,) * 2)


def test_one_sweeps_and_when_it_is_killed_another_takes_over(cluster):
    """The pool has no index at all."""
    c = cluster(index=False, shared=True)
    pool = settings(c, cache={"idle_ttl_s": 3600})
    a, b = c.node("a", **pool), c.node("b", **pool)
    store(a, [0])
    wait_for(lambda: len(blocks_of(c.shared)) == 1, "the copy is there")
    holder = one_holder(a, b)
    other = b if holder is a else a
    place(c, range(1, 31))
    wait_for(lambda: len(blocks_of(c.shared)) == 1, "what nobody uses goes")
    wait_for(lambda: sweep_of(holder)["removed"] == {"idle": 30}, "it is told")
    wait_for(lambda: sweep_of(other)["blocks"] == 1, "the other one knows what is left")
    assert sweep_of(other)["removed"] == {}
    assert b'kvpool_sidecar_shared_gc_removed_blocks_total{reason="idle"} 30.0' in holder.get("/metrics")
    assert b"kvpool_sidecar_shared_gc_leader 1.0" in holder.get("/metrics")
    assert b"kvpool_sidecar_shared_gc_leader 0.0" in other.get("/metrics")
    assert b"kvpool_sidecar_shared_tenant_bytes{" not in holder.get("/metrics"), (
        "tenants are told of only when asked for"
    )
    term = sweep_of(holder)["term"]
    holder.kill()
    place(c, range(1, 31))
    wait_for(lambda: sweep_of(other)["holder"], "the other one has taken over", timeout=30)
    assert sweep_of(other)["term"] == term + 1
    wait_for(lambda: sweep_of(other)["removed"] == {"idle": 30}, "and sweeps")
    with other.connect() as raw:
        assert raw.get([block_id(0)]) == [payload(0, SIZE)]


def test_a_sweeper_that_was_stopped_notices_when_it_comes_back(cluster):
    c = cluster(index=False, shared=True)
    pool = settings(c, cache={"idle_ttl_s": 3600}, sweep_entries_per_s=40)
    a = c.node("a", **pool)
    store(a, [0])
    wait_for(lambda: sweep_of(a)["holder"], "it holds the lease")
    place(c, range(1, 401))
    wait_for(lambda: sweep_of(a)["removed"].get("idle", 0) >= 5, "it is in the middle of a sweep", timeout=30)
    a.send(signal.SIGSTOP)
    stat = Path(f"/proc/{a.process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stands still")
    gone_by_a = 400 - (len(blocks_of(c.shared)) - 1)
    b = c.node("b", **settings(c))  # for b nothing is too old
    wait_for(lambda: sweep_of(b)["holder"], "b has taken over", timeout=30)
    a.send(signal.SIGCONT)
    wait_for(lambda: not sweep_of(a)["holder"], "a has noticed")
    assert sweep_of(a)["removed"]["idle"] <= gone_by_a + 1
    assert len(blocks_of(c.shared)) >= 1 + 400 - gone_by_a - 1
    assert sweep_of(b)["holder"]
    assert "another sidecar" in a.log.read_text()


def test_a_sidecar_that_ends_gives_the_lease_back(cluster):
    c = cluster(index=False, shared=True)
    pool = settings(c, sweep_lease_s=600)
    pool_of_before = FilesystemStore(str(c.shared), pool_uid="pool-uid")
    pool_of_before.contains(bytes(32))
    pool_of_before.close()
    a = c.node("a", **pool)
    wait_for(lambda: list((c.shared / "sweep").glob("term-*")) or None, "a term has begun")
    assert a.stop() == 0
    assert (c.shared / "sweep" / "term-000000000001").stat().st_mtime == 0


def test_capacity_and_quota_hold_for_all_sidecars_together(cluster):
    c = cluster(index=True, shared=True)
    pool = settings(c, capacity_bytes=40 * FILE, cache={"tenant_quota_bytes": 20 * FILE})
    a, b = (c.node(name, arguments=["--metrics-per-tenant"], **pool) for name in ("a", "b"))
    store(a, range(15))
    store(b, range(15, 30))
    store(b, range(5), "team-b")
    wait_for(lambda: sum(n.status()["shared"]["copies"].get("copied", 0) for n in (a, b)) == 35, "all are copied")
    one_holder(a, b)
    c.flush_index()
    wait_for(lambda: len(blocks_of(c.shared)) <= 25, "the tenant over its quota lost blocks")
    holder = one_holder(a, b)
    wait_for(lambda: sorted(sweep_of(holder)["tenants"].values())[:1] == [5 * FILE], "the other tenant lost none")
    assert max(sweep_of(holder)["tenants"].values()) <= 20 * FILE
    assert set(sweep_of(holder)["removed"]) == {"quota"}
    assert b'kvpool_sidecar_shared_tenant_bytes{tenant="' in holder.get("/metrics")
    for round_ in range(1, 4):
        for tenant in ("team-a", "team-b"):
            store(a, range(100 * round_, 100 * round_ + 10), tenant)
    wait_for(lambda: a.status()["shared"]["waiting"] == 0, "all copies are dealt with")
    wait_for(lambda: len(blocks_of(c.shared)) <= 0.85 * 40, "the capacity holds", timeout=30)
    assert len(blocks_of(c.shared)) >= 10


def test_two_pools_on_one_mount(cluster):
    c = cluster(index=False, shared=True)
    one, two = c.shared / "one", c.shared / "two"
    nodes = []
    for name, directory, idle in (("a", one, 3600), ("b", two, 0)):
        directory.mkdir()
        tier = config.SharedTier("shared", str(directory), sweep_lease_s=1, sweep_every_s=1)
        nodes.append(c.node(name, uid=f"pool-{name}", shared=tier, cache=config.CacheConfig(idle_ttl_s=idle)))
    a, b = nodes
    intruder = c.node("c", uid="pool-c", shared=tier, cache=config.CacheConfig(idle_ttl_s=1))
    for node in (a, b):
        store(node, range(5))
    wait_for(lambda: len(blocks_of(one)) == len(blocks_of(two)) == 5, "copied")
    for file in [*blocks_of(one), *blocks_of(two)]:
        os.utime(file, (time.time() - 86400,) * 2)
    wait_for(lambda: blocks_of(one) == [], "the one pool's blocks are too old")
    wait_for(lambda: sweep_of(b)["last_seconds"] > 0, "the other one sweeps as well")
    wait_for(lambda: "not the directory of this pool" in sweep_of(intruder)["problem"], "a third one is told")
    assert len(blocks_of(two)) == 5
    assert sweep_of(a)["holder"]
    assert sweep_of(b)["holder"]
    assert not sweep_of(intruder)["holder"]


def test_a_mount_that_is_not_there_yet_is_swept_once_it_is(cluster):
    c = cluster(index=False, shared=True)
    c.shared.rmdir()
    a = c.node("a", **settings(c))
    wait_for(lambda: "No such file" in sweep_of(a)["problem"], "it is told")
    c.shared.mkdir()
    store(a, [1])
    wait_for(lambda: sweep_of(a)["holder"], "it is swept", timeout=60)
    assert sweep_of(a)["problem"] == ""
