"""Faults of the index with real sidecars: what they cost, and that the index is as before when they are over."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from sc_nodes import INDEX_PORT, Cluster, wait_for
from sc_raw import block_id, payload
from sc_redis import PASSWORD, Sentinels, Servers, TlsFront, plain

import kvpool_sidecar
from kvpool import config
from kvpool.errors import RetryableError
from kvpool.protocol import wire
from kvpool.transport import circuit_breaker
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_testing.index import A, B, key

Commit, Tier = wire.CommitStatus, wire.Tier


def blocks(first: int, count: int, size: int = 20_000) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, size) for n in range(first, first + count)}


def index_config(url: str, **kw) -> config.IndexConfig:
    return config.IndexConfig(url, **{"username": "kvpool", "lookup_timeout_ms": 1000, "lease_s": 2, **kw})


def entries(client) -> list[bytes]:
    return sorted(name for name in client.scan_iter(count=1000) if name.startswith(b"b") and len(name) == 17)


def test_fault_03_redis_killed_in_the_middle_of_traffic(cluster):
    """Lookups end by their deadline, own blocks are hits all the time, and peers' are found again soon after."""
    c = cluster()
    a, b = c.node("a"), c.node("b")
    mine, theirs = blocks(0, 20), blocks(100, 20)
    with a.connect() as raw:
        raw.put(theirs)
    with b.connect() as raw:
        raw.put(mine)
    a.wait_announced()
    b.wait_announced()
    stop, slow, wrong = threading.Event(), [], []

    def traffic() -> None:
        with b.connect() as raw:
            while not stop.is_set():
                started = time.monotonic()
                if raw.lookup(list(mine), ms=300) != [Tier.LOCAL] * 20:
                    wrong.append("an own block was missed")
                found = raw.lookup(list(theirs), ms=300)
                if time.monotonic() - started > 5:  # many times both deadlines, for a machine that is busy
                    slow.append(time.monotonic() - started)
                if not set(found) <= {Tier.PEER, Tier.MISS}:
                    wrong.append(f"peers' blocks are {found}")
                for got, expected in zip(raw.get(list(theirs)[:2], ms=2000), list(theirs.values())[:2], strict=True):
                    if got not in (None, expected):
                        wrong.append("other bytes")

    threads = [threading.Thread(target=traffic) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            time.sleep(0.3)
            c.index.kill()
            wait_for(lambda: not b.status()["index"]["connected"], "noticed")
            time.sleep(0.5)
            c.index.start()
            with b.connect() as raw:
                wait_for(lambda raw=raw: raw.lookup(list(theirs)) == [Tier.PEER] * 20, "found again", 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not slow
    with b.connect() as raw:  # a peer that was slow on a busy machine is not asked for two seconds
        wait_for(lambda: raw.get(list(theirs)) == list(theirs.values()), "all of it is served again")


def test_fault_04_flushall_is_made_good_from_the_drives_and_nothing_is_counted_twice(cluster):
    c = cluster()
    a, b = c.node("a"), c.node("b")
    items = blocks(0, 300, 1000)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    address = c.index_url.split("//")[1].split(":")[0]
    user = plain(address, INDEX_PORT, username="kvpool", password="index password")
    before = entries(user)
    assert len(before) == 300
    for _ in range(2):
        epoch = a.status()["index"]["epoch"]
        c.flush_index()
        wait_for(lambda epoch=epoch: a.status()["index"]["epoch"] != epoch, "the flush is noticed")
        a.wait_announced()
        assert entries(user) == before
        assert {len(user.get(name)) for name in before} == {12}  # one record each
        assert a.status()["index"]["announced"] == 300
    user.close()
    with b.connect() as raw:
        wait_for(lambda: raw.lookup(list(items)) == [Tier.PEER] * 300, "peers find them again")


def test_fault_04_an_empty_replica_that_is_promoted_is_filled_from_the_drives(tmp_path):
    with Sentinels(tmp_path) as servers, Cluster(_made(tmp_path / "c"), index=False) as c:
        (c.secret / "index-password").write_text(PASSWORD)
        pool = {"index": index_config(servers.url, username="")}
        a, b = c.node("a", **pool), c.node("b", **pool)
        items = blocks(0, 50, 1000)
        with a.connect() as raw:
            raw.put(items)
        a.wait_announced()
        old, new = servers.master, next(s for s in (servers.first, servers.second) if s is not servers.master)
        old.send(signal.SIGSTOP)
        try:
            wait_for(lambda: servers.master is new, "promoted", 60)
            new.client.flushall()  # as if nothing had been copied to it yet
            with b.connect() as raw:
                wait_for(lambda: raw.lookup(list(items)) == [Tier.PEER] * 50, "found at the new master", 60)
                assert raw.get(list(items)) == list(items.values())
            assert len(entries(new.client)) == 50
        finally:
            old.send(signal.SIGCONT)


def test_fault_25_calls_that_time_out_or_are_given_up_never_get_anothers_answer(tmp_path):
    """The pattern of CVE-2023-28858: stop waiting at random moments; the server stands still at others."""
    with Servers(tmp_path) as servers:
        server = servers.make("server")
        patient = RedisIndex(f"redis://{server.endpoint}/0")
        patient.announce([(key(n), Record(n % 60000 + 1, 1000 + n, 7)) for n in range(2000)])
        index = RedisIndex(f"redis://{server.endpoint}/0", timeout_s=0.05)
        guard = Bulkhead("index", 4, 64, CircuitBreaker(10**9, 1, time.monotonic))
        stop, wrong, counts = threading.Event(), [], {"answered": 0, "given up": 0}

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                numbers = [rng.randrange(2000) for _ in range(rng.choice((1, 5, 80)))]
                try:
                    if seed % 2:  # these stop waiting, while the connection goes on
                        found = guard.run(lambda ns=numbers: index.locate([key(n) for n in ns]), rng.random() * 0.004)
                    else:  # these give the connection up
                        found = index.locate([key(n) for n in numbers])
                except RetryableError:
                    counts["given up"] += 1
                    continue
                counts["answered"] += 1
                if found != [(Record(n % 60000 + 1, 1000 + n, 7),) for n in numbers]:
                    wrong.append((numbers, found))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                server.send(signal.SIGSTOP)
                time.sleep(0.08)
                server.send(signal.SIGCONT)
                time.sleep(0.05)
            wait_for(lambda: counts["answered"] > 200 and counts["given up"] > 200, "both happened", 60)
        finally:
            server.send(signal.SIGCONT)
            stop.set()
            for thread in threads:
                thread.join()
            guard.close()
        assert not wrong
        index.close()
        patient.close()


def test_fault_26_nothing_of_the_index_asks_what_time_it_is():
    """A default argument that is a clock would escape the test below."""
    home = Path(kvpool_sidecar.__file__).parent
    files = [*(home / "index").glob("*.py"), home / "resilience/bulkhead.py", Path(circuit_breaker.__file__)]
    assert len(files) > 10
    assert [file.name for file in files if re.search(r"time\.time|time_ns|datetime|from time", file.read_text())] == []


class Clock:
    """A monotonic clock and one that follows the wall, which somebody sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_fault_26_a_clock_that_jumps_expires_nothing_and_sticks_nothing(tmp_path, monkeypatch, jump):
    """Leases are Redis' own time and everything else is monotonic: the wall clock is asked by no one."""
    with Servers(tmp_path) as servers:
        server = servers.make("server")
        index = RedisIndex(f"redis://{server.endpoint}/0", lease_s=30)
        guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 0.2, time.monotonic))
        directory = BlockResolver(index, guard, lambda: 0, lease_s=30, lookup_s=10)
        a = index.join(A)
        epoch = index.renew(a, A)
        index.announce([(key(n), Record(a, 1000, A.generation)) for n in range(200)])
        assert all(directory.locate([key(n) for n in range(10)], 10))
        wall = time.time()
        monkeypatch.setattr(time, "time", lambda: wall + jump)
        monkeypatch.setattr(time, "time_ns", lambda: int((wall + jump) * 1e9))
        assert all(directory.locate([key(n) for n in range(20)], 10))
        assert all(directory.longest_prefix([key(n) for n in range(200)], 10))
        assert index.renew(a, A) == epoch
        assert index.nodes([a]) == {a: A}
        # the breaker that a failure opens closes again
        server.send(signal.SIGSTOP)
        for n in range(5):
            with contextlib.suppress(RetryableError):
                guard.run(lambda n=n: index.locate([key(n)]), 0.01)
        assert not guard.available
        server.send(signal.SIGCONT)
        wait_for(lambda: all(directory.locate([key(150)], 10)), "the breaker has closed")
        guard.close()
        index.close()


