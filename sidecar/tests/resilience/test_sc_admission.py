"""Whose turn it is: fair between tenants, bounded, and nothing is held by the dead. Order counts here, not seconds."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from sc_nodes import MIB, wait_for
from sc_raw import FINGERPRINT, GoneError, Raw, block_id, payload

from kvpool.config import Deadlines, EventsConfig
from kvpool.hint_settings import HintsConfig
from kvpool.protocol import wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.replication.session_hints import SessionHints
from kvpool_sidecar.resilience import fair_queue as module
from kvpool_sidecar.resilience.fair_queue import FairQueue, FairQueues
from kvpool_sidecar.serving.block_tables import BlockTables
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.lookup_figures import LookupFigures
from kvpool_sidecar.serving.miss_causes import MissCauses
from kvpool_sidecar.serving.opener import OpenResult
from kvpool_sidecar.serving.pod import Pod
from kvpool_sidecar.serving.session import Session, SessionContext
from kvpool_sidecar.serving.store_service import Begun
from kvpool_sidecar.serving.stream_exchange import StreamExchange
from kvpool_sidecar.storage.removed_blocks import RemovedBlocks
from kvpool_sidecar.tenancy.identity import Identity, Tenant

FAR = 1e9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Crowd:
    """Requests that wait in threads of their own; `served` is the order in which they were let in."""

    def __init__(self, lane: FairQueue) -> None:
        self.lane = lane
        self.served: list[str] = []
        self.grants = []
        self.refused: list[str] = []
        self.threads: list[threading.Thread] = []

    def ask(self, tenant: str, size: int, deadline: float = FAR) -> None:
        before = self.lane.waiting

        def run():
            grant = self.lane.acquire(tenant, size, deadline)
            if grant is None:
                self.refused.append(tenant)
                return
            self.served.append(tenant)
            self.grants.append(grant)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        wait_for(lambda: self.lane.waiting > before or not self.threads[-1].is_alive(), "it waits or is answered")

    def next(self) -> str:
        """One grant ends; who is let in for it."""
        known = len(self.served)
        self.lane.release(self.grants.pop(0))
        wait_for(lambda: len(self.served) > known or not self.lane.waiting, "the next is let in")
        return self.served[-1]


@pytest.fixture
def frozen(clock):
    """A lane of 400 in which grants never run out."""
    return FairQueue(400, clock=clock)


def test_an_empty_lane_lets_everybody_in_at_once(frozen):
    grants = [frozen.acquire("a", 100, 0.0) for _ in range(3)]
    assert all(grants)
    assert (frozen.held_bytes, frozen.waiting) == (300, 0)
    for grant in grants * 2:  # twice does no harm
        frozen.release(grant)
    assert frozen.held_bytes == 0
    assert not frozen._accounts


def test_a_tenant_whose_last_grant_expires_while_it_requests_the_next_is_still_known(clock):
    lane = FairQueue(100, clock=clock)
    for _ in range(3):
        assert lane.acquire("a", 25, FAR)
    clock.now += module._GRACE_S + 1
    grant = lane.acquire("a", 25, FAR)
    lane.release(grant)
    assert lane.held_bytes == 0
    assert lane.acquire("a", 25, FAR)


def test_one_tenant_never_holds_the_whole_lane(frozen):
    for _ in range(3):
        assert frozen.acquire("greedy", 100, 0.0)
    assert frozen.acquire("greedy", 100, 0.0) is None
    assert frozen.acquire("other", 100, 0.0)


def test_a_tenant_that_floods_does_not_delay_the_other_by_more_than_one_request(frozen):
    crowd = Crowd(frozen)
    for _ in range(3):
        crowd.ask("flood", 100)
    crowd.ask("quiet", 100)  # the lane is full now
    for _ in range(20):
        crowd.ask("flood", 100)
    for _ in range(5):
        crowd.ask("quiet", 100)
    assert frozen.waiting == 25
    order = [crowd.next() for _ in range(10)]
    assert order.count("quiet") == 5  # half of the turns, though it came last and asks for a fifth


def test_turns_are_shared_by_bytes_not_by_requests(frozen):
    crowd = Crowd(frozen)
    for tenant in ("small", "large", "large", "large"):
        crowd.ask(tenant, 100)
    for _ in range(12):
        crowd.ask("small", 25)
        crowd.ask("large", 100)
    while len(crowd.served) < 4 + 12:
        crowd.next()
    turns = crowd.served[4:]
    assert turns.count("small") >= 2 * turns.count("large")


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones(frozen):
    crowd = Crowd(frozen)
    for tenant in ("a", "a", "a", "b"):
        crowd.ask(tenant, 100)
    crowd.ask("c", 10_000)  # counts as a quarter of the lane
    for _ in range(10):
        crowd.ask("d", 10)
    assert crowd.next() == "c"


def test_a_request_beyond_the_bound_is_turned_away_at_once(clock):
    lane = FairQueue(400, max_waiting=4, max_waiting_per_tenant=2, clock=clock)
    crowd = Crowd(lane)
    for tenant in ("a", "a", "b", "b"):
        crowd.ask(tenant, 100)
    for tenant in ("a", "a", "a", "b", "b", "c", "d"):
        crowd.ask(tenant, 100)
    wait_for(lambda: len(crowd.refused) == 3, "three are turned away")
    assert crowd.refused == ["a", "c", "d"]
    assert lane.waiting == 4


def test_a_request_whose_turn_would_come_too_late_is_turned_away_at_once(clock):
    lane = FairQueue(400, clock=clock)
    crowd = Crowd(lane)
    for _ in range(23):
        crowd.ask("a", 100)
    for _ in range(10):  # a jam that moves: 100 bytes each hundredth of a second
        clock.now += 0.01
        crowd.next()
    waiting = lane.waiting
    assert waiting == 10
    crowd.ask("a", 100, clock.now + 0.05)
    assert crowd.refused == ["a"]
    assert lane.waiting == waiting
    crowd.ask("a", 100, clock.now + 0.5)  # this one can wait so long
    assert lane.waiting == waiting + 1


def test_who_waits_until_the_deadline_is_turned_away(clock):
    lane = FairQueue(400)
    held = [lane.acquire("a", 100, FAR) for _ in range(3)]
    assert all(held)
    assert lane.acquire("a", 100, time.monotonic() + 0.02) is None
    assert lane.waiting == 0


def test_a_grant_that_nobody_gives_back_runs_out(clock):
    lane = FairQueue(400, clock=clock)
    held = [lane.acquire("a", 100, 0.0) for _ in range(3)]
    assert lane.acquire("a", 100, 0.0) is None
    clock.now += module._GRACE_S + 1
    assert lane.acquire("a", 100, 0.0)
    assert lane.held_bytes == 100
    for grant in held:
        lane.release(grant)  # late, and counted once
    assert lane.held_bytes == 100


def test_who_waits_is_let_in_when_grants_run_out():
    lane = FairQueue(400)
    assert all(lane.acquire("a", 100, FAR) for _ in range(3))
    assert lane.acquire("a", 100, time.monotonic() + 30) is not None


def test_a_grant_is_corrected_when_the_size_is_known(frozen):
    one = frozen.acquire("a", 100, 0.0)
    two = frozen.acquire("a", 100, 0.0)
    frozen.resize(one, 5, notified=True)
    assert frozen.held_bytes == 105
    assert not frozen.is_busy
    frozen.resize(two, 1000, notified=False)
    assert frozen.held_bytes == 105  # a quarter of the lane
    frozen.release(one)
    frozen.resize(one, 50, notified=True)  # too late
    frozen.release(two)
    assert frozen.held_bytes == 0


def test_many_threads_leave_nothing_behind():
    lane = FairQueue(400)
    got = []

    def run(tenant):
        for n in range(30):
            grant = lane.acquire(tenant, 40 + n, time.monotonic() + 30)
            if grant is not None:
                got.append(tenant)
                lane.resize(grant, 70, notified=True)
                lane.release(grant)

    threads = [threading.Thread(target=run, args=(f"t{i % 3}",)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 270
    assert (lane.held_bytes, lane.waiting, lane._accounts) == (0, 0, {})


class Blocks:
    """The blocks of a node that all are there, 64 KiB on disk and whatever `size` says in the answer."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stats = Stats()
        config = SimpleNamespace(
            namespace="kvpool",
            pool="test",
            cache=SimpleNamespace(max_block_bytes=1 << 40),
            deadlines=Deadlines(),
            events=EventsConfig(),
            salt_tags=True,
            hints=HintsConfig(),
        )
        self.config = SimpleNamespace(current=config)
        self.present = True
        self.aborted = 0
        self.opener = self
        self.fetcher = None
        self.resolver = SimpleNamespace(mark_down=lambda peer: None, is_unreachable=lambda key: False, available=True)
        local = self.local = SimpleNamespace(contains=lambda key: False, holds_too_much=lambda tenant: False)
        self.causes = MissCauses(local, self.resolver, RemovedBlocks(), Fingerprints(), self.stats)

    def open(self, tenant, block_ids, flags, timeout, streams):
        if not self.present:
            return [OpenResult(wire.OpenStatus.MISS) for _ in block_ids]
        return [
            OpenResult(wire.OpenStatus.FILE, wire.Tier.LOCAL, 0, self.size, bytes(32), os.memfd_create("block"))
            for _ in block_ids
        ]

    def close_files(self, results):
        for entry in results:
            if entry.fd >= 0:
                os.close(entry.fd)

    def begin(self, pod, blocks, deadline):
        return [Begun(wire.BeginStatus.WRITE, bytes(32), self._pending(payload_len)) for _, payload_len in blocks]

    def commit_all(self, tenant, writes, *, fill):
        return [wire.CommitStatus.STORED] * len(writes)

    def _pending(self, payload_len):
        writer = os.memfd_create("block")
        pending = SimpleNamespace(writer=writer, file_bytes=payload_len, payload_len=payload_len, abort=self._abort)
        pending.close_writer = lambda: os.close(writer)
        return pending

    def _abort(self):
        self.aborted += 1


