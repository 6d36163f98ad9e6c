"""The client with real sidecars, a real Redis and real files."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import MIB, Cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines, TenantConfig, dumps
from kvpool.protocol import block
from kvpool.protocol.keys import block_id
from kvpool.protocol.wire import Tier
from kvpool.stats import Reason
from kvpool.transport import block_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FP = b"f" * 32


def engine_blocks(*labels: object) -> list[bytes]:
    return [block_id(FP, repr(label).encode()) for label in labels]


@contextlib.contextmanager
def connect(socket: str, **changes: Any) -> Iterator[Client]:
    fingerprint = changes.pop("fingerprint", FP)
    settings = {"socket": socket, "connect_retry_ms": 100, **changes}
    client = Client(ClientConfig(**settings), fingerprint=fingerprint, labels={"engine": "tests", "model": "m"})
    try:
        assert client.wait_connected(10)
        yield client
    finally:
        client.close()


def until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with an index, and no shared tier: what b finds of a's comes from a."""
    cluster = Cluster(tmp_path_factory.mktemp("pair"), ("a", "b"), tenants=("team", "other"))
    yield cluster
    cluster.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Cluster]:
    """One node without an index, for tests that treat it badly."""
    deadlines = Deadlines(lookup_ms=100, load_min_ms=300, breaker_failures=3, breaker_cooldown_ms=300)
    cluster = Cluster(tmp_path, ("a",), index=False, deadlines=deadlines)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("size", [1, 4096, 100_001, 2 * MIB, 32 * MIB])
def test_a_block_comes_back_as_it_was(pair: Cluster, aligned: Callable[[int], memoryview], size: int) -> None:
    names = engine_blocks(("same", size))
    data, out = aligned(size), aligned(size)
    data[:] = os.urandom(size)
    with connect(pair["a"].socket) as client:
        assert client.lookup(names) == [Tier.MISS]
        assert client.put_from(names, [data])[0].stored
        assert client.lookup(names) == [Tier.LOCAL]
        assert client.put_from(names, [data])[0] == (True, False, "", 0)
        assert client.get_into(names, [out])[0] == (True, Tier.LOCAL, "", size)
    assert out == data


def test_a_block_is_found_on_the_other_node_and_streams_from_there(
    pair: Cluster, aligned: Callable[[int], memoryview]
) -> None:
    names = engine_blocks(*[("peer", n) for n in range(70)])
    size = 256 * 1024
    with connect(pair["a"].socket) as here, connect(pair["b"].socket) as there:
        assert all(r.stored for r in here.put_from(names, [bytes([n]) * size for n in range(70)]))
        assert until(lambda: all(there.lookup(names)))
        assert set(there.lookup(names)) == {Tier.PEER}
        out = [aligned(size) for _ in names]
        results = there.get_into(names, out)
        assert {(r.ok, r.tier) for r in results} == {(True, Tier.PEER)}
        for n, view in enumerate(out):
            assert view[:10] == view[-10:] == bytes([n]) * 10
        again = there.get_into(names, out)  # on the same connection to the peer
        assert all(r.ok for r in again)


def test_lookups_stop_at_the_first_miss_unless_every_block_counts(pair: Cluster) -> None:
    names = engine_blocks(*[("prefix", n) for n in range(6)])
    with connect(pair["a"].socket) as client:
        assert all(r.ok for r in client.put_from([*names[:2], *names[3:]], [b"x" * 64] * 5))
        assert client.lookup(names) == [1, 1, 0, 0, 0, 0]
        assert client.lookup(names, exhaustive=True) == [1, 1, 0, 1, 1, 1]


def test_a_prompt_of_thousands_of_blocks_is_looked_up_at_once(pair: Cluster) -> None:
    names = engine_blocks(*[("long", n) for n in range(5000)])
    with connect(pair["a"].socket) as client:
        assert client.lookup(names) == [Tier.MISS] * 5000
        assert client.lookup(names, exhaustive=True) == [Tier.MISS] * 5000