def test_fault_26_the_own_clock_of_a_node_that_was_suspended_ends_what_it_knew_of_others():
    """Suspended for an hour, a node asks again instead of trusting what it remembered."""
    clock = Clock()
    index = MemoryIndex(lease_s=15, clock=clock)
    directory = BlockResolver(
        index, Bulkhead("index", 1, 8, CircuitBreaker(3, 1, clock)), lambda: 0, lease_s=15, clock=clock
    )
    b = index.join(B)
    index.announce([(key(1), Record(b, 1000, B.generation))])
    assert directory.locate([key(1)], 10)[0]
    clock.now += 3600
    assert directory.locate([key(1)], 10) == [None]
    index.join(B)
    clock.now += 1.5
    assert directory.locate([key(1)], 10)[0]


def test_the_blocks_of_a_node_that_never_returns_leave_the_index(cluster):
    c = cluster()
    pool = {"index": index_config(c.index_url, forget_after_s=4)}
    a, b = c.node("a", **pool), c.node("b", **pool)
    lost, kept = blocks(0, 40, 1000), blocks(30, 20, 1000)
    with a.connect() as raw, b.connect() as other:
        raw.put(lost)
        other.put(kept)
    a.wait_announced()
    b.wait_announced()
    address = c.index_url.split("//")[1].split(":")[0]
    user = plain(address, INDEX_PORT, username="kvpool", password="index password")
    assert len(entries(user)) == 50
    a.kill()
    with b.connect() as raw:
        only_lost = list(lost)[:30]
        wait_for(lambda: raw.lookup(only_lost) == [Tier.MISS] * 30, "no answers once the lease has ended")
    wait_for(lambda: len(entries(user)) == 20, "its entries are gone", 60)
    assert {len(user.get(name)) for name in entries(user)} == {12}
    a.start()
    a.ready()
    wait_for(lambda: len(entries(user)) == 50, "it is back, and so are they", 30)
    user.close()


def test_a_sidecar_reaches_its_index_behind_tls(tmp_path):
    with Servers(tmp_path) as servers, Cluster(_made(tmp_path / "c"), index=False) as c:
        server = servers.make("server", "--requirepass", PASSWORD)
        front = TlsFront(tmp_path, (server.address, server.port))
        (c.secret / "index-password").write_text(PASSWORD)
        pool = {"index": index_config(f"rediss://{front.endpoint}/0", username="")}
        for name, source in (
            ("index-ca.crt", "ca.crt"),
            ("index-client.crt", "client.crt"),
            ("index-client.key", "client.key"),
        ):
            (c.secret / name).write_bytes((tmp_path / source).read_bytes())
        a, b = c.node("a", **pool), c.node("b", **pool)
        items = blocks(0, 5)
        with a.connect() as raw:
            raw.put(items)
        a.wait_announced()
        with b.connect() as raw:
            wait_for(lambda: raw.lookup(list(items)) == [Tier.PEER] * 5, "found")
        front.close()


def _made(path):
    path.mkdir()
    return path
