"""What one tenant may take, and for how long anything stays: on a real drive, over restarts."""

from __future__ import annotations

import dataclasses
import os
import subprocess

import pytest

from kvpool.config import CacheConfig, LocalTier
from kvpool.errors import ConfigError, TierFullError
from kvpool_sidecar.blocks.events import BlockEvents, BlocksRemoved, DriveIncident
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import header, key, payload, read, write
from kvpool_testing.drives import make_drive

MIB = 1 << 20
LOUD, QUIET = b"L" * 16, b"Q" * 16


class Log(BlockEvents):
    def __init__(self) -> None:
        super().__init__()
        self.gone_keys: list[bytes] = []
        self.counts: dict[str, int] = {}
        self.subscribe(BlocksRemoved, lambda event: self.gone_keys.extend(event.block_keys))
        self.subscribe(DriveIncident, self._count)

    def _count(self, event: DriveIncident) -> None:
        self.counts[event.kind] = self.counts.get(event.kind, 0) + event.occurrences


@pytest.fixture
def make(tmp_path):
    made = []

    def root(*, capacity=32 * MIB, **kw) -> Drive:
        settings = {k: kw.pop(k) for k in ("tenant_bytes", "idle_s", "max_age_s") if k in kw}
        limits = quota.CapacityLimits(capacity, 85, 75, 1000, **settings)
        one = make_drive("nvme", str(tmp_path / "r"), limits, pool_uid="u", **kw)
        made.append(one)
        one.scan()
        return one

    yield root
    for one in made:
        one.close()


def put(root: Drive, n: int, tenant: bytes, size: int = MIB - 4096) -> CommitOutcome:
    data = payload(n, size)
    pending = root.begin(key(n), len(data))
    assert pending is not None
    write(pending, dataclasses.replace(header(n, data), tenant_tag=tenant), data)
    return pending.commit()


@pytest.mark.parametrize("policy", ["PrefixAware", "LRU", "FIFO"])
def test_a_noisy_neighbour_that_writes_ten_times_its_quota_costs_others_no_block(make, policy):
    log = Log()
    root = make(tenant_bytes=8 * MIB, events=log, policy=policy)
    for n in range(8):
        put(root, n, QUIET)
    for n in range(100, 180):
        assert put(root, n, LOUD) == CommitOutcome.STORED
        if n % 10 == 0:
            root.maintain()
    assert all(read(root, n) == payload(n, MIB - 4096) for n in range(8))
    assert root.usage().used_bytes == 16 * MIB
    assert root.contains(key(179))
    assert log.counts["over_quota"] == 72
    assert not {key(n) for n in range(8)} & set(log.gone_keys)


def test_the_account_of_a_tenant_survives_a_restart(make):
    root = make(tenant_bytes=8 * MIB)
    for n in range(8):
        put(root, n, QUIET)
        put(root, 100 + n, LOUD)
    root.close()
    again = make(tenant_bytes=8 * MIB)
    for n in range(200, 204):
        put(again, n, LOUD)
    assert again.usage().blocks == 16
    assert all(again.contains(key(n)) for n in range(8))
    assert sum(again.contains(key(100 + n)) for n in range(8)) == 4


def test_a_smaller_quota_than_before_holds_from_the_next_store_on(make):
    root = make()
    for n in range(12):
        put(root, n, LOUD)
    root.close()
    again = make(tenant_bytes=4 * MIB)
    put(again, 50, LOUD)
    assert again.usage().used_bytes == 4 * MIB


def test_a_full_drive_takes_from_whoever_has_the_most(make):
    root = make(capacity=16 * MIB, tenant_bytes=12 * MIB)
    for n in range(4):
        put(root, n, QUIET)
    for n in range(100, 130):
        put(root, n, LOUD)
        root.maintain()
    assert all(root.contains(key(n)) for n in range(4))
    assert root.usage().used_bytes <= 16 * MIB


def test_what_nobody_uses_goes_and_what_is_used_stays(make):
    now, log = [10_000_000_000.0], Log()
    root = make(idle_s=100.0, clock=lambda: now[0], events=log)
    for n in range(4):
        put(root, n, QUIET)
    for n in range(4):
        read(root, n)  # the files are of today, the clock is not
    for _ in range(10):
        now[0] += 40
        read(root, 0)
        root.node._expire_at = 0
        root.maintain()
    assert [n for n in range(4) if root.contains(key(n))] == [0]
    assert log.counts["expired"] == 3
    assert sorted(log.gone_keys) == sorted(key(n) for n in (1, 2, 3))


