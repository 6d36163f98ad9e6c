"""One tenant that floods the sidecar with requests takes its share of the process, not the others'."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sc_nodes import wait_for
from sc_raw import Raw, block_id, payload

from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.resilience.fair_queue import REQUEST_IDS, RequestQueue
from kvpool_sidecar.resilience.turn import end_turn
from kvpool_sidecar.serving.request_queue import RequestTurn, request_cost
from kvpool_sidecar.serving.writes import WriteHandler

FLOOD = Path(__file__).parents[1] / "sc_flood.py"
BUSY = "import os, sys, threading; os.nice(19)\n"
BUSY += "threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
BUSY += "print('begun', flush=True)\nwhile True: pass"
CONNECTIONS, SAMPLES, ATTEMPTS = 32, 100, 4


def request(op: int, items: int, size: int = 0, ms: int = 1000) -> tuple[wire.Head, memoryview]:
    body = ms.to_bytes(4, "little") + bytes(size or items * 32)
    return wire.Head(op, 0, items, 1), memoryview(body)


def in_thread(turn: RequestTurn, *args, **kw) -> bool:
    """Whether the request is admitted, in a thread that ends with its turn."""
    admitted: list[bool] = []

    def run() -> None:
        admitted.append(turn.begin(*request(*args, **kw)))
        end_turn()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return admitted[0]


@pytest.fixture
def queue():
    yield RequestQueue(REQUEST_IDS, clock=lambda: 1000.0)
    end_turn()


def test_a_tenant_computes_one_large_lookup_at_a_time_and_others_are_not_kept_waiting(queue):
    evil, good = RequestTurn(queue, "evil"), RequestTurn(queue, "good")
    assert evil.begin(*request(wire.Op.LOOKUP, wire.MAX_LOOKUP))
    assert in_thread(good, wire.Op.LOOKUP, wire.MAX_LOOKUP)
    assert queue.held_bytes == REQUEST_IDS // 8  # the flood's only
    end_turn()
    assert queue.held_bytes == 0


def test_a_lookup_beyond_the_share_is_rejected_before_its_deadline():
    queue = RequestQueue(REQUEST_IDS)
    evil = RequestTurn(queue, "evil")
    held = queue.acquire("evil", REQUEST_IDS, time.monotonic() + 60)
    held.until += 60
    assert not in_thread(evil, wire.Op.LOOKUP, 1, ms=10)
    assert not in_thread(evil, wire.Op.OPEN, 1, ms=10)
    queue.release(held)
    assert in_thread(evil, wire.Op.LOOKUP, 1, ms=10)
    assert queue.held_bytes == 0


def test_reports_and_commits_are_never_rejected(monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.serving.request_queue._PATIENCE_S", 0.05)
    queue = RequestQueue(REQUEST_IDS)
    held = queue.acquire("evil", REQUEST_IDS, time.monotonic() + 60)
    held.until += 60
    for op in (wire.Op.REPORT, wire.Op.COMMIT, wire.Op.DONE, wire.Op.HELLO):
        assert in_thread(RequestTurn(queue, "evil"), op, 1)


def test_a_turn_ends_while_its_request_waits_for_another_thread(queue):
    turn = RequestTurn(queue, "team")
    assert turn.begin(*request(wire.Op.LOOKUP, wire.MAX_LOOKUP))
    seen = Bulkhead("mount", 1, 8, CircuitBreaker(3, 1)).run(lambda: queue.held_bytes, 10)
    assert queue.held_bytes == 0
    assert seen in (0, REQUEST_IDS // 8)  # before or after the caller began to wait


def test_a_tenants_lookups_do_not_wait_for_its_blocks_way_to_the_drive(queue):
    """A commit copies its blocks, which takes longer than a lookup may."""
    held = []

    def commit_all(_tenant, written, *, fill):
        held.append(queue.held_bytes)
        return [wire.CommitStatus.STORED for _ in written]

    stores = SimpleNamespace(commit_all=commit_all, stats=Stats())
    pod = SimpleNamespace(tenant="team", release=lambda _size: None)
    head, body = wire.Head(wire.Op.COMMIT, 0, 1, 1), memoryview(bytes(4))
    assert RequestTurn(queue, "team").begin(head, body)
    assert queue.held_bytes > 0
    WriteHandler(None, pod, stores, queue).commit(head, body)
    assert held == [0]


def test_files_cost_more_than_lookups_and_every_request_costs_something():
    assert request_cost(wire.Op.DONE, 0, 0) > 0
    assert request_cost(wire.Op.OPEN, 64, 64 * 32) > request_cost(wire.Op.LOOKUP, 64, 64 * 32)
    assert request_cost(wire.Op.REPORT, 0, wire.MAX_JSON) > request_cost(wire.Op.REPORT, 0, 32)


@pytest.mark.parametrize("items", [0, wire.MAX_LOOKUP + 1])
def test_an_impossible_number_of_blocks_is_a_violation(queue, items):
    with pytest.raises(ProtocolError):
        RequestTurn(queue, "evil").begin(*request(wire.Op.LOOKUP, items, size=32))


@contextlib.contextmanager
def beside(*commands: list[str]):
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"begun\n"
        yield
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(30)
            process.stdout.close()


def complete_lookups(node) -> int:
    """How many of SAMPLES lookups of 32 own blocks find all of them within a lookup's default deadline."""
    names = [block_id(n) for n in range(32)]
    complete = 0
    with Raw(node.sockets["team-a"], timeout=60) as raw:
        for _ in range(SAMPLES):
            began = time.monotonic()
            found = raw.lookup(names, ms=16)
            complete += 0 not in found and time.monotonic() - began < 0.02
            time.sleep(0.005)
    return complete


def test_lookups_beside_a_flood_of_large_lookups_are_as_complete_as_beside_busy_processes(cluster):
    """Compared in one run, because what a lookup gets beside anything depends on the machine."""
    node = cluster(index=False).node("a")
    with Raw(node.sockets["team-a"]) as raw:
        raw.put({block_id(n): payload(n, 4096) for n in range(32)})
    flood = [sys.executable, str(FLOOD), str(node.sockets["team-b"]), str(CONNECTIONS), str(wire.MAX_LOOKUP)]
    seen = []
    for _ in range(ATTEMPTS):
        with beside(*[[sys.executable, "-c", BUSY]] * min(2, os.cpu_count() or 1)):
            control = complete_lookups(node)
        with beside(flood):
            seen.append((complete_lookups(node), control))
        wait_for(lambda: node.status()["clients"] == 0, "the flood has left")
        if seen[-1][0] >= 0.9 * control:
            return
    raise AssertionError(f"complete lookups beside the flood and beside busy processes: {seen}")