@pytest.fixture
def serve(tmp_path):
    """`serve(tenant)` is a connection of that tenant to one node; `serve.lanes`, `serve.node` are that node's."""
    node, lanes = Blocks(32 * MIB), FairQueues()
    made, threads = [], []

    def connect(tenant: str) -> Raw:
        path = tmp_path / f"{len(made)}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            raw = Raw(path, hello=False)
            sock, _ = listener.accept()
        pod = Pod(Identity(f"pod-{len(made)}", tenant, "p", "s"), Tenant(b"secret", tenant), 1 << 50)
        context = SessionContext(
            "a",
            node,
            node,
            lambda *_: None,
            Fingerprints(),
            lanes,
            LookupFigures(),
            StreamExchange(Stats()),
            SessionHints(HintsConfig, node, Stats()),
            BlockTables(node),
        )
        session = Session(sock, pod, context)
        threads.append(threading.Thread(target=session.run, daemon=True))
        threads[-1].start()
        raw.ask(wire.Op.HELLO, wire.ClientHello(FINGERPRINT).pack())
        made.append(raw)
        return raw

    connect.node, connect.lanes = node, lanes
    yield connect
    for raw in made:
        raw.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert lanes.status()["reads"] == {"limit_bytes": module.READ_BYTES, "granted_bytes": 0, "waiting": 0}
    assert lanes.status()["writes"] == {"limit_bytes": module.WRITE_BYTES, "granted_bytes": 0, "waiting": 0}


