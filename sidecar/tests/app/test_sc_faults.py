"""Several nodes, a real index, a shared directory: what is found where, and what a fault costs. Real processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sc_nodes import MIB, Cluster, wait_for
from sc_raw import GoneError, block_id, exactly, header, payload, write_block

from kvpool import config
from kvpool.errors import CorruptBlockError
from kvpool.protocol import wire

Commit, Tier = wire.CommitStatus, wire.Tier


def blocks(first: int, count: int, size: int = 64 * 1024) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, size) for n in range(first, first + count)}


def files_of(node, raw, names, below="blocks"):
    """The files of some blocks, by block id."""
    keys = {}
    for name, entry in zip(names, raw.open(names), strict=True):
        os.close(entry.fd)
        keys[name] = entry.key.hex()
    found = {f.name: f for f in node.files(below)}
    return {name: found[key] for name, key in keys.items()}


def close(entries) -> None:
    for entry in entries:
        if entry.fd >= 0:
            os.close(entry.fd)


def change(path, offset: int, byte: int | None = None) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0xFF if byte is None else byte]))


_numbers = iter(range(0, 10_000_000, 1000))


def fresh() -> int:
    """A number whose blocks no other test uses."""
    return next(_numbers)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes and an index, for tests that leave the processes as they are."""
    with Cluster(tmp_path_factory.mktemp("pair")) as c:
        yield c, c.node("a"), c.node("b")


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """The same with a shared tier and without an index."""
    with Cluster(tmp_path_factory.mktemp("sharing"), index=False, shared=True) as c:
        yield c, c.node("a"), c.node("b")


def wait_copied(node) -> None:
    def copied() -> bool:
        status = node.status()
        return sum(status["shared"]["copies"].values()) >= status["stored"].get("blocks", 0)

    wait_for(copied, f"{node.name} has copied all it stored")


# -- where a block is found


def test_a_block_is_found_on_the_own_node_on_a_peer_and_on_the_shared_tier(cluster):
    c = cluster(shared=True)
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 20)
    names = list(items)
    with a.connect() as raw:
        assert raw.put(items) == [Commit.STORED] * 20
        assert raw.lookup(names) == [Tier.LOCAL] * 20
    a.wait_announced()
    with b.connect() as raw:
        assert raw.lookup(names) == [Tier.PEER] * 20
        entries = raw.open(names)
        assert [e.status for e in entries] == [wire.OpenStatus.STREAM_NEW_CONN] + [wire.OpenStatus.STREAM] * 19
        assert {(e.stream, e.length) for e in entries} == {(entries[0].stream, 64 * 1024)}
        assert [raw.read(e)[4096:] for e in entries] == list(items.values())
        again = raw.open(names[:5])  # the stream is kept: no new one for the next blocks
        assert {e.status for e in again} == {wire.OpenStatus.STREAM}
        assert [raw.read(e)[4096:] for e in again] == list(items.values())[:5]
        without = raw.open(names, flags=wire.Flag.LOCAL_ONLY)
        assert {e.tier for e in without} <= {Tier.MISS, Tier.SHARED}
        close(without)
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 20, "copied to the shared tier")
    assert a.stop() == 0
    with b.connect() as raw:
        assert raw.get(names) == list(items.values())
        assert raw.lookup(names) == [Tier.SHARED] * 20
    assert b.status()["served"]["shared"] >= 20


def test_the_longest_prefix_is_found_over_all_tiers(pair):
    _, a, b = pair
    items = blocks(fresh(), 60, 1000)
    names = list(items)
    with a.connect() as raw_a, b.connect() as raw_b:
        raw_a.put({n: items[n] for n in names[:30]})
        raw_b.put({n: items[n] for n in names[20:50]})
        a.wait_announced()
        b.wait_announced()
        assert raw_a.lookup([*names, block_id(fresh())]) == [Tier.LOCAL] * 30 + [Tier.PEER] * 20 + [0] * 11
        assert raw_b.lookup(names) == [Tier.PEER] * 20 + [Tier.LOCAL] * 30 + [0] * 10
        assert raw_a.get(names[:50]) == [items[n] for n in names[:50]]


