"""Stores of many chunks: batches, deadlines that grow with the bytes, counts of what was not stored; a real sidecar."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub
import pytest
from cl_lmcache import SIZE, Server, filled, key, until
from cl_nodes import Cluster

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.engines.common.stores import UnstoredCounter, put_in_batches, queue_bytes, split_batches
from kvpool.results import StoreResult
from kvpool.stats import Reason

with stub.installed():
    from kvpool.engines.lmcache import l2_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, index=False)
    yield found
    found.close()


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    settings = {"socket": cluster["a"].socket, "deadlines": {"lookup_ms": 2000, "load_min_ms": 5000}}
    adapter = l2_adapter.PoolL2Adapter(settings, SimpleNamespace(ptr=0, size=64 * MIB, align_bytes=4096))
    yield Server(adapter)
    adapter.close()


@pytest.mark.parametrize(
    ("sizes", "max_blocks", "expected"),
    [
        ([], 4, []),
        ([1], 4, [(0, 1)]),
        ([1] * 9, 4, [(0, 4), (4, 8), (8, 9)]),
        ([60, 60, 10, 200, 10], 4, [(0, 1), (1, 3), (3, 4), (4, 5)]),  # a block above the limit is a batch alone
        ([50, 50, 1], 4, [(0, 2), (2, 3)]),
        ([1, 1], 0, [(0, 1), (1, 2)]),
    ],
)
def test_batches_have_bounded_blocks_and_bytes(
    sizes: list[int], max_blocks: int, expected: list[tuple[int, int]]
) -> None:
    assert [(batch.start, batch.stop) for batch in split_batches(sizes, max_blocks, 100)] == expected


@pytest.mark.parametrize(
    ("memory", "setting", "expected"),
    [(64, None, 32), (64, 10, 10), (0, None, 1 << 30), (None, "much", 1 << 30), (64, True, 32), (1, -5, 1)],
)
def test_the_queue_takes_half_of_the_engines_memory_unless_it_is_set(
    memory: object, setting: object, expected: int
) -> None:
    assert queue_bytes(memory, setting) == expected


def test_the_deadline_of_a_store_grows_with_its_bytes_up_to_a_minute() -> None:
    client = Client(ClientConfig(socket="/nowhere", deadlines=Deadlines(store_ms=10_000)), fingerprint=bytes(32))
    patient = Client(ClientConfig(socket="/nowhere", deadlines=Deadlines(store_ms=90_000)), fingerprint=bytes(32))
    try:
        assert client.store_seconds() == 10
        assert client.store_seconds(4_000_000_000) == pytest.approx(22)  # three times what 1000 MB/s need, more
        assert client.store_seconds(10**12) == 60
        assert patient.store_seconds(10**12) == 90  # what is configured is never shortened
    finally:
        client.close()
        patient.close()


class FakeClient:
    """Records the calls of `put_from`; a stand-in, because a real store of these sizes needs gigabytes."""

    def __init__(self) -> None:
        self.config = ClientConfig(max_inflight_stores=2)
        self.calls: list[tuple[int, float, list[str | None]]] = []

    def store_seconds(self, payload_bytes: int = 0) -> float:
        return 10 + payload_bytes

    def put_from(self, block_ids: Any, views: Any, deadline: float, *, salts: Any) -> list[StoreResult]:
        self.calls.append((len(block_ids), deadline - time.monotonic(), list(salts)))
        return [StoreResult(True, True, Reason.NONE, len(view)) for view in views]


def test_each_batch_has_the_deadline_of_its_own_bytes() -> None:
    client: Any = FakeClient()
    views = [memoryview(bytes(100))] * 5
    results = put_in_batches(client, [bytes(32)] * 5, views, ["a", "b", "c", "d", "e"])
    assert [result.ok for result in results] == [True] * 5
    assert [(count, salts) for count, _, salts in client.calls] == [(2, ["a", "b"]), (2, ["c", "d"]), (1, ["e"])]
    assert [left for _, left, _ in client.calls] == pytest.approx([210, 210, 110], abs=5)


def test_no_batch_starts_after_a_close() -> None:
    client: Any = FakeClient()
    results = put_in_batches(client, [bytes(32)] * 5, [memoryview(b"x")] * 5, is_closed=lambda: len(client.calls) == 1)
    assert [result.reason for result in results] == [Reason.NONE] * 2 + [Reason.CLOSED] * 3


def test_what_was_not_stored_is_logged_once_a_minute_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    counter = UnstoredCounter(logging.getLogger("lmcache.kvpool"), clock=lambda: now[0])
    counter.add(Reason.BUSY, 3)
    counter.add(Reason.BUSY, 2)
    counter.add_results([StoreResult(False, False, Reason.DEADLINE, 0), StoreResult(True, False, Reason.NONE, 0)])
    assert len(caplog.records) == 1
    now[0] += 61
    counter.add(Reason.BUSY)
    assert [record.getMessage() for record in caplog.records] == [
        "kvpool: 3 chunks were not stored: busy 3",
        "kvpool: 4 chunks were not stored: busy 3, deadline 1",
    ]
    assert counter.snapshot() == {"busy": 6, "deadline": 1}


def test_a_prompt_of_many_chunks_is_stored_whole(cluster: Cluster, server: Server) -> None:
    """LMCache submits a chunk at a time, or all of a prompt: both exceed the 64 blocks that are in flight at once."""
    assert until(lambda: server.store([key(1)], [filled(1)]) == SIZE)
    one_by_one = [server.adapter.submit_store_task([key(n)], [filled(n)]) for n in range(100, 400)]
    outcomes: dict[int, Any] = {}

    def all_stored() -> bool:
        outcomes.update(server.adapter.pop_completed_store_tasks())
        return len(outcomes) == len(one_by_one)

    assert until(all_stored, 60)
    assert [outcomes[task] for task in one_by_one] == [SIZE] * 300
    numbers = range(1000, 1200)
    assert server.store([key(n) for n in numbers], [filled(n) for n in numbers]) == 200 * SIZE
    objects = [stub.Memory(SIZE) for _ in numbers]
    assert server.load([key(n) for n in numbers], objects) == [True] * 200
    assert all(memory.data == filled(n).data for n, memory in zip(numbers, objects, strict=True))
    status = server.adapter.report_status()
    assert status["not_stored"] == {}
    assert status["stored_object_count"] == 501
    assert len(cluster["a"].block_files()) == 501


def test_a_sidecar_that_is_gone_leaves_a_reason(cluster: Cluster, server: Server) -> None:
    assert until(lambda: server.store([key(1)], [filled(1)]) == SIZE)
    cluster["a"].stop(kill=True)
    numbers = range(10, 110)
    assert server.store([key(n) for n in numbers], [filled(n) for n in numbers]) == -1
    counts = server.adapter.report_status()["not_stored"]
    assert sum(counts.values()) == 100
    assert set(counts) <= {"no-sidecar", "connection", "breaker-open"}