def opened(raw: Raw, count: int = 1, ms: int = 50) -> list[int]:
    """Ask for blocks of 32 MiB, close what comes; the reasons of the misses, -1 for a block."""
    (_, body), fds = raw.ask(wire.Op.OPEN, struct.pack("<I", ms) + block_id(1) * count, count=count)
    for fd in fds:
        os.close(fd)
    return [why if status == wire.OpenStatus.MISS else -1 for status, _, _, why, _, _ in _rows(body)]


def _rows(body):
    return list(wire.OPEN_REPLY.iter_unpack(body))


def test_loads_beyond_the_bound_miss_at_once_and_say_why(serve, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 60.0)
    readers = [serve("greedy") for _ in range(8)]
    answers = [opened(raw) for raw in readers]
    assert answers[:6] == [[-1]] * 6
    assert answers[6:] == [[wire.MISS_BUSY]] * 2  # its share is taken, and its deadline passes
    assert serve.node.stats.whole("refused") == {"busy-reads": 2}
    assert [opened(serve("other")) for _ in range(2)] == [[-1]] * 2  # there is room for others
    readers[0].send(wire.pack(wire.Op.DONE))
    assert opened(readers[6], ms=10_000) == [-1]


def test_a_client_that_dies_frees_its_grants(serve, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 60.0)
    readers = [serve("team-a") for _ in range(6)]
    assert [opened(raw) for raw in readers] == [[-1]] * 6
    late = serve("team-a")
    assert opened(late) == [wire.MISS_BUSY]
    for raw in readers[:2]:
        raw.close()
    assert opened(late, ms=20_000) == [-1]


