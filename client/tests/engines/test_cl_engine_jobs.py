"""What stands behind an engine plug-in and needs no engine: lookups, jobs, settings, facts, digests, entry point."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.engines.common.jobs import TransferJobs
from kvpool.engines.common.lookups import LookupTable
from kvpool.engines.common.settings import client_config
from kvpool.protocol.wire import Op, Tier
from kvpool.stats import Reason
from kvpool.transport.responses import LookupResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def until(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


class Pool:
    """Answers lookups; `gate` holds the answers back."""

    def __init__(self, *present: bytes) -> None:
        self.present = set(present)
        self.asked: list[list[bytes]] = []
        self.counted: list[tuple[list[bytes], list[bool], Reason]] = []
        self.gate = threading.Event()
        self.gate.set()

    def query(self, names: Sequence[bytes], deadline: float) -> LookupResult:
        self.asked.append(list(names))
        assert deadline > time.monotonic()
        self.gate.wait(5)
        tiers = [Tier.PEER if n in self.present else Tier.MISS for n in names]
        return LookupResult(tiers, Reason.NEVER_STORED if Tier.MISS in tiers else Reason.NONE)

    @property
    def wait_s(self) -> float:
        return 0.05

    def count(self, names: Sequence[bytes], hits: Sequence[bool], reason: Reason) -> None:
        self.counted.append((list(names), list(hits), reason))


@pytest.fixture
def pool() -> Pool:
    return Pool(b"a", b"b")


@pytest.fixture
def table(pool: Pool) -> Iterator[LookupTable]:
    table = LookupTable(pool)
    yield table
    pool.gate.set()
    table.close()


def test_one_question_per_request_and_step(pool: Pool, table: LookupTable) -> None:
    assert [table.lookup(k, "r1") for k in (b"a", b"b", b"c")] == [None] * 3
    assert table.lookup(b"a", "r2") is None
    assert pool.asked == []
    table.flush()
    assert until(lambda: table.lookup(b"a", "r2") is not None)
    assert sorted(pool.asked) == [[b"a"], [b"a", b"b", b"c"]]
    assert [table.lookup(k, "r1") for k in (b"a", b"b", b"c")] == [True, True, False]
    table.flush()
    time.sleep(0.02)
    assert len(pool.asked) == 2


def test_an_open_question_is_a_no_once_its_time_is_up_and_stays_one(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    assert table.lookup(b"a", "r") is None
    time.sleep(0.07)
    assert table.lookup(b"a", "r") is None  # not sent yet: the engine is in the middle of a step
    table.flush()
    began = time.monotonic()
    assert until(lambda: table.lookup(b"a", "r") is False)
    assert 0.04 < time.monotonic() - began < 0.2
    pool.gate.set()
    time.sleep(0.02)
    assert table.lookup(b"a", "r") is False
    assert table.deadline_misses == 1


def test_a_late_answer_counts_if_nobody_asked_meanwhile(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    table.lookup(b"a", "r")
    table.flush()
    time.sleep(0.1)  # the engine computes something else
    pool.gate.set()
    assert until(lambda: table._requests["r"][b"a"].tier is not None)
    assert table.lookup(b"a", "r") is True


def test_what_failed_to_load_is_never_offered_again_to_the_requests_that_live(pool: Pool, table: LookupTable) -> None:
    for request in ("r1", "r2"):
        table.lookup(b"a", request)
        table.lookup(b"b", request)
    table.flush()
    assert until(lambda: table.lookup(b"b", "r2") is True)
    table.mark_miss([b"a"])
    for _ in range(3):
        assert table.lookup(b"a", "r1") is False
        assert table.lookup(b"a", "r2") is False
        table.flush()
    assert table.lookup(b"b", "r1") is True
    table.finish("r1")
    assert table.lookup(b"a", "r3") is None  # a new request asks again


def test_finished_requests_leave_nothing_behind(pool: Pool, table: LookupTable) -> None:
    pool.gate.clear()
    for n in range(50):
        table.lookup(b"a", f"r{n}")
        table.flush()
        table.finish(f"r{n}")
    pool.gate.set()
    assert until(lambda: len(pool.asked) == 50)
    assert table._requests == {}
    assert table._fresh == {}


def test_a_lookup_that_fails_is_a_no(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    pool.query = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    table = LookupTable(pool)
    table.lookup(b"a", "r")
    table.flush()
    assert until(lambda: table.lookup(b"a", "r") is False)
    assert "lookup failed" in caplog.text
    table.close()


SIZE = 8192
FP = b"f" * 32


@pytest.fixture
def client(fake: FakeSidecar) -> Iterator[Client]:
    deadlines = Deadlines(load_min_ms=300, store_ms=1000, breaker_failures=100)
    client = Client(ClientConfig(socket=fake.path, connect_retry_ms=50, deadlines=deadlines), fingerprint=FP)
    assert client.wait_connected(5)
    yield client
    client.close()


@pytest.fixture
def jobs() -> Iterator[TransferJobs]:
    jobs = TransferJobs(2, 64)
    yield jobs
    jobs.drain(5)
    jobs.close()


def slots(n: int) -> list[memoryview]:
    memory = memoryview(bytearray(n * SIZE))
    return [memory[i * SIZE : (i + 1) * SIZE] for i in range(n)]


def test_jobs_store_and_load(client: Client, jobs: TransferJobs) -> None:
    names = [block_id_of(str(n)) for n in range(5)]
    here = slots(5)
    for n, slot in enumerate(here):
        slot[:] = bytes([n]) * SIZE
    jobs.submit_store(7, client, names, here)
    assert jobs.drain(5)
    (done,) = jobs.take_finished()
    assert (done.job, done.is_load, done.ok, done.bytes) == (7, False, (True,) * 5, 5 * SIZE)
    there = slots(6)
    jobs.submit_load(8, client, [*names, block_id_of("absent")], there)
    assert jobs.drain(5)
    (done,) = jobs.take_finished()
    assert (done.job, done.is_load, done.ok) == (8, True, (True,) * 5 + (False,))
    assert done.tiers[0] == Tier.LOCAL
    assert there[:5] == here
    assert jobs.pending == 0


def test_a_job_whose_sidecar_hangs_fails_at_its_deadline(fake: FakeSidecar, client: Client, jobs: TransferJobs) -> None:
    fake.faults = {Op.OPEN: lambda *_: True}
    began = time.monotonic()
    for n in range(3):
        jobs.submit_load(n, client, [block_id_of("x")], slots(1))
    assert time.monotonic() - began < 0.1  # never blocks the scheduler
    assert jobs.drain(5)
    assert time.monotonic() - began < 1.0
    assert [d.ok for d in jobs.take_finished()] == [(False,)] * 3


def test_stores_that_pile_up_are_dropped_at_once(fake: FakeSidecar, client: Client) -> None:
    jobs = TransferJobs(1, 4)
    hold = threading.Event()
    fake.faults = {Op.BEGIN: lambda *_: hold.wait(5) and False}
    names = [block_id_of(str(n)) for n in range(9)]
    jobs.submit_store(1, client, names[:4], slots(4))
    jobs.submit_store(2, client, names[4:], slots(5))
    assert [(d.job, any(d.ok)) for d in jobs.take_finished()] == [(2, False)]
    assert jobs.dropped == 5
    hold.set()
    assert jobs.drain(5)
    assert [(d.job, all(d.ok)) for d in jobs.take_finished()] == [(1, True)]
    jobs.submit_store(3, client, names[4:], slots(5))
    assert jobs.drain(5)
    assert all(jobs.take_finished()[0].ok)
    jobs.close()


def test_jobs_hold_no_memory_once_they_are_done(client: Client, jobs: TransferJobs) -> None:
    memory = memoryview(bytearray(4 * SIZE))
    names = [block_id_of(str(n)) for n in range(4)]
    views = [memory[n * SIZE : (n + 1) * SIZE] for n in range(4)]
    jobs.submit_store(1, client, names, views)
    jobs.submit_load(2, client, names, views)
    assert jobs.drain(5)
    jobs.take_finished()
    for view in views:
        view.release()

    def released() -> bool:
        try:
            memory.release()
        except BufferError:  # a thread is just letting go
            return False
        return True

    assert until(released)


def test_settings_of_the_user_win_over_the_environment() -> None:
    env = {"KVPOOL_CLIENT_CONFIG": json.dumps({"socket": "/a", "connections": 2, "deadlines": {"lookup_ms": 9}})}
    got = client_config({"socket": "/b", "deadlines": {"load_min_ms": 5}}, env)
    assert got == ClientConfig(socket="/b", connections=2, deadlines=Deadlines(lookup_ms=9, load_min_ms=5))
    assert client_config({}, {}) == ClientConfig()


@pytest.mark.parametrize(
    ("overrides", "text", "socket"),
    [
        ({}, "{not json", "/run/kvpool/kv.sock"),
        ({}, '{"connections": "many"}', "/run/kvpool/kv.sock"),
        ({"connections": "many"}, '{"socket": "/a"}', "/a"),
        ({"unknown": 1}, '{"socket": "/a"}', "/a"),
        ({"deadlines": [1]}, '{"socket": "/a"}', "/a"),
        ({"socket": object()}, '{"socket": "/a"}', "/a"),
    ],
)
def test_settings_that_cannot_be_used_are_logged_and_left_out(
    overrides: dict[str, Any], text: str, socket: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert client_config(overrides, {"KVPOOL_CLIENT_CONFIG": text}).socket == socket
    assert "ignored" in caplog.text