def test_two_tenants_never_meet_on_a_peer_or_on_the_shared_tier(cluster):
    c = cluster(shared=True)
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 5)
    names = list(items)
    with a.connect("team-a") as raw:
        raw.put(items)
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 5, "copied")
    with b.connect("team-b") as stranger, b.connect("team-a") as owner:
        assert stranger.lookup(names) == [0] * 5
        assert stranger.get(names) == [None] * 5
        assert owner.get(names) == list(items.values())


def test_a_block_that_a_peer_has_lost_is_a_miss_and_the_index_is_put_right(pair):
    c, a, b = pair
    items = blocks(fresh(), 3)
    names = list(items)
    with a.connect() as raw:
        raw.put(items)
        a.wait_announced()
        for file in files_of(a, raw, names).values():
            file.unlink()
        before = a.status()["blocks"]
        with b.connect() as other:
            assert other.lookup(names) == [Tier.PEER] * 3
            assert other.get(names) == [None] * 3
        assert raw.get(names) == [None] * 3
    wait_for(lambda: a.status()["blocks"] == before - 3, "noticed")
    with c.node("d").connect() as third:
        wait_for(lambda: third.lookup(names) == [0] * 3, "the index is right")


# -- corruption


@pytest.fixture(scope="module")
def solid(tmp_path_factory):
    """One node for tests that only spoil single blocks."""
    with Cluster(tmp_path_factory.mktemp("solid"), index=False) as c:
        yield c.node("a")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(offset=st.one_of(st.integers(0, 4095), st.integers(4096, 4096 + 4999)), byte=st.integers(0, 255))
def test_any_flipped_byte_is_a_miss_and_the_block_is_quarantined(solid, offset, byte):
    n = fresh()
    with solid.connect() as raw:
        raw.put({block_id(n): payload(n, 5000)})
        (file,) = files_of(solid, raw, [block_id(n)]).values()
        before = file.read_bytes()
        change(file, offset, byte)
        if file.read_bytes() == before:
            assert raw.get([block_id(n)]) == [payload(n, 5000)]
            return
        with pytest.raises(CorruptBlockError):
            raw.get([block_id(n)])
        raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(n).hex()]}))
        wait_for(lambda: raw.lookup([block_id(n)]) == [0], "taken out of service")
        wait_for(lambda: not file.exists(), "moved away")
        assert raw.put({block_id(n): payload(n, 5000)}) == [Commit.STORED]
        assert raw.get([block_id(n)]) == [payload(n, 5000)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(size=st.integers(0, 4096 + 4999))
def test_a_block_truncated_anywhere_is_a_miss(solid, size):
    n = fresh()
    with solid.connect() as raw:
        raw.put({block_id(n): payload(n, 5000)})
        (file,) = files_of(solid, raw, [block_id(n)]).values()
        file.chmod(0o600)
        os.truncate(file, size)
        try:
            assert raw.get([block_id(n)]) == [None]
        except CorruptBlockError:
            raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(n).hex()]}))
        wait_for(lambda: raw.lookup([block_id(n)]) == [0], "taken out of service")


def test_a_corrupt_block_of_a_peer_is_quarantined_there_and_not_asked_for_again(pair):
    _, a, b = pair
    items = blocks(fresh(), 2)
    names = list(items)
    with a.connect() as raw, b.connect() as other:
        raw.put(items)
        a.wait_announced()
        change(files_of(a, raw, names)[names[0]], 9000)
        with pytest.raises(CorruptBlockError):
            other.get(names[:1])
        other.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [names[0].hex()]}))
        wait_for(lambda: len(a.files("quarantine")) == 1, "quarantined by its owner")
        wait_for(lambda: other.lookup(names, flags=wire.Flag.EXHAUSTIVE) == [0, Tier.PEER], "not asked for again")
        assert other.get(names[1:]) == [items[names[1]]]