def test_tenants_do_not_see_each_other(pair: Cluster) -> None:
    names = engine_blocks("tenants")
    with connect(pair["a"].sockets["team"]) as team, connect(pair["a"].sockets["other"]) as other:
        assert team.put_from(names, [b"ours" * 100])[0].stored
        assert team.lookup(names) == [Tier.LOCAL]
        assert other.lookup(names) == [Tier.MISS]
        assert other.get_into(names, [bytearray(400)])[0].reason == Reason.NEVER_STORED
        assert other.put_from(names, [b"mine" * 100])[0].stored  # not "have it": that would tell
        out = bytearray(400)
        assert other.get_into(names, [out])[0].ok
        assert out == b"mine" * 100
        assert team.get_into(names, [out])[0].ok
        assert out == b"ours" * 100


def test_a_tenant_that_may_read_another_loads_its_blocks_from_when_it_may_until_it_may_no_more(tmp_path: Path) -> None:
    names = engine_blocks(*[("common", n) for n in range(20)])
    data = [bytes([n]) * 300_000 for n in range(20)]
    base = TenantConfig("base", "kvt:base:1", ("base",))
    reader = TenantConfig("reader", "kvt:reader:2", ("reader",))
    cluster = Cluster(tmp_path, ("a", "b"), tenants=("base", "reader"))

    def grant(*reads_from: str) -> None:
        tenants = (base, dataclasses.replace(reader, reads_from=reads_from))
        for node in cluster.nodes.values():
            node.pool = dataclasses.replace(node.pool, tenants=tenants, generation=node.pool.generation + 1)
            (node.home / "pool.json").write_text(dumps(node.pool))
            assert until(lambda n=node: n.status()["config"]["generation"] == n.pool.generation, 20)

    try:
        grant()
        with connect(cluster["a"].sockets["base"]) as owner:
            assert until(lambda: all(r.stored for r in owner.put_from(names, data)), 20)
            assert until(lambda: owner.lookup(names) == [Tier.LOCAL] * 20)
            with connect(cluster["a"].sockets["reader"]) as here, connect(cluster["b"].sockets["reader"]) as there:
                assert here.lookup(names) == there.lookup(names) == [Tier.MISS] * 20
                grant(base.id)
                for client, tier in ((here, Tier.LOCAL), (there, Tier.PEER)):
                    assert until(lambda c=client, t=tier: c.lookup(names) == [t] * 20, 20)
                    out = [bytearray(300_000) for _ in names]
                    assert until(lambda c=client, o=out: all(r.ok for r in c.get_into(names, o)))
                    assert out == data
                assert owner.lookup(names) == [Tier.LOCAL] * 20
                grant()
                for client in (here, there):
                    assert until(lambda c=client: c.lookup(names) == [Tier.MISS] * 20 and c.reachable, 20)
                    assert not any(r.ok for r in client.get_into(names, [bytearray(300_000) for _ in names]))
    finally:
        cluster.close()


def test_another_fingerprint_never_loads_a_block_of_the_same_name(pair: Cluster) -> None:
    names = engine_blocks("fingerprints")
    with connect(pair["a"].socket) as mine, connect(pair["a"].socket, fingerprint=b"g" * 32) as theirs:
        assert mine.put_from(names, [b"x" * 64])[0].stored
        assert not theirs.get_into(names, [bytearray(64)])[0].ok


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans(), number=st.integers(0, 10**9))
def test_a_block_that_was_damaged_on_the_drive_is_a_miss(
    alone: Cluster, where: float, bit: int, cut: bool, number: int
) -> None:
    names = engine_blocks(("damage", number, where, bit, cut))
    with connect(alone["a"].socket, connections=1) as client:
        known = set(alone["a"].block_files())
        if not client.put_from(names, [b"payload " * 1000])[0].stored:
            return  # the same example again
        (file,) = set(alone["a"].block_files()) - known
        data = bytearray(file.read_bytes())
        at = min(int(where * len(data)), len(data) - 1)
        data[at] ^= 1 << bit
        file.chmod(0o600)
        file.write_bytes(data[:at] if cut else data)
        out = bytearray(8000)
        assert not client.get_into(names, [out])[0].ok


