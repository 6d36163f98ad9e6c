"""Reads between nodes by NIXL: UCX over TCP on loopback here, the same calls as over RDMA devices."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_nodes import MIB, PEER_PORT, Cluster, wait_for
from sc_raw import block_id, payload

from kvpool import config
from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers.rdma.agent import NixlAgent, wait_all
from kvpool_sidecar.peers.rdma.arena import ALIGNMENT, Arena
from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher, ReadRequest
from kvpool_sidecar.peers.rdma.selection import select_transport
from kvpool_sidecar.peers.rdma.slots import SlotPool
from kvpool_sidecar.peers.rdma.staging import LONGEST_S, Staged, Staging
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import key, put

# KVPOOL_UCX_TLS is for tests: UCX's TCP listens on loopback only, and no RDMA device is needed
LOOPBACK = {"KVPOOL_UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
Commit, Tier, Status = wire.CommitStatus, wire.Tier, wire.OpenStatus
A_TENANT, B_TENANT = b"a" * 16, b"b" * 16


# -- what is decided


@pytest.mark.parametrize(
    ("protocol", "package", "devices", "rdma", "reason"),
    [
        ("Auto", True, True, True, ""),
        ("RDMA", True, True, True, ""),
        ("TCP", True, True, False, "asks for TCP"),
        ("Auto", True, False, False, "no RDMA device"),
        ("RDMA", True, False, False, "no RDMA device"),
        ("Auto", False, True, False, "has no NIXL"),
    ],
)
def test_tcp_is_chosen_with_a_reason_and_rdma_where_both_package_and_device_are(
    protocol, package, devices, rdma, reason
):
    choice = select_transport(protocol, package=package, devices=devices)
    assert choice.rdma == rdma
    assert reason in choice.reason
    assert bool(choice.reason) != rdma


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * ALIGNMENT)), max_size=60))
def test_ranges_never_overlap_and_all_room_comes_back(steps):
    arena = Arena(100 * ALIGNMENT)
    taken: dict[int, int] = {}
    for is_take, n in steps:
        if is_take:
            offset = arena.allocate(n)
            if offset is not None:
                assert offset % ALIGNMENT == 0
                assert offset + n <= arena.size
                assert all(offset + n <= first or first + size <= offset for first, size in taken.items())
                taken[offset] = n
        elif taken:
            offset = sorted(taken)[n % len(taken)]
            del taken[offset]
            arena.free(offset)
            with pytest.raises(KeyError):
                arena.free(offset)
    for offset in taken:
        arena.free(offset)
    assert arena.free_bytes == arena.size
    assert arena.allocate(arena.size) == 0


# -- two agents in this process


@pytest.fixture(scope="module")
def agents():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        patch.setenv("UCX_TLS", "")  # the agent sets it: taken back, so that the sidecars of other tests do not see it
        return NixlAgent("one"), NixlAgent("two")


def test_bytes_are_read_from_the_other_agents_memory(agents):
    one, two = agents
    here, there = mmap.mmap(-1, MIB), mmap.mmap(-1, MIB)
    there[:] = os.urandom(MIB)
    (local, mine), (remote, its) = one.register(here), two.register(there)
    name = one.add_peer(two.metadata())
    transfers = [one.read(name, local + n * 4096, remote + n * 4096, 4096) for n in range(256)]
    wait_all(transfers, time.monotonic() + 60)
    assert here[:] == there[:]
    one.deregister(mine)
    two.deregister(its)


def test_agents_that_have_nothing_to_do_leave_the_processor_alone(agents):
    """NIXL's own choice is a thread that spins. Processor time: what a busy machine does meanwhile is not counted."""
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.2


def test_memory_that_is_not_registered_cannot_be_read(agents):
    one, two = agents
    here, secret, other = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    secret[:6] = b"secret"
    (local, _), (_, _) = one.register(here), two.register(other)
    name = one.add_peer(two.metadata())
    address = ctypes.addressof(ctypes.c_char.from_buffer(secret))
    with pytest.raises(PoolUnavailableError):
        wait_all([one.read(name, local, address, 4096)], time.monotonic() + 60)
    assert here[:6] != b"secret"


