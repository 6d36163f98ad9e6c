"""Connections come back by themselves, in the parent and in a forked child, and no busy loop meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import BusyError, PoolUnavailableError
from kvpool.protocol.wire import MISS_BUSY, OPEN_REPLY, Flag, Op, Tier
from kvpool.transport.slots import MAX_WAITING

if TYPE_CHECKING:
    from collections.abc import Iterator

FP = b"f" * 32


def until(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50), fingerprint=FP)
    assert client.wait_connected(5)
    yield client
    client.close()


def test_connects_within_five_seconds_of_the_sidecars_arrival_with_default_settings(tmp_path: Path) -> None:
    fake = FakeSidecar(tmp_path)
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP)
    assert not client.wait_connected(0.3)
    fake.start()
    assert client.wait_connected(5)
    client.close()
    fake.stop()


@pytest.mark.parametrize("connections", [1, 2, 3, 4, 99])
def test_a_sidecar_that_restarts_is_found_again(fake: FakeSidecar, connections: int) -> None:
    client = Client(ClientConfig(socket=fake.path, connections=connections, connect_retry_ms=50), fingerprint=FP)
    assert client.wait_connected(5)
    block_id = block_id_of("x")
    fake.plant(block_id, FP, b"x" * 100)
    for restarts in range(1, 4):
        fake.stop()
        assert until(lambda: not client.connected)  # noticed without asking
        assert client.lookup([block_id]) == [Tier.MISS]
        fake.start()
        # each connection is noticed alone: the last one may still count as alive when the first is replaced
        assert until(lambda restarts=restarts: len(fake.hellos) >= (1 + restarts) * min(connections, 8), 30)
        assert client.wait_connected(5)
        assert client.get_into([block_id], [bytearray(100)])[0].ok
    assert len(fake.hellos) == 4 * min(connections, 8)
    client.close()


def processor_seconds(threads: set[threading.Thread]) -> float:
    """Of these threads alone: whatever else runs in this process does not count."""
    spent = [Path(f"/proc/self/task/{t.native_id}/schedstat").read_text().split()[0] for t in threads]
    return sum(map(int, spent)) / 1e9


def test_waiting_for_a_sidecar_takes_no_processor_time(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    client = Client(ClientConfig(socket=str(tmp_path / "none")), fingerprint=FP)
    ours = set(threading.enumerate()) - others
    began = processor_seconds(ours)
    time.sleep(1.0)
    assert ours
    assert processor_seconds(ours) - began < 0.05
    client.close()


def test_an_idle_connection_takes_no_processor_time(fake: FakeSidecar) -> None:
    others = set(threading.enumerate())
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP)
    ours = {t for t in set(threading.enumerate()) - others if t.name.startswith("kvpool-")}
    assert client.wait_connected(5)
    began = processor_seconds(ours)
    time.sleep(1.0)
    assert ours
    assert processor_seconds(ours) - began < 0.05
    client.close()


def test_a_sidecar_that_accepts_and_hangs_up_is_not_stormed(fake: FakeSidecar) -> None:
    def hang_up(connection: Any, *_: Any) -> bool:
        connection.shutdown(2)
        return True

    fake.faults = {Op.HELLO: hang_up}
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=200), fingerprint=FP)
    time.sleep(1.1)
    assert len(fake.requests) <= 7
    fake.faults.clear()
    assert client.wait_connected(5)
    client.close()


def test_a_sidecar_that_never_says_hello_blocks_nobody(fake: FakeSidecar) -> None:
    fake.faults = {Op.HELLO: lambda *_: True}
    began = time.monotonic()
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP)
    assert client.lookup([block_id_of("x")]) == [Tier.MISS]
    assert time.monotonic() - began < 0.1
    fake.faults.clear()
    assert client.wait_connected(5)
    client.close()


def test_a_path_that_is_longer_than_an_address_can_be(fake: FakeSidecar, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (deep / "kv.sock").symlink_to(fake.path)
    client = Client(ClientConfig(socket=str(deep / "kv.sock")), fingerprint=FP)
    assert client.wait_connected(5)
    client.close()


@pytest.mark.parametrize("path", ["", "\0", "no\0good", "/proc/self/mem", "x" * 5000])
def test_a_path_that_cannot_be_a_socket_is_as_good_as_none(path: str, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(ClientConfig(socket=path, connect_retry_ms=50), fingerprint=FP)
    time.sleep(0.2)
    assert client.lookup([block_id_of("x")]) == [Tier.MISS]
    assert client._session.connections._maintainer.is_alive()
    client.close()


def test_another_protocol_version_is_refused(fake: FakeSidecar) -> None:
    fake.hello = {"version": 2}
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50), fingerprint=FP)
    assert until(lambda: len(fake.hellos) >= 2)
    assert not client.connected
    client.close()


def test_lookups_do_not_wait_behind_loads(fake: FakeSidecar) -> None:
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP)
    assert client.wait_connected(5)
    block_id = block_id_of("x")
    fake.plant(block_id, FP, b"x" * 100)
    hold = threading.Event()
    fake.faults = {Op.OPEN: lambda *_: hold.wait(5) and False}
    threads = [
        threading.Thread(target=lambda: client.get_into([block_id], [bytearray(100)], time.monotonic() + 5))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    assert until(lambda: fake.requests.count(Op.OPEN) == 2)
    assert client.lookup([block_id], time.monotonic() + 1) == [Tier.LOCAL]
    hold.set()
    for thread in threads:
        thread.join(10)
    client.close()


def test_a_forked_child_gets_connections_of_its_own(fake: FakeSidecar) -> None:
    block_id = block_id_of("x")
    fake.plant(block_id, FP, b"x" * 100)
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50), fingerprint=FP)
    assert client.wait_connected(5)
    assert client.get_into([block_id], [bytearray(100)])[0].ok
    before = len(fake.hellos)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        status = 1
        try:
            if client.wait_connected(5):
                out = bytearray(100)
                status = (
                    0 if client.get_into([block_id], [out], time.monotonic() + 5)[0].ok and out == b"x" * 100 else 2
                )
            client.close()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(fake.hellos) == before + 4
    assert client.get_into([block_id], [bytearray(100)])[0].ok  # the parent's are untouched
    assert len(fake.hellos) == before + 4
    client.close()


def held(client: Client, role: str, deadline: float = 60.0) -> Any:
    return client._session.connections.acquire(role, time.monotonic() + deadline)


def test_connections_are_handed_out_in_the_order_of_asking(client: Client) -> None:
    order: list[int] = []

    def ask(n: int) -> None:
        with held(client, "lookup"):
            order.append(n)

    with held(client, "lookup"):
        threads = []
        for n in range(12):
            threads.append(threading.Thread(target=ask, args=(n,)))
            threads[-1].start()
            assert until(lambda n=n: client._session.connections._slots.waiting == n + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(12))


def test_who_cannot_have_a_connection_in_time_is_turned_away_and_the_breaker_stays_shut(
    fake: FakeSidecar, client: Client
) -> None:
    fake.plant(block_id_of("x"), FP, b"x" * 100)
    loads = sum("load" in slot.roles for slot in client._session.connections._slots.slots)
    with contextlib.ExitStack() as all_of_them:
        for _ in range(loads):
            all_of_them.enter_context(held(client, "load"))
        for _ in range(20):
            (result,) = client.get_into([block_id_of("x")], [bytearray(100)], time.monotonic() + 0.01)
            assert (result.ok, result.reason) == (False, "busy")
    assert client.get_into([block_id_of("x")], [bytearray(100)])[0].ok
    assert client.stats()["misses"] == {"busy": 20}


def test_who_would_wait_too_long_by_what_the_last_ones_took_does_not_wait(client: Client) -> None:
    def take_turns() -> None:
        with held(client, "lookup", 1e6):
            pass

    lanes = [slot for slot in client._session.connections._slots.slots if "lookup" in slot.roles]
    client._session.connections._slots._held_s["lookup"] = 30.0
    with contextlib.ExitStack() as busy:
        for _ in lanes:
            busy.enter_context(held(client, "lookup"))
        waiting = [threading.Thread(target=take_turns) for _ in lanes]
        for thread in waiting:
            thread.start()
        assert until(lambda: client._session.connections._slots.waiting == len(lanes))
        with pytest.raises(BusyError, match="queue for a connection"), held(client, "lookup", 60):
            pass
        assert client._session.connections._slots.waiting == len(lanes)  # it did not even queue
    for thread in waiting:
        thread.join()


def test_who_gives_up_waiting_needs_no_lock_that_others_wait_for(client: Client) -> None:
    """A hundred threads give up at the same time, while the lock is held by a thread that does not run."""
    slots = client._session.connections._slots
    outcome: list[str] = []

    def ask() -> None:
        try:
            with held(client, "lookup", 0.5):
                outcome.append("got it")
        except BusyError:
            outcome.append("busy")

    with held(client, "lookup"):
        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        assert until(lambda: slots.waiting + len(outcome) == 100)
        with slots._condition:
            for thread in threads:
                thread.join(60)
        assert outcome == ["busy"] * 100
    assert slots.waiting == 0
    with held(client, "lookup"):  # those that gave up are not in the way
        pass


def test_a_connection_is_never_handed_to_who_gave_up(client: Client) -> None:
    """Threads give up just when a connection is released: each has one or none, and none is lost."""
    slots = client._session.connections._slots
    stop = time.monotonic() + 2.0
    counts = {"got it": 0, "busy": 0}

    def ask() -> None:
        while time.monotonic() < stop:
            slots._held_s.clear()  # no call is refused
            try:
                with held(client, "lookup", 0.005):
                    time.sleep(0.001)
                    counts["got it"] += 1
            except BusyError:
                counts["busy"] += 1

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(counts.values()) > 0, counts
    assert slots.waiting == 0
    assert not any(slot.busy for slot in slots.slots)


def test_those_who_wait_are_told_when_the_sidecar_goes(fake: FakeSidecar, client: Client) -> None:
    outcome: list[str] = []

    def ask() -> None:
        try:
            with held(client, "lookup"):
                outcome.append("got it")
        except PoolUnavailableError:
            outcome.append("gone")

    with held(client, "lookup"):
        thread = threading.Thread(target=ask)
        thread.start()
        assert until(lambda: client._session.connections._slots.waiting)
        fake.stop()
    thread.join(10)
    assert outcome in (["gone"], ["got it"])  # the dead connection may be handed on before it is known to be dead
    assert not thread.is_alive()


def test_done_is_told_only_if_the_answer_asks_for_it(fake: FakeSidecar, client: Client) -> None:
    fake.plant(block_id_of("x"), FP, b"x" * 100)
    assert client.get_into([block_id_of("x")], [bytearray(100)])[0].ok
    assert client.lookup([block_id_of("x")]) == [Tier.LOCAL]
    assert Op.DONE not in fake.requests
    fake.open_flags = Flag.WANTS_DONE
    assert client.get_into([block_id_of("x")], [bytearray(100)])[0].ok
    assert until(lambda: Op.DONE in fake.requests)
    assert client.get_into([block_id_of("x")], [bytearray(100)])[0].ok


def test_a_block_that_nobody_looked_for_is_a_miss_with_a_reason(fake: FakeSidecar, client: Client) -> None:
    def busy(connection: Any, head: Any, _: Any) -> bool:
        fake.send(connection, head, OPEN_REPLY.pack(0, 0, 0, MISS_BUSY, 0, bytes(32)), 1)
        return True

    fake.faults[Op.OPEN] = busy
    for _ in range(20):
        assert client.get_into([block_id_of("x")], [bytearray(100)])[0].reason == "busy"
    del fake.faults[Op.OPEN]
    fake.plant(block_id_of("x"), FP, b"x" * 100)
    assert client.get_into([block_id_of("x")], [bytearray(100)])[0].ok


def test_a_request_beyond_the_bound_is_refused_while_the_lock_is_held(client: Client) -> None:
    """Neither the bound nor the return of a connection waits for a thread that holds the lock and does not run."""
    slots = client._session.connections._slots
    with slots._condition, contextlib.ExitStack() as admitted:
        for _ in range(MAX_WAITING + 1):
            admitted.enter_context(slots.admitted("lookup"))
        ended = threading.Event()

        def ask() -> None:
            with contextlib.suppress(BusyError), held(client, "lookup", 60):
                pass
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        assert ended.wait(30)
    with held(client, "lookup"):
        pass


def test_a_connection_given_back_while_the_lock_is_held_is_free_afterwards(client: Client) -> None:
    slots = client._session.connections._slots
    holder = held(client, "lookup")
    holder.__enter__()
    ended = threading.Event()

    def give_back() -> None:
        holder.__exit__(None, None, None)
        ended.set()

    with slots.locked():
        threading.Thread(target=give_back, daemon=True).start()
        assert ended.wait(30)
        assert any(slot.busy for slot in slots.slots)
    assert not any(slot.busy for slot in slots.slots)