def test_a_damaged_block_is_reported_and_goes_away(alone: Cluster) -> None:
    names = engine_blocks("quarantine")
    with connect(alone["a"].socket) as client:
        assert client.put_from(names, [b"x" * 8000])[0].stored
        (file,) = alone["a"].block_files()
        data = bytearray(file.read_bytes())
        data[6000] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
        assert client.get_into(names, [bytearray(8000)])[0].reason == Reason.CORRUPT
        assert until(lambda: client.lookup(names) == [Tier.MISS])
        assert client.put_from(names, [b"x" * 8000])[0].stored
        assert client.get_into(names, [bytearray(8000)])[0].ok


def test_a_stopped_sidecar_costs_the_deadline_and_then_nothing(alone: Cluster) -> None:
    names = engine_blocks("stopped")
    with connect(alone["a"].socket) as client:
        assert client.put_from(names, [b"x" * 8000])[0].stored
        alone["a"].signal(signal.SIGSTOP)
        assert until(lambda: client.lookup(names) == [Tier.MISS], 5), "its block table is valid for a second"
        worst: dict[str, float] = {"lookup": 0.0, "load": 0.0}
        for _ in range(12):
            began = time.monotonic()
            assert client.lookup(names) == [Tier.MISS]
            worst["lookup"] = max(worst["lookup"], time.monotonic() - began)
            began = time.monotonic()
            assert not client.get_into(names, [bytearray(8000)])[0].ok
            worst["load"] = max(worst["load"], time.monotonic() - began)
        assert worst["lookup"] < 0.1 + 0.2
        assert worst["load"] < 0.3 + 0.2
        times = []
        for _ in range(20):
            began = time.perf_counter()
            client.lookup(names)
            times.append(time.perf_counter() - began)
        assert sorted(times)[10] < 0.001
        alone["a"].signal(signal.SIGCONT)
        assert until(lambda: client.lookup(names) == [Tier.LOCAL], 5)
        assert until(lambda: client.get_into(names, [bytearray(8000)])[0].ok, 5)


def test_a_sidecar_that_is_killed_and_returns_is_found_within_five_seconds(alone: Cluster) -> None:
    names = engine_blocks("killed")
    with connect(alone["a"].socket, connect_retry_ms=1000) as client:
        assert client.put_from(names, [b"x" * 8000])[0].stored
        alone["a"].stop(kill=True)
        assert client.lookup(names) == [Tier.MISS]
        assert not client.get_into(names, [bytearray(8000)])[0].ok
        alone["a"].start()
        alone["a"].wait_ready()
        returned = time.monotonic()
        assert client.wait_connected(5)
        assert time.monotonic() - returned < 5
        assert client.lookup(names) == [Tier.LOCAL]
        assert client.get_into(names, [bytearray(8000)])[0].ok


def test_killing_the_sidecar_during_loads_and_stores_gives_misses_only(alone: Cluster) -> None:
    size = 256 * 1024
    labels = engine_blocks(*[("during", n) for n in range(30)])
    wrong: list[Any] = []
    stop = threading.Event()

    def work(client: Client, seed: int) -> None:
        n = seed
        while not stop.is_set():
            n += 1
            i = n % 30
            client.put_from([labels[i]], [bytes([i]) * size])
            out = bytearray(b"\xee" * size)
            if client.get_into([labels[i]], [out])[0].ok and out != bytes([i]) * size:
                wrong.append(i)

    with connect(alone["a"].socket) as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.3)
            alone["a"].stop(kill=True)
            alone["a"].start()
            alone["a"].wait_ready()
        stop.set()
        for thread in threads:
            thread.join(20)
        assert wrong == []
        assert client.wait_connected(5)
        assert client.put_from(labels[:1], [bytes(size)])[0].ok