def test_a_client_can_only_read_its_slot_and_no_tenant_gets_anothers(agents):
    pool = SlotPool(agents[0], 8 * MIB)
    slot = pool.acquire(A_TENANT, 100_000)
    slot.memory[:5] = b"first"
    held = os.dup(slot.descriptor)
    assert os.pread(held, 5, 0) == b"first"
    with pytest.raises(OSError, match=r"not permitted|denied|Bad file"):
        os.pwrite(held, b"x", 0)
    writable = os.open(f"/proc/self/fd/{held}", os.O_RDWR)  # as the same user may; the seal refuses the write
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(writable, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(writable, 0)
    pool.release(slot)
    other = pool.acquire(B_TENANT, 100_000)
    assert other is not slot
    other.memory[:6] = b"second"
    assert os.pread(held, 5, 0) == b"first"
    assert pool.acquire(A_TENANT, 100_000) is slot
    for fd in (held, writable):
        os.close(fd)


def test_slots_are_bounded_and_idle_ones_make_room(agents):
    pool = SlotPool(agents[0], 4 * MIB)
    first = [pool.acquire(A_TENANT, MIB) for _ in range(4)]
    assert all(first)
    assert pool.acquire(A_TENANT, 1) is None
    for slot in first:
        pool.release(slot)
    assert pool.acquire(B_TENANT, 3 * MIB) is not None
    assert pool.used_bytes <= 4 * MIB
    pool.discard(first_left := pool.acquire(A_TENANT, MIB))
    assert pool.acquire(A_TENANT, MIB) is not first_left


def test_what_is_staged_is_bounded_and_goes_by_release_or_with_time(agents):
    now = [0.0]
    store = MemoryStore(64 * MIB)
    for n in range(4):
        put(store, n, MIB)
    staging = Staging(agents[1], store, 5 * MIB, clock=lambda: now[0])
    lease, other = staging.lease(), staging.lease()
    staged = [lease.stage(key(n)) for n in range(4)]
    assert all(isinstance(s, Staged) and s.size == MIB + 4096 for s in staged)
    assert lease.stage(key(99)) == peer_wire.PeerStatus.MISS
    assert other.stage(key(0)) == peer_wire.PeerStatus.BUSY
    other.release(staged[0].token)  # not its own
    assert staging.staged == 4
    lease.release(staged[0].token)
    lease.release(staged[0].token)
    again = other.stage(key(0))
    assert isinstance(again, Staged)
    now[0] = LONGEST_S - 1
    assert (
        staging.lease().stage(key(1)) == peer_wire.PeerStatus.BUSY
    )  # devices may still read it, even if the peer hung up
    now[0] = LONGEST_S + 1
    assert all(isinstance(other.stage(key(n)), Staged) for n in range(4))
    assert staging.staged == 4


class Link:
    """A peer that answers what it is told to."""

    alive = True

    def __init__(self, answers):
        self.answers = list(answers)
        self.asked = []
        self.closed = False

    def send_request(self, op, keys, flags=0):
        self.asked.append((op, list(keys)))

    def response_body(self, limit, deadline):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    "answers",
    [
        [ProtocolError("garbage")],
        [b"not what an agent says"],
        ["metadata", b"short"],
        ["metadata", peer_wire.PEER_STAGED.pack(4096, 1 << 40, 1)],
        ["metadata", peer_wire.PEER_STAGED.pack(0xDEAD000, 4096 + 1000, 1)],
    ],
)
def test_a_peer_that_says_nonsense_costs_its_blocks_and_is_left_alone_for_a_while(agents, answers):
    one, two = agents
    memory = mmap.mmap(-1, 4096)
    two.register(memory)
    link = Link([two.metadata() if a == "metadata" else a for a in answers])
    now = [100.0]
    pool = SlotPool(one, 8 * MIB)
    stats = Stats()
    fetcher = RdmaFetcher(one, pool, lambda peer, timeout: link, stats, clock=lambda: now[0])
    peer = NodeInfo("p", "127.0.0.1", 1, 1)
    assert fetcher.fetch(peer, [ReadRequest(key(1), 1000)], A_TENANT, time.monotonic() + 30) == [None]
    assert link.closed
    assert stats.whole("rdma")["failed"] == 1
    assert fetcher.fetch(peer, [ReadRequest(key(1), 1000)], A_TENANT, time.monotonic() + 30) == [None]
    assert stats.whole("rdma")["failed"] == 1  # not asked
    fetcher.close()


def test_another_block_in_the_place_of_the_one_that_was_asked_for_is_not_handed_out(agents):
    """As after a read that came so late that the peer uses the memory for something else."""
    one, two = agents
    store = MemoryStore(64 * MIB)
    put(store, 1, 1000)
    staging = Staging(two, store, MIB)
    staged = staging.stage(key(1))
    link = Link([two.metadata(), peer_wire.PEER_STAGED.pack(*staged)])
    pool = SlotPool(one, 8 * MIB)
    fetcher = RdmaFetcher(one, pool, lambda peer, timeout: link, Stats())
    peer = NodeInfo("p", "127.0.0.1", 1, 1)
    assert fetcher.fetch(peer, [ReadRequest(key(2), 1000)], A_TENANT, time.monotonic() + 30) == [None]
    link = Link([two.metadata(), peer_wire.PEER_STAGED.pack(*staged)])
    other = RdmaFetcher(one, pool, lambda peer, timeout: link, Stats())
    (slot,) = other.fetch(peer, [ReadRequest(key(1), 1000)], A_TENANT, time.monotonic() + 30)
    assert slot is not None
    assert link.asked[-1][0] == wire.Op.RELEASE


# -- real sidecars


def blocks(first: int, count: int, size: int = 64 * 1024) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, size) for n in range(first, first + count)}


@pytest.fixture(scope="module")
def rdma_pair(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("rdma")) as c:
        yield c, c.node("a", env=LOOPBACK), c.node("b", env=LOOPBACK)


