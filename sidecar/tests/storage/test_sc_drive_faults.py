"""Faults of a drive: errors, full file systems and interrupted writers."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import pytest
from sc_drive_log import Log
from sc_nodes import wait_for

from kvpool.config import CacheConfig, LocalTier
from kvpool.errors import RefusedError, TierFullError
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.local.writer import BlockWriter
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import TAG, header, key, payload, put, read, write
from kvpool_testing.faulty_store import FaultyStore

MIB = 1 << 20


# -- faults of the drive


def test_breaking_the_lease_while_a_block_is_published_ends_nobody(make):
    """Somebody who kept a read-only descriptor opens the file for writing again and again."""
    one = make()
    stop = threading.Event()
    current: list[int] = []

    def meddle():
        while not stop.is_set():
            for fd in current[-1:]:
                with contextlib.suppress(OSError):
                    os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK))

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        for n in range(60):
            data = payload(n)
            pending = one.begin(key(n), len(data))
            current.append(os.open(f"/proc/self/fd/{pending.writer}", os.O_RDONLY))
            write(pending, header(n, data), data)
            try:
                pending.commit()
            except RefusedError:
                continue
            assert read(one, n) == data
    finally:
        stop.set()
        thread.join()
        for fd in current:
            os.close(fd)


def test_a_block_that_is_published_while_somebody_looks_for_it_stays(make):
    one = make()
    stop = threading.Event()
    wanted = [0]

    def look():
        while not stop.is_set():
            block = one.open(key(wanted[0]))
            if block is not None:
                os.close(block.fd)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(150):
            wanted[0] = n
            data = payload(n)
            pending = one.begin(key(n), len(data))
            write(pending, header(n, data), data)
            pending.commit()
            assert read(one, n) == data
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(dict(one.keys())) == {key(n) for n in range(150)}


def test_a_prefix_that_is_used_often_stays_on_the_drive_through_a_flood(tmp_path):
    tier = LocalTier("nvme", str(tmp_path / "r"), 2 * MIB, dedicated_filesystem="Ignore")
    cache = CacheConfig(eviction_policy="FIFO", pinned_percent=10, pinned_min_uses=3)
    with contextlib.closing(open_local([tier], cache, "u")) as local:
        local.drives[0].scan()
        put(local, 0)
        put(local, 1)
        for _ in range(3):
            os.close(local.open(key(0)).fd)
        assert 0 < local.pinned_bytes < 0.1 * tier.capacity_bytes
        for n in range(2, 400):
            put(local, n)
        assert (local.contains(key(0)), local.contains(key(1))) == (True, False)
        assert read(local, 0) == payload(0)


class BrokenWriter(BlockWriter):
    """Every write of the drive ends in EIO while `broken`."""

    broken = False

    def _new_pending(self, *args):
        if self.broken:
            with self._state.lock:
                self._state.pending_bytes -= args[2]
            raise OSError(errno.EIO, "Input/output error")
        return super()._new_pending(*args)


def test_a_drive_that_fails_repeatedly_is_fenced_until_a_canary_comes_back(tmp_path, monkeypatch):
    log = Log()
    one = Drive("nvme", str(tmp_path / "r"), quota.CapacityLimits(64 * MIB, 85, 75, 100), pool_uid="u", events=log)
    one.scan()
    put(one, 1)
    writer = one._writer = BrokenWriter(one._state, one._space)
    writer.broken = True
    for n in range(2, 5):
        with pytest.raises(OSError, match="Input/output"):
            one.begin(key(n), 1000)
    with pytest.raises(TierFullError, match="fenced"):
        one.begin(key(9), 1000)
    assert not one.contains(key(1))
    assert one.open(key(1)) is None
    assert log.counts["io_error"] == 3

    def sync_fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", sync_fails)
        one.health.tick()
        wait_for(lambda: one.health._try_at > time.monotonic(), "the canary did not come back")
    assert one.health.fenced
    assert os.listdir(tmp_path / "r" / "tmp") == []
    writer.broken = False
    one.health._try_at = 0.0  # the wait is over
    one.health.tick()
    wait_for(lambda: not one.health.fenced, "the canary came back")
    assert read(one, 1) == payload(1)
    assert put(one, 9) == CommitOutcome.STORED
    assert os.listdir(tmp_path / "r" / "tmp") == []
    one.close()


@pytest.mark.parametrize("operation", ["seal", "publish"])
def test_an_error_while_publishing_leaves_nothing_behind(make, operation):
    inner = make()
    store = FaultyStore(inner)
    store.fail(operation, 1, OSError(errno.EIO, "Input/output error"))
    data = payload(1)
    pending = store.begin(key(1), len(data))
    write(pending, header(1, data), data)
    with pytest.raises(OSError, match="Input/output"):
        pending.commit()
    assert inner._state.pending_bytes == 0
    assert not store.contains(key(1))
    assert put(store, 1) == CommitOutcome.STORED


def test_blocks_written_before_a_drive_was_added_are_still_found(tmp_path):
    tiers = [LocalTier(f"n{n}", str(tmp_path / f"n{n}"), 64 * MIB, reserve_free_percent=0) for n in range(3)]
    two = open_local(tiers[:2], CacheConfig(), "u")
    for root in two.drives:
        root.scan()
    for n in range(40):
        put(two, n)
    two.close()
    three = open_local(tiers, CacheConfig(), "u")
    for root in three.drives:
        root.scan()
    assert [read(three, n) for n in range(40)] == [payload(n) for n in range(40)]
    for n in range(40, 80):
        put(three, n)
    assert three.drives[2].usage().blocks > 4
    assert three.usage().blocks == 80
    three.close()


@pytest.mark.parametrize("policy", ["PrefixAware", "LRU", "LFU", "S3FIFO"])
def test_what_was_used_before_a_restart_outlives_what_was_not(make, policy):
    one = make(policy=policy)
    for n in range(20):
        put(one, n, MIB)
    for path in Path(one._state.directory.path).rglob("*"):
        if path.is_file() and len(path.name) == 64:
            os.utime(path, (1_700_000_000, 1_700_000_000))
    one.close()
    again = make(policy=policy)
    for n in range(10):
        for _ in range(3):
            assert read(again, n) is not None
    again.close()
    last = make(policy=policy, limits=quota.CapacityLimits(64 * MIB, 85, 75, 10))
    last.maintain()
    assert last.usage().blocks == 10
    assert sum(last.contains(key(n)) for n in range(10)) >= 9  # S3FIFO's small queue keeps a new one


def test_the_end_of_a_looked_up_prompt_goes_first(make):
    one = make(limits=quota.CapacityLimits(64 * MIB, 85, 75, 6))
    one.node.table.observe_sequence([key(n) for n in range(12)], TAG)
    for n in range(12):
        put(one, n)
    one.maintain()
    assert [n for n in range(12) if one.contains(key(n))] == list(range(6))
