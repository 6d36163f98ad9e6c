"""The shared tier and the space of several nodes: copies, capacity, eviction, writers that never commit."""

from __future__ import annotations

import os
import threading

from sc_fault_blocks import blocks, fresh, wait_copied
from sc_nodes import MIB, wait_for
from sc_raw import block_id, header, payload, write_block

from kvpool import config
from kvpool.protocol import wire

Commit, Tier = wire.CommitStatus, wire.Tier


# -- the shared tier


def test_several_sidecars_copy_the_same_blocks_to_the_shared_tier_and_all_are_whole(sharing):
    c, *nodes = sharing
    items = blocks(fresh(), 20)

    def store(node):
        with node.connect() as raw:
            raw.put(items)

    threads = [threading.Thread(target=store, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for node in nodes:
        wait_copied(node)
    with c.node("e").connect() as raw:
        assert raw.get(list(items)) == list(items.values())
    assert os.listdir(c.shared / "tmp") == []


def test_a_shared_directory_of_another_pool_is_not_used(cluster):
    c = cluster(shared=True, index=False)
    a = c.node("a", uid="pool-one")
    b = c.node("b", uid="pool-two")
    items = blocks(0, 3)
    with a.connect() as raw:
        raw.put(items)
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 3, "copied")
    with b.connect() as raw:
        assert raw.lookup(list(items)) == [0] * 3
        assert raw.put(items) == [Commit.STORED] * 3
    wait_for(lambda: "belongs to pool pool-one" in b.status()["shared"]["problem"], "said so")
    assert b.status()["shared"]["copies"].get("copied", 0) == 0


def test_local_only_copies_nothing(cluster):
    c = cluster(shared=True, index=False)
    a = c.node("a", cache=config.CacheConfig(write_policy="LocalOnly"))
    with a.connect() as raw:
        raw.put(blocks(0, 3))
        shared = a.status()["shared"]
        assert shared.pop("sweep")["blocks"] == 0
        assert shared | {"problem": ""} == {
            "configured": True,
            "available": True,
            "problem": "",
            "waiting": 0,
            "dirty_bytes": 0,
            "copies": {},
        }
    assert a.stop() == 0
    assert not [f for f in c.shared.rglob("blocks/*/*/*") if f.is_file()]


def test_the_shared_tier_is_not_filled_beyond_its_capacity(cluster):
    c = cluster(shared=True, index=False)
    limit = config.SharedTier("shared", str(c.shared), capacity_bytes=5 * MIB)
    a = c.node("a", shared=limit)
    with a.connect() as raw:
        raw.put(blocks(0, 10, MIB))
    wait_for(lambda: sum(a.status()["shared"]["copies"].values()) == 10, "all tried")
    assert a.status()["shared"]["copies"] == {"copied": 4, "full": 6}


# -- space


def test_a_full_node_evicts_what_was_not_used_and_stays_within_its_capacity(cluster):
    c = cluster()
    small = config.LocalTier("nvme", str(c.directory / "a" / "nvme"), 20 * MIB, reserve_free_percent=0)
    a, b = c.node("a", local=(small,)), c.node("b")
    hot = blocks(0, 3, MIB)
    with a.connect() as raw, b.connect() as other:
        raw.put(hot)
        for first in range(10, 70, 3):
            assert raw.put(blocks(first, 3, MIB)) == [Commit.STORED] * 3
            assert raw.get(list(hot)) == list(hot.values())
        status = a.status()
        assert status["used_bytes"] <= 20 * MIB
        assert status["events"]["evicted"] >= 40
        wait_for(lambda: a.status()["used_bytes"] <= 17 * MIB, "down to the high watermark")
        a.wait_announced()
        assert raw.get(list(hot)) == list(hot.values())
        wait_for(lambda: other.lookup([block_id(10)]) == [0], "evicted blocks leave the index")
        assert other.lookup(list(hot)) == [Tier.PEER] * 3


def test_writers_that_never_commit_cost_others_nothing_for_long(cluster):
    c = cluster(index=False)
    a = c.node("a", local=(config.LocalTier("nvme", str(c.directory / "a/nvme"), 32 * MIB, reserve_free_percent=0),))
    with a.connect("team-a") as hoarder, a.connect("team-b") as other:
        kept = [fd for *_, fd in hoarder.begin([(block_id(n), MIB) for n in range(30)]) if fd >= 0]
        assert len(kept) == 7  # a quarter of the capacity
        assert other.put(blocks(100, 7, MIB)) == [Commit.STORED] * 7
        hoarder.close()
        for fd in kept:
            wait_for(lambda fd=fd: os.fstat(fd).st_blocks == 0, "given back although the descriptors are held")
            os.close(fd)


def test_a_commit_that_comes_after_anothers_is_told_that_the_block_is_there(cluster):
    a = cluster(index=False).node("a")
    with a.connect() as slow:
        ((_, token, key, fd),) = slow.begin([(block_id(1), 5000)])
        with a.connect() as quick:
            assert quick.put(blocks(1, 1, 5000)) == [Commit.STORED]
        write_block(fd, header(block_id(1), key, payload(1, 5000), slow.server.tenant_tag), payload(1, 5000))
        assert slow.commit([token]) == [Commit.HAVE]
        assert slow.get([block_id(1)]) == [payload(1, 5000)]