def test_what_is_old_goes_however_often_it_is_used_also_after_a_restart(make):
    now = [header(0, payload(0)).created_ms / 1000 + 10]
    root = make(max_age_s=100.0, clock=lambda: now[0])
    put(root, 0, QUIET)
    root.maintain()
    assert root.contains(key(0))
    root.close()
    now[0] += 60
    again = make(max_age_s=100.0, clock=lambda: now[0])
    again.maintain()
    assert read(again, 0) is not None
    now[0] += 60
    again.node._expire_at = 0
    again.maintain()
    assert not again.contains(key(0))


def test_without_limits_nothing_expires(make):
    root = make(clock=lambda: 10_000_000_000.0)
    put(root, 0, QUIET)
    root.maintain()
    assert root.contains(key(0))


def test_a_tier_on_the_nodes_own_file_system_is_refused_if_it_must_have_its_own(make, tmp_path, caplog):
    ours = (str(tmp_path),)
    with pytest.raises(ConfigError, match=r"node.s own file system.*mount a drive"):
        make(dedicated="Require", node_files=ours)
    assert make(dedicated="Prefer", node_files=ours).shares_filesystem
    assert "is on the node's own file system" in caplog.text


def test_a_tier_with_a_file_system_of_its_own_is_never_refused(make, caplog):
    root = make(dedicated="Require", node_files=("/proc", "/does/not/exist"))
    assert not root.shares_filesystem
    assert "own file system" not in caplog.text


def test_a_tier_on_the_nodes_own_file_system_is_taken_without_a_word_if_that_does_not_matter(make, tmp_path, caplog):
    assert make(dedicated="Ignore", node_files=(str(tmp_path),)).shares_filesystem
    assert "own file system" not in caplog.text


def test_what_the_pool_says_holds_for_the_drives_of_a_node_together(tmp_path):
    tiers = [
        LocalTier(name, str(tmp_path / name), size, dedicated_filesystem="Ignore")
        for name, size in (("a", 30 * MIB), ("b", 10 * MIB))
    ]
    cache = CacheConfig(tenant_quota_bytes=8 * MIB, idle_ttl_s=100, max_age_s=200, eviction_policy="LFU")
    store = open_local(tiers, cache, "u")
    try:
        limits = store.table.limits
        assert (limits.tenant_bytes, limits.idle_s, limits.max_age_s) == (8 * MIB, 100, 200)
        assert [root.usage().capacity_bytes for root in store.drives] == [30 * MIB, 10 * MIB]
        for root in store.drives:
            root.scan()
        for n in range(60):
            put(store, n, LOUD, MIB // 2 - 4096)
        assert store.usage().used_bytes == 8 * MIB
    finally:
        store.close()


@pytest.fixture
def small(tmp_path):
    """A file system of 24 MB of its own."""
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", where], capture_output=True)
    if made.returncode:
        pytest.skip(f"a file system of its own needs root: {made.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.parametrize("reserve", [{"reserve_percent": 25}, {"reserve_bytes": 6 * MIB}])
def test_a_file_system_that_fills_up_is_evicted_from_then_refused_then_used_again(small, reserve):
    root = Drive("nvme", str(small / "r"), quota.CapacityLimits(64 * MIB, 85, 75, 1000, **reserve), pool_uid="u")
    try:
        root.scan()
        assert not root.shares_filesystem
        for n in range(40):
            put(root, n, QUIET)
        assert free(small) >= 6 * MIB
        assert 15 <= root.usage().blocks <= 18
        last = [n for n in range(40) if root.contains(key(n))]
        with (small / "foreign").open("ab", buffering=0) as foreign:
            foreign.write(bytes(free(small)))
            assert free(small) == 0
            assert all(read(root, n) is not None for n in last)
            root.maintain()
            assert free(small) >= 6 * MIB
            for _ in range(20):
                foreign.write(bytes(free(small)))
                root.maintain()
            assert root.usage().blocks == 0
            foreign.write(bytes(free(small)))
        with pytest.raises(TierFullError):
            root.begin(key(90), MIB)
        (small / "foreign").unlink()
        assert put(root, 90, QUIET) == CommitOutcome.STORED
        assert read(root, 90) == payload(90, MIB - 4096)
    finally:
        root.close()


def free(where) -> int:
    info = os.statvfs(where)
    return info.f_bavail * info.f_frsize
