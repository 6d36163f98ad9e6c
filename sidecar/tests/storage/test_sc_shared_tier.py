"""A shared file system that is slow, hung or broken costs its own blocks, and nothing waits for it."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from sc_nodes import wait_for

from kvpool import config
from kvpool.errors import TierFullError
from kvpool.protocol.wire import Flag, OpenStatus, Tier
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.replication.dirty_set import DirtySet
from kvpool_sidecar.replication.verifier import BlockVerifier
from kvpool_sidecar.replication.write_back import WriteBack, copy_block
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.serving.block_service import BlockService
from kvpool_sidecar.serving.config_holder import ConfigHolder
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.locator import BlockLocator
from kvpool_sidecar.serving.miss_causes import MissCauses
from kvpool_sidecar.serving.opener import BlockOpener
from kvpool_sidecar.serving.peer_streams import PeerStreams
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.removed_blocks import RemovedBlocks
from kvpool_sidecar.storage.shared.directories import SharedDirectories
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.tenancy.identity import Tenant
from kvpool_testing.blocks import header, key, payload, put, read, write
from kvpool_testing.faulty_store import FaultyStore


class PlainTenant(Tenant):
    """Names blocks as the other helpers do."""

    def __init__(self):
        self.tag = b"t" * 16

    def block_key(self, block_id):
        return key(int.from_bytes(block_id, "little"))


def name(n):
    return n.to_bytes(32, "little")


def no_dial(*_):
    raise AssertionError("there is no peer")


class Setup:
    def __init__(self):
        self.local = MemoryStore(1 << 28)
        self.far = FaultyStore(MemoryStore(1 << 28))
        self.shared = SharedTier(self.far, cooldown_s=0.3)
        self.stats = Stats()
        self.index = index = MemoryIndex()
        guard = Bulkhead("index", 1, 8, CircuitBreaker(3, 1, time.monotonic))
        peers = BlockResolver(index, guard, lambda: 1, lease_s=5)
        self.copier = WriteBack(self.local, self.shared, self.stats)
        inspector = BlockVerifier(self.local, self.shared, peers, no_dial, self.stats)
        pool = config.PoolConfig(
            pool="p", namespace="n", uid="u", local=(config.LocalTier("l", "/x", 1),), index=config.IndexConfig("")
        )
        holder = ConfigHolder(b"secret", pool)
        self.node = BlockService(
            holder,
            BlockLocator(self.local, self.shared, peers),
            BlockOpener(holder, self.local, self.shared, peers, self.stats),
            inspector,
            self.stats,
            MissCauses(self.local, peers, RemovedBlocks(), Fingerprints(), self.stats),
        )

    def tiers(self, *numbers, timeout=0.3, every=True):
        return list(
            self.node.locator.locate((PlainTenant(),), [name(n) for n in numbers], timeout, exhaustive=every).tiers
        )

    def opened(self, *numbers, timeout=0.3, flags=Flag.NONE):
        streams = PeerStreams(None, no_dial)
        found = self.node.opener.open((PlainTenant(),), [name(n) for n in numbers], flags, timeout, streams)
        self.node.opener.close_files(found)
        return [(entry.status, entry.tier) for entry in found]


@pytest.fixture
def setup():
    one = Setup()
    yield one
    one.copier.stop()
    for gate in one.far._gates.values():
        gate.set()


LOCAL = (OpenStatus.FILE, Tier.LOCAL)
SHARED = (OpenStatus.FILE, Tier.SHARED)
MISS = (OpenStatus.MISS, Tier.MISS)


def test_blocks_of_both_tiers_are_found(setup):
    put(setup.local, 1)
    put(setup.far, 2)
    assert setup.tiers(1, 2, 3) == [Tier.LOCAL, Tier.SHARED, Tier.MISS]
    assert setup.opened(3, 2, 1) == [MISS, SHARED, LOCAL]
    assert setup.opened(2, flags=Flag.VERIFY | Flag.LOCAL_ONLY) == [SHARED]


def test_a_slow_index_leaves_time_to_ask_the_shared_tier(setup):
    put(setup.far, 2)
    setup.index.locate = lambda keys: time.sleep(2)
    assert setup.tiers(2, timeout=0.5) == [Tier.SHARED]


def test_a_prompt_that_nobody_has_seen_costs_the_mount_one_question(setup):
    setup.tiers(*range(100), every=False)
    assert setup.far.calls["has"] == 1


def test_what_was_seen_is_not_asked_again_and_what_has_gone_is_noticed(setup):
    put(setup.far, 1)
    setup.far.calls.clear()
    for _ in range(5):
        assert setup.tiers(1) == [Tier.SHARED]
    assert setup.far.calls["has"] == 1
    setup.far.delete(key(1))
    assert setup.opened(1) == [MISS]
    assert setup.tiers(1) == [Tier.MISS]


@pytest.mark.parametrize("operation", ["has", "open"])
def test_a_hung_mount_costs_one_deadline_and_then_nothing_until_it_answers_again(setup, operation):
    put(setup.local, 1)
    put(setup.far, 2)
    gate = setup.far.hang(operation)
    ask = setup.tiers if operation == "has" else setup.opened
    own = Tier.LOCAL if operation == "has" else LOCAL
    before = threading.active_count()
    slow = 0
    for _ in range(30):
        started = time.monotonic()
        answer = ask(1, 2, timeout=0.05)
        assert answer[0] == own
        assert answer[1] in (Tier.MISS, MISS)
        slow += time.monotonic() - started > 0.04
        assert time.monotonic() - started < 1
    assert slow <= 12  # the first ones, and a trial now and then
    assert threading.active_count() - before <= 8
    assert not setup.shared.available
    gate.set()
    there = Tier.SHARED if operation == "has" else SHARED
    wait_for(lambda: ask(1, 2, timeout=1) == [own, there], "it is used again")


def test_descriptors_that_come_too_late_are_closed(setup):
    put(setup.far, 2)
    gate = setup.far.hang("open")
    assert setup.opened(2, timeout=0.05) == [MISS]
    before = len(os.listdir("/proc/self/fd"))
    gate.set()
    wait_for(lambda: setup.far.calls["open"] >= 1 and setup.opened(2, timeout=1) == [SHARED], "it answers")
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing is left open")


def test_errors_of_the_mount_are_misses_and_are_told(setup):
    put(setup.local, 1)
    for nth in range(1, 4):
        setup.far.fail("has", nth, OSError(5, "Input/output error"))
    for _ in range(3):
        assert setup.tiers(1, 2) == [Tier.LOCAL, Tier.MISS]
    assert "Input/output" in setup.shared.problem
    assert not setup.shared.available


def test_copies_are_made_in_the_background_and_stop_nobody_while_the_mount_hangs(setup):
    setup.copier.start()
    gate = setup.far.hang("create")
    for n in range(10):
        put(setup.local, n)
        setup.copier.enqueue(key(n), 20_000)
    assert setup.opened(*range(10)) == [LOCAL] * 10
    gate.set()
    wait_for(lambda: setup.stats.whole("copies").get("copied") == 10, "copied")
    assert [read(setup.far, n) for n in range(10)] == [payload(n) for n in range(10)]


def test_while_the_shared_tier_is_absent_copies_wait_and_the_queue_is_bounded(setup, monkeypatch):
    for _ in range(3):
        setup.shared.bulkhead.breaker.failure()
    assert not setup.shared.available
    setup.copier._dirty = DirtySet(max_blocks=3)
    for n in range(6):
        put(setup.local, n)
        setup.copier.enqueue(key(n), 20_000)
    assert setup.copier.waiting == 3
    assert setup.stats.whole("copies") == {"dropped": 3}
    setup.copier.start()
    wait_for(lambda: setup.stats.whole("copies").get("copied") == 3, "copied when it is back")


def test_a_copy_of_a_block_that_went_is_no_copy(setup):
    assert copy_block(setup.local, setup.far, key(1)) is None
    put(setup.local, 1)
    assert copy_block(setup.local, setup.far, key(1)) is True
    assert copy_block(setup.local, setup.far, key(1)) is False


def test_a_corrupt_header_is_not_copied(setup):
    put(setup.local, 1)
    fd = os.memfd_create("rotten")
    os.write(fd, b"?" * 24_096)
    os.close(setup.local._files[key(1)])
    setup.local._files[key(1)] = fd
    with pytest.raises(Exception, match="header"):
        copy_block(setup.local, setup.far, key(1))
    assert not setup.far.contains(key(1))


# -- the directory itself


@pytest.fixture
def directory(tmp_path):
    made = []

    def make(**kw):
        made.append(FilesystemStore(str(tmp_path), **{"pool_uid": "u", **kw}))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_where_there_are_no_links_blocks_are_renamed_into_place(directory, monkeypatch):
    def no_link(*_args, **_kw):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    store = directory()
    put(store, 1)
    assert read(store, 1) == payload(1)
    assert os.listdir(f"{store._dirs.path}/tmp") == []


def test_a_directory_that_appears_later_is_used_then(tmp_path):
    store = FilesystemStore(str(tmp_path / "later"), pool_uid="u")
    with pytest.raises(FileNotFoundError):
        store.contains(key(1))
    (tmp_path / "later").mkdir()
    put(store, 1)
    assert read(store, 1) == payload(1)
    store.close()


class StaleDirectories(SharedDirectories):
    """Its handles are stale until it is reopened."""

    stale = False

    def fd(self, directory):
        if self.stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().fd(directory)

    def _reopen(self):
        super()._reopen()
        self.stale = False


@pytest.mark.parametrize("ask", [lambda store: store.contains(key(1)), lambda store: read(store, 1) == payload(1)])
def test_stale_handles_are_reopened(tmp_path, monkeypatch, ask):
    monkeypatch.setattr("kvpool_sidecar.storage.shared.filesystem.SharedDirectories", StaleDirectories)
    store = FilesystemStore(str(tmp_path), pool_uid="u")
    put(store, 1)
    store._dirs.stale = True
    assert ask(store)
    assert read(store, 1) == payload(1)
    store.close()


def test_two_stores_in_one_directory_see_each_others_blocks(directory):
    one, two = directory(), directory()
    put(one, 1)
    assert read(two, 1) == payload(1)
    assert two.begin(key(1), 20_000) is None
    data = payload(2)
    first, second = one.begin(key(2), len(data)), two.begin(key(2), len(data))
    for pending in (first, second):
        write(pending, header(2, data), data)
    assert {first.commit(), second.commit()} == set(CommitOutcome)


def test_what_others_stored_counts_against_the_capacity_once_it_is_told(directory):
    one, two = directory(), directory(capacity_bytes=100_000)
    for n in range(4):
        put(one, n)
    assert put(two, 10) == CommitOutcome.STORED
    two.set_usage(5 * 24_096, 5)
    assert two.usage().blocks == 5
    with pytest.raises(TierFullError):
        two.begin(key(11), 20_000)
    two.set_usage(24_096, 1)
    assert put(two, 11) == CommitOutcome.STORED
    assert two.stored == (2 * 24_096, 2)


def test_a_directory_that_was_empty_and_removed_under_a_writer_is_made_again(directory, monkeypatch):
    store = directory()
    data = payload(1)
    pending = store.begin(key(1), len(data))
    write(pending, header(1, data), data)
    link, gone = os.link, []

    def link_after_a_sweep(source, path, **kw):
        if len(gone) < 2:
            gone.append(path)
            folder = f"{store._dirs.path}/blocks/{path.rpartition('/')[0]}"
            os.rmdir(folder)
            os.rmdir(folder.rpartition("/")[0])
        link(source, path, **kw)

    monkeypatch.setattr(os, "link", link_after_a_sweep)
    assert pending.commit() == CommitOutcome.STORED
    assert len(gone) == 2
    assert read(store, 1) == data


@pytest.mark.parametrize("at", [4096 + 12_345, 100])
def test_a_corrupt_local_block_is_quarantined_and_not_copied(setup, at):
    put(setup.local, 1)
    fd = os.memfd_create("rotten")
    with open(f"/proc/self/fd/{setup.local._files[key(1)]}", "rb") as whole:
        data = bytearray(whole.read())
    data[at] ^= 1
    os.write(fd, data)
    os.close(setup.local._files[key(1)])
    setup.local._files[key(1)] = fd
    put(setup.local, 2)
    setup.copier.start()
    setup.copier.enqueue(key(1), 20_000)
    setup.copier.enqueue(key(2), 20_000)
    wait_for(lambda: sum(setup.stats.whole("copies").values()) == 2, "both are dealt with")
    assert setup.stats.whole("copies") == {"corrupt": 1, "copied": 1}
    assert not setup.far.contains(key(1))
    assert not setup.local.contains(key(1))
    assert setup.shared.available