def _child(socket: str, names: list[bytes], answer: Any) -> None:
    with connect(socket) as client:
        out = bytearray(8000)
        answer.send((client.get_into(names, [out])[0].ok, bytes(out[:1])))


def test_a_block_that_one_process_stored_is_loaded_by_another(pair: Cluster) -> None:
    names = engine_blocks("processes")
    with connect(pair["a"].socket) as client:
        assert client.put_from(names, [b"z" * 8000])[0].stored
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(pair["a"].socket, names, send))
    process.start()
    assert receive.poll(20)
    assert receive.recv() == (True, b"z")
    process.join(10)


def test_a_client_that_cannot_checksum_has_the_sidecar_do_it(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    names = engine_blocks("verify", "verify too")
    with connect(pair["a"].socket) as client:
        with monkeypatch.context() as patch:
            patch.setattr(block, "CAN_CHECKSUM", False)
            assert client.put_from(names[:1], [b"x" * 8000])[0].stored
            out = bytearray(8000)
            assert client.get_into(names[:1], [out])[0].ok
            assert out == b"x" * 8000
        assert client.get_into(names[:1], [out])[0].ok  # the sidecar has filled in the right checksum
        known = set(pair["a"].block_files())
        assert client.put_from(names[1:], [b"y" * 8000])[0].stored
        (file,) = set(pair["a"].block_files()) - known
        data = bytearray(file.read_bytes())
        data[6000] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
        with monkeypatch.context() as patch:
            patch.setattr(block, "CAN_CHECKSUM", False)
            assert not client.get_into(names[1:], [out])[0].ok


def test_a_client_that_lies_in_a_header_stores_nothing(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    original = block.encode_header
    for lie in ({"block_key": bytes(32)}, {"block_id": bytes(32)}, {"tenant_tag": bytes(16)}, {"payload_len": 7999}):
        names = engine_blocks(("lie", *lie))
        monkeypatch.setattr(
            block, "encode_header", lambda header, lie=lie: original(dataclasses.replace(header, **lie, stored_len=-1))
        )
        with connect(pair["a"].socket) as client:
            assert client.put_from(names, [b"x" * 8000])[0].reason == Reason.REJECTED
            assert client.lookup(names) == [Tier.MISS]


def test_a_client_that_keeps_the_descriptor_open_changes_nothing(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = engine_blocks("keeps the descriptor")
    original, kept = block_writer.write_file, []

    def keeping(store: Any, batch: Any, expect: Any) -> None:
        kept.append(os.dup(store.descriptor))
        original(store, batch, expect)

    monkeypatch.setattr(block_writer, "write_file", keeping)
    with connect(pair["a"].socket) as client:
        assert client.put_from(names, [b"x" * 8000])[0].stored
        for descriptor in kept:
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"y", 4096)
            os.close(descriptor)
        view = bytearray(8000)
        assert client.get_into(names, [view])[0].ok
        assert view == b"x" * 8000


def test_a_shared_tier_serves_a_node_that_has_lost_its_drive(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("a", "b"), shared=True)
    try:
        names = engine_blocks(*[("shared", n) for n in range(3)])
        with connect(cluster["a"].socket) as client:
            assert all(r.stored for r in client.put_from(names, [bytes([n]) * 8000 for n in range(3)]))
            assert until(lambda: len([f for f in cluster.shared.rglob("*") if len(f.name) == 64]) == 3)
        cluster["a"].stop(kill=True)
        cluster.index.stop(kill=True)
        with connect(cluster["b"].socket) as client:
            assert until(lambda: client.lookup(names) == [Tier.SHARED] * 3)
            out = [bytearray(8000) for _ in names]
            assert {(r.ok, r.tier) for r in client.get_into(names, out)} == {(True, Tier.SHARED)}
            assert [bytes(b[:1]) for b in out] == [bytes([n]) for n in range(3)]
    finally:
        cluster.close()