def test_a_peers_blocks_come_by_rdma_and_the_status_says_so(rdma_pair):
    _, a, b = rdma_pair
    items = blocks(0, 20, MIB)
    names = list(items)
    with a.connect() as raw:
        assert raw.put(items) == [Commit.STORED] * 20
    a.wait_announced()
    with b.connect() as raw:
        for _ in range(3):  # slots are used again
            entries = raw.open(names, ms=30_000)
            assert {(e.status, e.tier) for e in entries} == {(Status.FILE, Tier.PEER)}
            assert [raw.read(e)[4096:] for e in entries] == list(items.values())
    status = b.status()
    assert (status["transport"], status["transport_reason"]) == ("RDMA", "")
    assert status["rdma"] == {"blocks": 60}
    assert status["served"]["peer"] == 60
    assert a.status()["peer_served"]["blocks"] == 60


def test_a_process_that_used_an_agent_ends_with_its_own_exit_code(tmp_path):
    with Cluster(tmp_path) as c:
        a = c.node("a", env=LOOPBACK)
        assert a.status()["transport"] == "RDMA"
        assert a.stop() == 0
    program = (
        "import atexit, sys; from kvpool_sidecar.peers.rdma.agent import NixlAgent; agent = NixlAgent('x');"
        "atexit.register(print, 'at exit'); sys.exit(7)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **LOOPBACK}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (7, "at exit")


def test_tenants_stay_apart_over_rdma(rdma_pair):
    _, a, b = rdma_pair
    items = blocks(1000, 5)
    with a.connect("team-a") as raw:
        raw.put(items)
    a.wait_announced()
    with b.connect("team-b") as raw:
        assert raw.get(list(items)) == [None] * 5
    with b.connect("team-a") as raw:
        assert raw.get(list(items)) == list(items.values())


def test_a_client_that_cannot_verify_is_not_given_what_the_sidecar_did_not_check(rdma_pair):
    _, a, b = rdma_pair
    items = blocks(2000, 3)
    with a.connect() as raw:
        raw.put(items)
    a.wait_announced()
    with b.connect() as raw:
        entries = raw.open(list(items), flags=wire.Flag.VERIFY | wire.Flag.LOCAL_ONLY)
        assert {e.status for e in entries} == {Status.MISS}


def test_more_than_fits_the_memory_comes_over_tcp(tmp_path):
    with Cluster(tmp_path) as c:
        small = config.PeerConfig(port=PEER_PORT, connect_timeout_ms=1000, rdma_bytes=8 * MIB)
        a, b = c.node("a", env=LOOPBACK, peer=small), c.node("b", env=LOOPBACK, peer=small)
        items = blocks(0, 12, MIB)
        with a.connect() as raw:
            raw.put(items)
        a.wait_announced()
        with b.connect() as raw:
            entries = raw.open(list(items), ms=30_000)
            kinds = {e.status for e in entries}
            assert kinds == {Status.FILE, Status.STREAM_DIAL, Status.STREAM}
            assert [raw.read(e)[4096:] for e in entries] == list(items.values())


@pytest.mark.parametrize("who", ["asks", "is asked"])
def test_a_node_without_rdma_is_read_from_over_tcp(tmp_path, who):
    with Cluster(tmp_path) as c:
        a = c.node("a", env=LOOPBACK if who == "asks" else None)
        b = c.node("b", env=LOOPBACK if who == "is asked" else None)
        other = b if who == "asks" else a
        items = blocks(0, 5)
        with a.connect() as raw:
            raw.put(items)
        a.wait_announced()
        with b.connect() as raw:
            entries = raw.open(list(items), ms=30_000)
            assert {e.status for e in entries} == {Status.STREAM_DIAL, Status.STREAM}
            assert [raw.read(e)[4096:] for e in entries] == list(items.values())
        status = other.status()
        assert status["transport"] == "TCP"
        assert "RDMA device" in status["transport_reason"]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_hangs_costs_no_more_than_the_deadline_and_rdma_comes_back(tmp_path, fault):
    with Cluster(tmp_path) as c:
        a, b = c.node("a", env=LOOPBACK), c.node("b", env=LOOPBACK)
        items = blocks(0, 5, MIB)
        names = list(items)
        with a.connect() as raw:
            raw.put(items)
        a.wait_announced()
        with b.connect(timeout=60) as raw:
            assert raw.get(names, ms=30_000) == list(items.values())
            if fault == signal.SIGKILL:
                a.kill()
            else:
                a.send(fault)
            started = time.monotonic()
            entries = raw.open(names, ms=1000)
            assert time.monotonic() - started < 10
            assert Status.FILE not in {e.status for e in entries}
        if fault == signal.SIGKILL:
            a.start().ready()
        else:
            a.send(signal.SIGCONT)
        before = b.status()["rdma"]["blocks"]

        def read_again() -> bool:
            with b.connect() as raw:
                found = raw.get(names, ms=30_000)
                assert all(got in (None, data) for got, data in zip(found, items.values(), strict=True))
            return b.status()["rdma"]["blocks"] > before

        wait_for(read_again, "blocks come by RDMA again", 60)