def test_a_corrupt_block_of_the_shared_tier_is_quarantined(sharing):
    c, a, b = sharing
    items = blocks(fresh(), 1)
    (name,) = items
    with a.connect() as raw, b.connect() as other:
        raw.put(items)
        wait_copied(a)
        (own,) = files_of(a, raw, [name]).values()
        (file,) = c.shared.rglob(f"blocks/*/*/{own.name}")
        change(file, 5000)
        with pytest.raises(CorruptBlockError):
            other.get([name])
        other.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [name.hex()]}))
        wait_for(lambda: not file.exists(), "quarantined")
        assert other.get([name]) == [None]


# -- processes that die, hang and return


def test_a_sidecar_killed_while_it_is_written_to_has_whole_blocks_only(cluster):
    a = cluster(index=False).node("a")
    stored: set[int] = set()
    rng = random.Random(7)
    first = 0
    for _ in range(4):
        stop = threading.Event()

        def write(worker, first=first, stop=stop):
            n = first + worker * 10_000
            try:
                with a.connect() as raw:
                    while not stop.is_set():
                        if raw.put(blocks(n, 4, 20_000)) == [Commit.STORED] * 4:
                            stored.update(range(n, n + 4))
                        n += 4
            except (GoneError, OSError):
                pass

        threads = [threading.Thread(target=write, args=(w,)) for w in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2 + rng.random() * 0.3)
        a.kill()
        stop.set()
        for thread in threads:
            thread.join()
        first += 100_000
        a.start()
        a.ready()
        wait_for(lambda: a.status()["scanned"], "scanned")
        assert a.status()["events"].get("junk", 0) == 0
        assert [f for f in a.nvme.rglob("*") if f.is_file() and "blocks" not in f.parts] == [a.nvme / "POOL_ID"]
        with a.connect() as raw:
            numbers = sorted(stored)
            for at in range(0, len(numbers), 64):
                some = numbers[at : at + 64]
                assert raw.get([block_id(n) for n in some]) == [payload(n, 20_000) for n in some]
        assert a.status()["blocks"] >= len(stored) > 0


def test_clients_go_on_after_a_restart_and_blocks_are_still_there(cluster):
    a = cluster().node("a")
    items = blocks(0, 10)
    raw = a.connect()
    raw.put(items)
    started = time.monotonic()
    assert a.stop() == 0
    assert time.monotonic() - started < 5
    with pytest.raises(GoneError):
        raw.lookup(list(items))
    raw.close()
    a.start()
    with a.connect() as raw:
        assert raw.get(list(items)) == list(items.values())
        assert raw.lookup(list(items)) == [Tier.LOCAL] * 10


def test_requests_under_way_are_finished_before_it_ends(cluster):
    a = cluster(index=False).node("a")
    with a.connect() as raw:
        items = blocks(0, 4, 16 << 20)
        raw.put(items)
        body = struct.pack("<I", 20_000) + b"".join(items)
        raw.send(wire.pack(wire.Op.OPEN, body, count=4, request=77, flags=wire.Flag.VERIFY))
        time.sleep(0.01)
        a.send(signal.SIGTERM)
        head, _, fds = raw.receive()
        assert head.request == 77
        assert len(fds) == 4
        for fd in fds:
            os.close(fd)
        with pytest.raises(GoneError):
            raw.receive()
    assert a.process.wait(10) == 0
    a.process = None


def test_a_flushed_index_comes_back_from_the_nodes(pair):
    c, a, b = pair
    items = blocks(fresh(), 30, 1000)
    names = list(items)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    epoch = a.status()["index"]["epoch"]
    c.flush_index()
    wait_for(lambda: a.status()["index"]["epoch"] != epoch, "the flush is noticed")
    a.wait_announced()
    with b.connect() as raw:
        wait_for(lambda: raw.lookup(names) == [Tier.PEER] * 30, "peers find the blocks again")
        assert raw.get(names) == list(items.values())


