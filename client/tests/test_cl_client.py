"""The client against a sidecar that misbehaves: the deadline holds, every failure is a miss with a reason, and no bytes
reach the engine that are not those of the block it asked for. What a good sidecar does: test_cl_sidecar.py."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cl_fake_sidecar import TAG, FakeSidecar, block_id_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.errors import ConfigError, DeadlineExceededError
from kvpool.protocol import wire
from kvpool.protocol.wire import Op, Tier
from kvpool.stats import Reason
from kvpool.transport.connection import Connection

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

FP = b"f" * 32
SIZE = 64 * 1024
FAST = Deadlines(lookup_ms=50, load_min_ms=300, store_ms=2000, breaker_failures=3, breaker_cooldown_ms=200)


def config(fake: FakeSidecar, **changes: Any) -> ClientConfig:
    return ClientConfig(**{"socket": fake.path, "connect_retry_ms": 50, "deadlines": FAST, **changes})


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    client = Client(config(fake), fingerprint=FP, labels={"engine": "test 1", "model": "m"})
    assert client.wait_connected(5)
    yield client
    client.close()


def block_ids(n: int) -> list[bytes]:
    return [block_id_of(f"block {i}") for i in range(n)]


def payload(i: int, size: int = SIZE) -> bytes:
    return bytes([i % 251]) * size


def plant(fake: FakeSidecar, n: int, size: int = SIZE) -> list[bytes]:
    names = block_ids(n)
    for i, block_id in enumerate(names):
        fake.plant(block_id, FP, payload(i, size))
    return names


def buffers(n: int, size: int = SIZE) -> list[bytearray]:
    return [bytearray(size) for _ in range(n)]


def until(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


@pytest.fixture
def patient(fake: FakeSidecar) -> Iterator[Client]:
    """For what is not about deadlines."""
    deadlines = Deadlines(lookup_ms=20_000, load_min_ms=20_000, store_ms=20_000)
    client = Client(config(fake, deadlines=deadlines), fingerprint=FP, labels={"engine": "test 1", "model": "m"})
    assert client.wait_connected(20)
    yield client
    client.close()


def test_store_lookup_load(fake: FakeSidecar, patient: Client) -> None:
    client = patient
    names = block_ids(150)
    stored = client.put_from(names, [payload(i) for i in range(150)])
    assert all(r.ok and r.stored and r.bytes == SIZE for r in stored)
    assert all(r.ok and not r.stored for r in client.put_from(names[:3], [payload(i) for i in range(3)]))
    assert client.lookup([*names, block_id_of("other"), *names[:1]]) == [Tier.LOCAL] * 150 + [Tier.MISS] * 2
    assert client.lookup([block_id_of("other"), *names[:1]], exhaustive=True) == [Tier.MISS, Tier.LOCAL]
    out = buffers(150)
    assert {(r.ok, r.tier, r.reason) for r in client.get_into(names, out)} == {(True, Tier.LOCAL, "")}
    assert [bytes(b) for b in out] == [payload(i) for i in range(150)]
    assert client.stats()["hits"] == {"local": 150}
    assert client.stats()["stored_bytes"] == {"stored": 150 * SIZE}
    assert fake.hellos[0] == wire.ClientHello(
        FP, "test 1", "m", reads_granted=True, lookup_reports=True, dials_streams=True
    )


def test_blocks_of_peers_come_by_stream_and_mix_with_files(fake: FakeSidecar, client: Client) -> None:
    names = plant(fake, 130)
    fake.peer_blocks = set(names[::3])
    out = buffers(130)
    results = client.get_into(names, out, time.monotonic() + 5)
    assert [r.ok for r in results] == [True] * 130
    assert [r.tier for r in results] == [Tier.LOCAL if i % 3 else Tier.PEER for i in range(130)]
    assert [bytes(b) for b in out] == [payload(i) for i in range(130)]


def test_a_partial_hit_loads_what_is_there(fake: FakeSidecar, client: Client) -> None:
    names = plant(fake, 4)
    fake.file_of(names[1]).unlink()
    results = client.get_into(names, buffers(4))
    assert [r.reason for r in results] == ["", Reason.ABSENT, "", ""]


@pytest.mark.parametrize("wrong", ["read-only", "length", "strided", "other count", "not a buffer"])
def test_buffers_that_do_not_fit_are_misses(fake: FakeSidecar, client: Client, wrong: str) -> None:
    names = plant(fake, 2)
    bad: Any = {
        "read-only": bytes(SIZE),
        "length": bytearray(SIZE - 1),
        "strided": memoryview(bytearray(2 * SIZE))[::2],
        "not a buffer": "text",
    }.get(wrong)
    given = [bytearray(SIZE)] if wrong == "other count" else [bytearray(SIZE), bad]
    results = client.get_into(names, given)
    assert [r.ok for r in results] == [wrong != "other count", False]
    assert results[1].reason == (Reason.LENGTH if wrong == "length" else Reason.BUFFER)


def test_a_fingerprint_of_another_length_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        Client(ClientConfig(), fingerprint=b"short")


@pytest.mark.parametrize("stream", [False, True])
def test_corrupt_blocks_are_misses_and_are_reported(fake: FakeSidecar, client: Client, stream: bool) -> None:
    names = plant(fake, 3)
    data = bytearray(fake.file_of(names[1]).read_bytes())
    data[5000] ^= 1
    fake.file_of(names[1]).write_bytes(data)
    if stream:
        fake.peer_blocks = set(names)
    assert [r.reason for r in client.get_into(names, buffers(3))] == ["", Reason.CORRUPT, ""]
    assert until(lambda: any(names[1].hex() in r.get("corrupt", []) for r in fake.reports))


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_of_another_length_is_a_miss_is_reported_and_costs_no_other(
    fake: FakeSidecar, client: Client, stream: bool
) -> None:
    names = plant(fake, 3)
    data = fake.file_of(names[1]).read_bytes()
    fake.file_of(names[1]).write_bytes(data[:-7])
    if stream:
        fake.peer_blocks = {names[1]}
    assert [r.reason for r in client.get_into(names, buffers(3))] == ["", Reason.LENGTH, ""]
    assert until(lambda: any(names[1].hex() in r.get("corrupt", []) for r in fake.reports))
    assert client.wait_connected(5)
    assert [r.reason for r in client.get_into(names[2:], buffers(1))] == [""]


def test_a_peer_that_sends_another_length_than_was_announced_is_a_miss_and_is_reported(
    fake: FakeSidecar, client: Client
) -> None:
    names = plant(fake, 3)
    fake.peer_blocks = {names[1]}
    fake.corrupt_stream = lambda answer: answer[:8] + (len(answer) - 100).to_bytes(8, "little") + answer[16:]
    assert [r.reason for r in client.get_into(names, buffers(3))] == ["", Reason.PROTOCOL, ""]
    assert until(lambda: any(names[1].hex() in r.get("corrupt", []) for r in fake.reports))


def test_blocks_of_another_fingerprint_tenant_or_name_are_misses(fake: FakeSidecar, client: Client) -> None:
    names = block_ids(4)
    fake.plant(names[0], b"g" * 32, payload(0))
    fake.plant(names[1], FP, payload(1), tenant_tag=bytes(16))
    fake.plant(names[2], FP, payload(2), block_id=names[3])
    fake.plant(names[3], FP, payload(3), block_key=bytes(32))
    assert [r.reason for r in client.get_into(names, buffers(4))] == [Reason.CORRUPT] * 4


def test_blocks_of_the_tenants_that_the_sidecar_named_are_loaded_and_of_no_others(fake: FakeSidecar) -> None:
    names = block_ids(4)
    granted = bytes(range(16)), b"g" * 16
    for n, (name, tag) in enumerate(zip(names, (*granted, TAG, b"x" * 16), strict=True)):
        fake.plant(name, FP, payload(n), tenant_tag=tag)
    lying = fake.plant(block_ids(5)[4], FP, payload(4), tenant_tag=granted[0])
    lying.write_bytes(lying.read_bytes()[:-1] + b"?")
    fake.hello = {"readable_tags": granted}
    client = Client(config(fake), fingerprint=FP)
    assert client.wait_connected(10)
    assert fake.hellos[0].reads_granted
    out = buffers(5)
    reasons = [result.reason for result in client.get_into(block_ids(5), out)]
    assert reasons == ["", "", "", Reason.CORRUPT, Reason.CORRUPT]
    assert out[:3] == [payload(n) for n in range(3)]
    client.close()


def test_no_sidecar_is_a_fast_miss() -> None:
    client = Client(ClientConfig(socket="/nonexistent/kv.sock"), fingerprint=FP)
    client.lookup(block_ids(1))
    began = time.perf_counter()
    for _ in range(100):
        assert client.lookup(block_ids(1)) == [Tier.MISS]
        assert client.get_into(block_ids(1), buffers(1))[0].reason == Reason.NO_SIDECAR
        assert client.put_from(block_ids(1), buffers(1))[0].reason == Reason.NO_SIDECAR
    assert (time.perf_counter() - began) / 300 < 0.001
    assert not client.reachable
    client.close()


def hang(*_: Any) -> bool:
    return True  # "answered": by silence


def test_a_sidecar_that_hangs_costs_the_deadline_once_and_then_less_than_a_millisecond(
    fake: FakeSidecar, client: Client
) -> None:
    names = plant(fake, 2)
    fake.faults = {Op.LOOKUP: hang, Op.OPEN: hang}
    for call, limit in (
        (lambda: client.lookup(names), 0.05),
        (lambda: client.get_into(names, buffers(2)), 0.3),
    ):
        began = time.monotonic()
        call()
        assert limit * 0.8 < time.monotonic() - began < limit + 0.25
    client.lookup(names)
    stats = client.stats()
    assert stats["misses"][Reason.DEADLINE] + stats["lookup_misses"][Reason.DEADLINE] >= 4
    times = []
    for _ in range(50):
        began = time.perf_counter()
        client.lookup(names)
        times.append(time.perf_counter() - began)
        assert client.get_into(names, buffers(2))[0].reason in (Reason.BREAKER, Reason.NO_SIDECAR)
    assert sorted(times)[40] < 0.001
    fake.faults.clear()
    assert until(lambda: client.lookup(names) == [Tier.LOCAL] * 2)  # one trial after the cool-down closes it


def test_a_late_answer_to_a_lookup_is_thrown_away_and_the_connection_stays(fake: FakeSidecar) -> None:
    names = plant(fake, 2)
    client = Client(config(fake, connections=1), fingerprint=FP)
    assert client.wait_connected(5)
    hellos = len(fake.hellos)
    fake.delay_s = 0.08
    assert client.lookup(names) == [Tier.MISS] * 2
    fake.delay_s = 0.0
    assert until(lambda: client.lookup([block_id_of("absent")], exhaustive=True) == [Tier.MISS], 1)
    assert until(lambda: client.lookup(names) == [Tier.LOCAL] * 2, 1)
    assert len(fake.hellos) == hellos
    client.close()


def test_a_late_block_table_is_closed_and_the_connection_stays(fake: FakeSidecar, tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_bytes(bytes(4096))

    def late(connection: socket.socket, head: wire.Head, _: Any) -> bool:
        time.sleep(0.1)
        fake.send(connection, head, b"", 0, [os.open(table, os.O_RDONLY)])
        return True

    fake.faults = {Op.MAP: late}
    connection = Connection(str(fake.path), wire.ClientHello(FP, "late", ""), 5.0)
    with pytest.raises(DeadlineExceededError):
        connection.request(Op.MAP, deadline=time.monotonic() + 0.02, max_descriptors=1, abandonable=True)
    connection.request(Op.REPORT, b"{}", deadline=time.monotonic() + 5)
    assert len(fake.reports) == 1
    assert not connection.broken
    assert until(lambda: str(table) not in [file.path for file in psutil.Process().open_files()])
    connection.close()


@pytest.mark.parametrize("op", [Op.LOOKUP, Op.OPEN, Op.BEGIN, Op.COMMIT])
@pytest.mark.parametrize(
    "body", [b"", b"\0" * 48, b"\xff" * 48, b"\1" * 96, b"\2" + bytes(47), b"\3" + bytes(95), bytes(4000)]
)
def test_wrong_answers_are_misses_and_the_next_connection_works(
    fake: FakeSidecar, client: Client, op: Op, body: bytes
) -> None:
    names = plant(fake, 2)

    def lie(connection: socket.socket, head: wire.Head, _: Any) -> bool:
        fake.send(connection, head, body, head.items)
        return True

    fake.faults = {op: lie}
    client.lookup(names)
    assert not any(r.ok for r in client.get_into(names, buffers(2))) or op != Op.OPEN
    assert not any(r.ok for r in client.put_from(block_ids(9)[7:], buffers(2))) or op not in (Op.BEGIN, Op.COMMIT)
    fake.faults.clear()
    assert until(lambda: all(r.ok for r in client.get_into(names, buffers(2))))
    assert until(lambda: all(r.ok for r in client.put_from(block_ids(9)[5:7], buffers(2))))


@pytest.mark.parametrize("extra", [-1, 1, 3])
def test_too_many_or_too_few_descriptors(fake: FakeSidecar, client: Client, extra: int) -> None:
    names = plant(fake, 2)
    before = psutil.Process().num_fds()

    def lie(connection: socket.socket, head: wire.Head, _: Any) -> bool:
        body = b"".join(wire.OPEN_REPLY.pack(wire.OpenStatus.FILE, 1, 0, 0, SIZE, bytes(32)) for _ in range(2))
        fake.send(connection, head, body, 2, [os.open("/dev/null", os.O_RDONLY) for _ in range(2 + extra)])
        return True

    fake.faults = {Op.OPEN: lie}
    for _ in range(6):
        assert not any(r.ok for r in client.get_into(names, buffers(2)))
        until(lambda: client.connected)
    fake.faults.clear()
    assert until(lambda: all(r.ok for r in client.get_into(names, buffers(2))))
    assert psutil.Process().num_fds() <= before + 8  # nothing leaks with each lie


def test_descriptors_that_are_not_files(fake: FakeSidecar, client: Client) -> None:
    names = plant(fake, 2)
    reader, writer = os.pipe()

    def lie(connection: socket.socket, head: wire.Head, _: Any) -> bool:
        body = b"".join(wire.OPEN_REPLY.pack(wire.OpenStatus.FILE, 1, 0, 0, SIZE, bytes(32)) for _ in range(2))
        fake.send(connection, head, body, 2, [os.dup(reader), os.open("/dev/zero", os.O_RDONLY)])
        return True

    fake.faults = {Op.OPEN: lie}
    assert [r.reason for r in client.get_into(names, buffers(2))] == [Reason.IO, Reason.CORRUPT]
    os.close(reader)
    os.close(writer)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packet=st.binary(min_size=1, max_size=300), op=st.sampled_from([Op.LOOKUP, Op.OPEN, Op.BEGIN]))
def test_garbage_packets_never_raise_and_never_load(fake: FakeSidecar, packet: bytes, op: Op) -> None:
    names = plant(fake, 1)
    client = Client(config(fake, connections=1), fingerprint=FP)

    def garbage(connection: socket.socket, *_: Any) -> bool:
        connection.send(packet)
        return True

    fake.faults = {op: garbage}
    assert client.wait_connected(5)
    client.lookup(names)
    client.get_into(names, buffers(1))
    client.put_from(block_ids(5)[4:], buffers(1))
    fake.faults.clear()
    client.close()


def test_a_stream_that_stalls_ends_at_the_deadline_and_nothing_is_written_later(
    fake: FakeSidecar, client: Client
) -> None:
    names = plant(fake, 3, 1 << 20)
    fake.peer_blocks = set(names)
    go = threading.Event()
    sent = []

    def stall(data: bytes) -> bytes:
        sent.append(1)
        if len(sent) == 2:
            go.wait(10)
        return data

    fake.corrupt_stream = stall
    out = buffers(3, 1 << 20)
    began = time.monotonic()
    results = client.get_into(names, out, time.monotonic() + 0.3)
    assert time.monotonic() - began < 0.6
    assert [r.ok for r in results] == [True, False, False]
    assert results[1].reason == Reason.DEADLINE
    for buffer in out:
        buffer[:] = b"\xaa" * len(buffer)  # the engine uses its memory for something else
    go.set()
    assert until(lambda: len(fake.hellos) > 4)  # the client has thrown the connection away and made a new one
    assert all(set(buffer) == {0xAA} for buffer in out)
    assert until(lambda: all(r.ok for r in client.get_into(names, out)))


@pytest.mark.parametrize("cut", [0, 8, 16, 1000, 5000])
def test_a_stream_that_is_cut_spoils_its_connection_only(fake: FakeSidecar, client: Client, cut: int) -> None:
    names = plant(fake, 3)
    fake.peer_blocks = set(names)
    fake.corrupt_stream = lambda data: b"!" * 8 + data[cut:]
    results = client.get_into(names, buffers(3), time.monotonic() + 0.3)
    assert not any(r.ok for r in results)
    fake.corrupt_stream = None
    assert until(lambda: all(r.ok for r in client.get_into(names, buffers(3))))


def test_stores_beyond_the_limit_are_dropped_at_once(fake: FakeSidecar) -> None:
    client = Client(config(fake, max_inflight_stores=4), fingerprint=FP)
    assert client.wait_connected(5)
    hold = threading.Event()
    fake.faults = {Op.BEGIN: lambda *_: hold.wait(5) and False}
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.extend(client.put_from(block_ids(4), buffers(4))))
    thread.start()
    assert until(lambda: Op.BEGIN in fake.requests)
    began = time.monotonic()
    assert {r.reason for r in client.put_from(block_ids(9)[5:], buffers(4))} == {Reason.BUSY}
    assert time.monotonic() - began < 0.1
    hold.set()
    thread.join(5)
    assert all(r.ok for r in first)
    client.close()


def test_a_block_that_is_larger_than_the_pool_allows_is_not_even_asked_for(fake: FakeSidecar) -> None:
    fake.hello = {"max_block_bytes": SIZE}
    client = Client(config(fake), fingerprint=FP)
    assert client.wait_connected(5)
    results = client.put_from(block_ids(2), [bytes(SIZE + 1), bytes(SIZE)])
    assert [r.reason for r in results] == [Reason.REFUSED, ""]
    client.close()


def test_deadlines_of_the_pool_are_adopted_unless_set_here(fake: FakeSidecar) -> None:
    fake.hello = {"deadlines": {"lookup_ms": 77, "load_min_ms": 700, "unknown": 5}}
    client = Client(config(fake, deadlines=Deadlines(load_min_ms=300)), fingerprint=FP)
    assert client.wait_connected(5)
    assert client.lookup_seconds == 0.077, "an engine decides by it how long its first lookup may take"
    assert client.load_seconds(1) == 0.3
    assert client.load_seconds(10**9) == pytest.approx(3.0)
    client.close()


def test_misses_and_hits_are_reported(fake: FakeSidecar, client: Client) -> None:
    names = plant(fake, 1)
    client.get_into([*names, block_id_of("absent")], buffers(2))
    client.report()
    report = fake.reports[-1]
    times = report.pop("seconds")
    assert report == {"hits": {"local": 1}, "bytes": {"local": SIZE}, "misses": {"absent": 1}}
    assert sum(times.pop("local")[:-1]) == 1
    assert times == {}


def test_many_threads_share_a_client(fake: FakeSidecar, client: Client) -> None:
    names = plant(fake, 40)
    fake.peer_blocks = set(names[::4])
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(15):
            part = [(seed * 7 + n * 3 + k) % 40 for k in range(10)]
            out = buffers(10)
            results = client.get_into([names[i] for i in part], out, time.monotonic() + 10)
            wrong.extend(r for r in results if not r.ok)
            wrong.extend(i for i, b in zip(part, out, strict=True) if bytes(b) != payload(i))
            client.lookup(names, time.monotonic() + 5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_after_close_everything_misses_and_threads_end(fake: FakeSidecar) -> None:
    names = plant(fake, 1)
    before = {t.name for t in threading.enumerate()}
    fds = psutil.Process().num_fds()
    client = Client(config(fake), fingerprint=FP)
    assert client.wait_connected(5)
    client.get_into(names, buffers(1))
    client.put_from(block_ids(3)[2:], buffers(1))
    client.close()
    client.close()
    assert client.lookup(names) == [Tier.MISS]
    assert client.get_into(names, buffers(1))[0].reason == Reason.CLOSED
    assert until(lambda: not {t.name for t in threading.enumerate() if t.name.startswith("kvpool")} - before)
    fake.stop()
    assert until(lambda: psutil.Process().num_fds() <= fds)


def test_a_deadline_that_has_passed_makes_no_other_call_busy(client: Client, fake: FakeSidecar) -> None:
    block_id = block_id_of("x")
    fake.plant(block_id, FP, b"x" * 100)
    buffer = bytearray(100)
    client.lookup([block_id], time.monotonic() - 60)  # two failures: the circuit breaker does not open
    client.get_into([block_id], [buffer], time.monotonic() - 60)
    assert client.lookup([block_id], time.monotonic() + 10) == [Tier.LOCAL]
    assert client.get_into([block_id], [buffer], time.monotonic() + 10)[0].ok
