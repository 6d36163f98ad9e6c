"""One pod's unfinished writes: the other tenant of the node loses no block and no store."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess

import pytest
from sc_nodes import MIB, Cluster, wait_for
from sc_raw import GoneError, block_id, payload

from kvpool import config
from kvpool.protocol.wire import CommitStatus


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path, index=False) as c:
        yield c


def blocks(first, count, size=64 * 1024):
    return {block_id(n): payload(n, size) for n in range(first, first + count)}


def hoard(node, connections, per_connection, size, stack):
    """Begin writes on many connections of team-a and keep the descriptors."""
    kept = []
    for c in range(connections):
        raw = stack.enter_context(node.connect("team-a"))
        for first in range(0, per_connection, 64):
            wanted = [(block_id(1_000_000 + c * 10_000 + first + n), size) for n in range(64)]
            with contextlib.suppress(GoneError):
                kept += [fd for *_, fd in raw.begin(wanted) if fd >= 0]
    return kept


def test_a_thousand_unfinished_writes_refuse_no_store_of_others(cluster):
    node = cluster.node("a")
    good = blocks(0, 24)
    with contextlib.ExitStack() as stack, node.connect("team-b") as other:
        assert other.put(good) == [CommitStatus.STORED] * 24
        kept = hoard(node, 8, 128, 4096, stack)
        assert len(kept) == 768  # three quarters of the places
        for first in range(100, 140, 4):
            assert other.put(blocks(first, 4)) == [CommitStatus.STORED] * 4
        assert other.get(list(good)) == list(good.values())
        for fd in kept:
            os.close(fd)


def test_with_few_descriptors_the_last_ones_are_kept_for_others(cluster, monkeypatch):
    few = functools.partial(
        subprocess.Popen, preexec_fn=functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, 256))
    )
    with monkeypatch.context() as m:
        m.setattr(subprocess, "Popen", few)
        node = cluster.node("a")
    with contextlib.ExitStack() as stack:
        kept = hoard(node, 8, 128, 4096, stack)
        assert len(kept) == 24
        for first in range(100, 132, 4):
            with node.connect("team-b") as other:
                assert other.put(blocks(first, 4)) == [CommitStatus.STORED] * 4
                assert other.get([block_id(first)]) == [payload(first, 64 * 1024)]
        assert node.get("/healthz") == b"ok\n"
        for fd in kept:
            os.close(fd)


def test_a_writer_can_neither_fill_the_drive_nor_the_memory(cluster):
    small = config.LocalTier("nvme", str(cluster.directory / "a/nvme"), 64 * MIB, reserve_free_percent=0)
    node = cluster.node("a", local=(small,))
    good = blocks(0, 24)
    with node.connect("team-a") as evil, node.connect("team-b") as other:
        assert other.put(good) == [CommitStatus.STORED] * 24
        ((_, _, _, fd),) = evil.begin([(block_id(1_000_000), 4096)])
        with pytest.raises(PermissionError):
            os.pwrite(fd, bytes(MIB), 8192)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd, 0, 100 * MIB)
        status = node.status()["landing"]
        assert (status["places"], status["bytes"]) == (1, 8192)
        os.close(fd)
        evil.close()
        wait_for(lambda: node.status()["landing"]["places"] == 0, "the write is aborted with its connection")
        assert other.get(list(good)) == list(good.values())


def test_descriptors_of_removed_blocks_cost_the_others_nothing_and_free_their_space(cluster):
    small = config.LocalTier("nvme", str(cluster.directory / "a/nvme"), 128 * MIB, reserve_free_percent=0)
    node = cluster.node(
        "a", local=(small,), cache=config.CacheConfig(tenant_quota_bytes=16 * MIB, eviction_policy="LRU")
    )
    good = blocks(0, 24)
    with node.connect("team-a") as evil, node.connect("team-b") as other:
        assert other.put(good) == [CommitStatus.STORED] * 24
        mine = blocks(1_000_000, 12, MIB)
        assert evil.put(mine) == [CommitStatus.STORED] * 12
        kept = [entry.fd for entry in evil.open(list(mine))]
        assert (
            evil.put(blocks(2_000_000, 15, MIB)) == [CommitStatus.STORED] * 15
        )  # its quota removes the blocks that it keeps open
        wait_for(lambda: node.status()["landing"]["held_bytes"] > 8 * MIB, "held")
        (fields,) = node.status()["landing"]["tenants"].values()
        assert fields["held_bytes"] > 8 * MIB
        assert evil.get([block_id(2_000_014)]) == [None]
        assert evil.put(blocks(3_000_000, 1)) == [-1]
        assert node.status()["refused"].items() >= {"held-files": 1, "full": 1}.items()
        assert other.put(blocks(100, 4)) == [CommitStatus.STORED] * 4
        wait_for(lambda: sum(os.fstat(fd).st_blocks for fd in kept) < 2 * MIB // 512, "freed", 60)
        wait_for(lambda: node.status()["landing"]["held_bytes"] == 0, "no longer held", 30)
        assert evil.put(blocks(3_000_000, 1)) == [CommitStatus.STORED]
        assert other.get(list(good)) == list(good.values())
        for fd in kept:
            os.close(fd)