def test_while_redis_is_dead_own_and_shared_blocks_are_found_and_nothing_waits(cluster):
    c = cluster(shared=True)
    a, b = c.node("a"), c.node("b")
    mine, theirs = blocks(0, 10), blocks(100, 10)
    with b.connect() as raw, a.connect() as other:
        raw.put(mine)
        other.put(theirs)
        wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 10, "copied")
        b.wait_announced()
        c.index.kill()
        lookups = []
        for _ in range(20):
            started = time.monotonic()
            assert raw.lookup(list(mine), ms=2000) == [Tier.LOCAL] * 10
            assert raw.lookup(list(theirs), ms=2000) == [Tier.SHARED] * 10
            lookups.append(time.monotonic() - started)
        assert raw.get(list(theirs)) == list(theirs.values())
        assert sorted(lookups)[10] < 0.2
        assert raw.put(blocks(200, 5)) == [Commit.STORED] * 5
        wait_for(lambda: not b.status()["index"]["connected"], "noticed")
        assert b.get("/readyz") == b"ready\n"
        c.index.start()
        b.wait_announced()
        with a.connect() as third:
            wait_for(lambda: third.lookup(list(blocks(200, 5))) != [0] * 5, "found again")


def test_while_redis_stands_still_a_lookup_ends_by_its_deadline(pair):
    c, a, _ = pair
    n0 = fresh()
    with a.connect() as raw:
        raw.put(blocks(n0, 5))
        c.index.send(signal.SIGSTOP)
        try:
            for n in range(6):
                started = time.monotonic()
                assert raw.lookup([*blocks(n0, 5), block_id(n0 + 500 + n)], ms=100) == [Tier.LOCAL] * 5 + [0]
                assert time.monotonic() - started < 0.6
        finally:
            c.index.send(signal.SIGCONT)


def test_a_dead_peer_costs_its_blocks_and_the_shared_tier_stands_in(cluster):
    c = cluster(shared=True)
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 10)
    names = list(items)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 10, "copied")
    with b.connect() as raw:
        assert raw.lookup(names) == [Tier.PEER] * 10
        a.kill()  # no time to say goodbye: the index still names it
        assert raw.get(names) == list(items.values())
        assert b.status()["served"]["shared"] == 10


def test_a_peer_that_dies_in_the_middle_of_a_block_ends_the_stream(cluster):
    c = cluster()
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 2, 30 << 20)
    names = list(items)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    with b.connect() as raw:
        entries = raw.open(names)
        assert raw.streams[entries[0].stream].recv(1000)
        a.kill()
        stream = raw.streams[entries[0].stream]
        with pytest.raises((GoneError, ConnectionResetError)):
            exactly(stream, 2 * (4096 + (30 << 20)))
    with b.connect() as raw:
        assert raw.get(names, ms=500) == [None, None]


def test_a_peer_that_stands_still_costs_no_more_than_the_deadline(pair):
    _, a, b = pair
    items = blocks(fresh(), 2)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    a.send(signal.SIGSTOP)
    try:
        with b.connect() as raw:
            started = time.monotonic()
            entries = raw.open(list(items), ms=400)
            assert time.monotonic() - started < 1.5
            for entry in entries:  # a connection that was dialled ahead takes the question and never answers
                if entry.status != wire.OpenStatus.MISS:
                    raw.streams[entry.stream].settimeout(0.2)
                    with pytest.raises(TimeoutError):
                        raw.streams[entry.stream].recv(1)

        def not_asked_for_a_while() -> bool:
            with b.connect() as raw:
                started = time.monotonic()
                tiers = raw.lookup(list(items))
                assert time.monotonic() - started < 0.5
                return tiers == [0, 0]

        wait_for(not_asked_for_a_while, "the peer that said nothing is not asked")
    finally:
        a.send(signal.SIGCONT)
    with b.connect() as raw:
        wait_for(lambda: raw.get(list(items)) == list(items.values()), "served again", 20)


def test_a_node_that_returns_with_an_empty_drive_is_not_believed_to_have_its_old_blocks(cluster):
    c = cluster()
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 5)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    a.stop()
    shutil.rmtree(a.nvme)
    a.start()
    a.ready()
    a.wait_announced()
    with b.connect() as raw:
        # until its next heartbeat, b may still believe what it knew of the node before
        wait_for(lambda: raw.lookup(list(items)) == [0] * 5, "not believed")
        assert raw.get(list(items)) == [None] * 5


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
        wait_for(lambda: a.status()["used_bytes"] <= 15 * MIB, "down to the low watermark")
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