def test_the_next_request_of_a_connection_ends_its_grant(serve, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 60.0)
    raw = serve("team-a")
    for _ in range(30):
        assert opened(raw) == [-1]
    assert serve.lanes.reads.held_bytes == 32 * MIB


def test_what_is_not_there_holds_nothing(serve):
    serve.node.present = False
    assert opened(serve("team-a"), 64) == [wire.MissCause.NEVER_STORED] * 64
    assert serve.lanes.reads.held_bytes == 0


def test_the_answer_asks_for_the_end_of_what_is_large_or_when_others_wait(serve):
    def tells(raw, count):
        (head, _), fds = raw.ask(wire.Op.OPEN, struct.pack("<I", 1000) + block_id(1) * count, count=count)
        for fd in fds:
            os.close(fd)
        return bool(head.flags & wire.Flag.WANTS_DONE)

    serve.node.size = 1 * MIB
    assert not tells(serve("a"), 1)
    assert tells(serve("a"), 8)
    held = [serve("b") for _ in range(3)]
    serve.node.size = 64 * MIB
    assert all(tells(raw, 1) for raw in held)
    serve.node.size = 1 * MIB
    assert tells(serve("a"), 1)  # the lane is half full


def test_writes_do_not_wait_for_reads_nor_reads_for_writes(serve, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 60.0)
    monkeypatch.setattr("kvpool_sidecar.serving.writes._MAX_QUEUE_S", 0.05)
    writers = [serve("team-a") for _ in range(4)]
    statuses = []
    for raw in writers:
        ((status, token, _, fd),) = raw.begin([(block_id(1), 128 * MIB)])
        statuses.append(status)
        if fd >= 0:
            os.close(fd)
        raw.token = token
    assert statuses == [wire.BeginStatus.WRITE] * 3 + [wire.BeginStatus.REFUSED]
    assert serve.node.stats.whole("refused") == {"busy-writes": 1}
    readers = [serve("team-a") for _ in range(6)]
    assert [opened(raw) for raw in readers] == [[-1]] * 6
    assert writers[0].commit([writers[0].token]) == [wire.CommitStatus.STORED]
    ((status, _, _, fd),) = writers[3].begin([(block_id(2), 128 * MIB)])
    assert status == wire.BeginStatus.WRITE
    os.close(fd)
    writers[1].close()  # a writer that dies frees its grant and its file
    wait_for(lambda: serve.node.aborted == 1, "the write is forgotten")


def test_a_message_that_is_not_one_still_ends_the_connection(serve):
    raw = serve("team-a")
    raw.send(wire.pack(wire.Op.DONE))
    assert opened(raw) == [-1]
    raw.send(b"junk")
    assert raw.receive()[0].op == wire.Op.ERROR | wire.REPLY
    with pytest.raises(GoneError):
        raw.receive()


def test_status_and_metrics_show_the_queue(cluster):
    node = cluster(index=False).node("a")
    with node.connect() as raw:
        raw.put({block_id(1): payload(1)})
        assert raw.get([block_id(1)]) == [payload(1)]
        raw.send(wire.pack(wire.Op.DONE))
        wait_for(lambda: node.status()["admission"]["reads"]["granted_bytes"] == 0, "nothing is under way")
    status = node.status()["admission"]
    assert status["reads"] == {"limit_bytes": module.READ_BYTES, "granted_bytes": 0, "waiting": 0}
    text = node.get("/metrics").decode()
    for name in ("queued_reads", "queued_writes", "inflight_read_bytes", "inflight_write_bytes"):
        assert f"\nkvpool_sidecar_{name} 0.0\n" in text
