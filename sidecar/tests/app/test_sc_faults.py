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
from sc_fault_blocks import blocks, change, close, files_of, fresh, wait_copied
from sc_nodes import Cluster, wait_for
from sc_raw import GoneError, block_id, exactly, payload

from kvpool.errors import CorruptBlockError
from kvpool.protocol import wire

Commit, Tier = wire.CommitStatus, wire.Tier


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
        assert [e.status for e in entries] == [wire.OpenStatus.STREAM_DIAL] + [wire.OpenStatus.STREAM] * 19
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
