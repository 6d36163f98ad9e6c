"""Several drives of one node: one order of eviction over all of them, whatever happens to one of them."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvpool.config import CacheConfig, LocalTier
from kvpool.errors import TierFullError
from kvpool.protocol.hint import HintKind
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.blocks.events import BlockEvents, BlocksEvicted, BlocksRemoved
from kvpool_sidecar.eviction import Entry
from kvpool_sidecar.eviction.session_marks import SessionHint
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.layout import block_path
from kvpool_sidecar.storage.local.store import LocalStore, open_local
from kvpool_testing.blocks import TAG, header, key, payload, put, read, write

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
NAMES = ("a", "b", "c")


class Node:
    """A node with drives in directories of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gone: list[bytes] = []
        self.store: LocalStore | None = None

    def open(self, names=NAMES, *, capacity=64 * MIB, **cache) -> LocalStore:
        self.close()
        events = BlockEvents()
        events.subscribe(BlocksRemoved, lambda event: self.gone.extend(event.block_keys))
        self.tiers = [
            LocalTier(n, str(self.directory / n), capacity, 0, 0, dedicated_filesystem="Ignore") for n in names
        ]
        self.store = open_local(self.tiers, CacheConfig(**cache), "u", events=events)
        for drive in self.store.drives:
            drive.scan()
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def files(self) -> list[str]:
        """Names of the block files of all drives, sorted."""
        return sorted(path.name for path in self.directory.rglob("*") if path.is_file() and len(path.name) == 64)

    def file(self, n: int) -> Path:
        drive = self.store.drive_of(key(n))
        return self.directory / drive.name / "blocks" / block_path(key(n))


@pytest.fixture
def node(tmp_path):
    one = Node(tmp_path)
    yield one
    one.close()


def there(store: LocalStore, count: int) -> list[int]:
    return [n for n in range(count) if store.contains(key(n))]


@pytest.mark.parametrize("hints_percent", [-1, 25])
def test_a_prompt_over_several_drives_loses_its_end_and_has_no_hole(node, tmp_path, hints_percent):
    store = node.open()
    store.reconfigure(node.tiers, CacheConfig(), dict, hints_percent)
    store.maintain()
    store.observe_sequence([key(n) for n in range(60)], TAG)
    for n in range(60):
        put(store, n, 4096)
    assert all(drive.usage().blocks > 5 for drive in store.drives)
    for left in (50, 33, 7):
        store.node.evict(0, at_least=len(there(store, 60)) - left)
        assert there(store, 60) == list(range(left))
    store.maintain()
    assert node.files() == sorted(key(n).hex() for n in range(7))
    assert sorted(node.gone) == sorted(key(n) for n in range(7, 60))


@pytest.mark.parametrize("policy", ["PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO"])
def test_the_node_is_kept_within_its_watermarks_and_its_table_agrees_with_the_files(node, policy):
    store = node.open(capacity=4 * MIB, eviction_policy=policy)
    for n in range(400):
        put(store, n, 60_000)
        if n % 8 == 7:
            store.maintain()
            usage = store.usage()
            assert usage.used_bytes <= usage.capacity_bytes * 85 // 100
            assert all(drive.usage().used_bytes <= drive.usage().capacity_bytes for drive in store.drives)
    assert node.files() == sorted(k.hex() for k, _ in store.keys())  # noqa: SIM118
    assert len(node.files()) == store.usage().blocks > 100


def test_after_a_restart_the_oldest_blocks_of_the_node_go_first_wherever_they_are(node):
    store = node.open(eviction_policy="LRU")
    for n in range(30):
        put(store, n)
        os.utime(node.file(n), (1_700_000_000 + n, 1_700_000_000 + n))
    again = node.open(eviction_policy="LRU")
    assert there(again, 30) == list(range(30))
    again.node.evict(0, at_least=11)
    assert there(again, 30) == list(range(11, 30))


def test_another_drive_takes_the_blocks_of_one_that_has_no_room(node):
    store = node.open(("a", "b"), capacity=8 * MIB)
    mine = [n for n in range(60) if store._home(key(n)).name == "a"]
    for n in mine[:14]:
        assert put(store, n, MIB // 2) == CommitOutcome.STORED
    first, second = store.drives
    assert first.usage().used_bytes <= 8 * MIB * 85 // 100
    assert second.usage().blocks == 14 - first.usage().blocks > 0
    assert [read(store, n) for n in mine[:14]] == [payload(n, MIB // 2) for n in mine[:14]]
    assert not node.gone


def test_a_drive_that_becomes_smaller_loses_ends_of_prompts_of_its_own_though_the_node_has_room(node):
    store = node.open(("a", "b"), capacity=16 * MIB)
    store.observe_sequence([key(n) for n in range(24)], TAG)
    for n in range(24):
        put(store, n, MIB // 2)
    before = {n for n in there(store, 24) if store.drive_of(key(n)).name == "a"}
    other = set(there(store, 24)) - before
    store.reconfigure([dataclasses.replace(node.tiers[0], capacity_bytes=2 * MIB), node.tiers[1]], CacheConfig(), dict)
    store.maintain()
    left = set(there(store, 24))
    assert other <= left
    assert store.drives[0].usage().used_bytes <= 2 * MIB
    assert left & before == set(sorted(before)[: len(left & before)])


def test_the_blocks_of_a_fenced_drive_are_stored_elsewhere_and_its_old_files_go_when_it_works_again(node):
    store = node.open(("a", "b"))
    for n in range(12):
        put(store, n)
    first = store.drives[0]
    lost = [n for n in range(12) if store.drive_of(key(n)) is first]
    first.health.fenced = True
    assert there(store, 12) == [n for n in range(12) if n not in lost]
    for n in lost:
        assert put(store, n) == CommitOutcome.STORED
        assert read(store, n) == payload(n)
    assert first.usage().blocks == 0
    first.health.fenced = False
    store.maintain()
    assert node.files() == sorted(key(n).hex() for n in range(12))
    assert [read(store, n) for n in range(12)] == [payload(n) for n in range(12)]


def test_many_blocks_are_looked_up_as_each_of_them_is(node):
    store = node.open(("a", "b"))
    names = [key(n) for n in range(12)]
    assert store.contains_many(names) == [False] * 12
    for n in range(6):
        put(store, n)
    assert store.contains_many(names) == [True] * 6 + [False] * 6
    store.drives[0].health.fenced = True
    found = store.contains_many(names)
    assert found == [store.contains(name) for name in names]
    assert 0 < sum(found) < 6


def test_a_drive_that_cannot_remove_files_keeps_no_other_from_evicting(node, monkeypatch):
    store = node.open(("a", "b"), capacity=4 * MIB, eviction_policy="LRU")
    first, second = store.drives

    def broken(*_args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(first.held, "unlink", broken)
    stored = 0
    for n in range(120):
        try:
            stored += put(store, n, 60_000) == CommitOutcome.STORED
        except TierFullError:
            continue
        finally:
            store.maintain()
    assert stored == 120
    assert second.usage().used_bytes <= second.usage().capacity_bytes
    assert first._state.doomed_bytes > 0
    monkeypatch.undo()
    store.maintain()
    assert first._state.doomed_bytes == 0
    assert node.files() == sorted(k.hex() for k, _ in store.keys())  # noqa: SIM118


def test_victims_on_a_fenced_drive_do_not_count_as_room(node):
    store = node.open(("a", "b"), capacity=4 * MIB, eviction_policy="LRU")
    for n in range(90):
        put(store, n, 60_000)
    first, second = store.drives
    first.health.fenced = True
    store.maintain()
    assert second.usage().used_bytes <= 4 * MIB * 85 // 100
    for n in range(200, 260):
        assert put(store, n, 60_000) == CommitOutcome.STORED
        store.maintain()
    assert second.usage().used_bytes <= 4 * MIB * 85 // 100
    assert store.contains(key(259))


def test_a_drive_that_was_removed_costs_its_blocks_only(node):
    store = node.open()
    for n in range(30):
        put(store, n)
    kept = [n for n in range(30) if store.drive_of(key(n)).name != "b"]
    again = node.open(("a", "c"))
    assert there(again, 30) == kept
    for n in set(range(30)) - set(kept):
        put(again, n)
    third = node.open()  # the drive is back: what was stored again is there once
    assert third.usage().blocks == 30 == len(node.files())
    assert [read(third, n) for n in range(30)] == [payload(n) for n in range(30)]


def test_a_block_that_two_drives_have_after_a_restart_is_there_once(node):
    store = node.open(("a", "b"))
    put(store, 1)
    path = node.file(1)
    other = node.directory / ({"a", "b"} - {path.relative_to(node.directory).parts[0]}).pop()
    copy = other / "blocks" / block_path(key(1))
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, copy)
    again = node.open(("a", "b"))
    assert again.usage().blocks == 1
    assert len(node.files()) == 1
    assert read(again, 1) == payload(1)


def test_two_writers_of_a_block_on_different_drives_leave_one_file(node):
    store = node.open(("a", "b"))
    data = payload(1)
    pending = [drive.begin_write(key(1), len(data)) for drive in store.drives]
    for one in pending:
        write(one, header(1, data), data)
    assert [one.commit() for one in pending] == [CommitOutcome.STORED, CommitOutcome.ALREADY_PRESENT]
    assert len(node.files()) == 1
    assert read(store, 1) == data


def test_a_purge_reaches_every_drive(node):
    store = node.open()
    for n in range(20):
        put(store, n)
    assert store.purge([key(n) for n in range(0, 20, 2)]) == 10
    assert there(store, 20) == list(range(1, 20, 2))
    assert len(node.files()) == 10


def test_a_quarantined_block_is_gone_and_its_neighbours_on_other_drives_stay(node):
    store = node.open()
    for n in range(12):
        put(store, n)
    assert store.quarantine(key(3))
    assert there(store, 12) == [n for n in range(12) if n != 3]


def test_pinned_blocks_of_all_drives_share_the_budget_of_the_node(node):
    store = node.open(("a", "b"), capacity=4 * MIB, eviction_policy="FIFO", pinned_percent=10, pinned_min_uses=2)
    for n in range(20):
        put(store, n, 60_000)
    for n in range(20):
        for _ in range(2):
            assert read(store, n) is not None
    assert 12 * 65_536 >= store.pinned_bytes > 10 * 65_536
    pinned = [n for n in range(20) if key(n) in store.table.policy._pins]
    for n in range(100, 300):
        put(store, n, 60_000)
        store.maintain()
    assert there(store, 20) == pinned
    assert len({store.drive_of(key(n)).name for n in pinned}) == 2


def test_the_blocks_of_an_ended_session_go_first_on_all_drives(node):
    store = node.open()
    store.observe_sequence([key(n) for n in range(20)], TAG)
    for n in range(40):
        put(store, n)
    said = SessionHint(HintKind.ENDED, b"s" * 16)
    assert store.hint(said, [key(n) for n in range(20)], TAG) == 20
    store.node.evict(0, at_least=8)
    assert there(store, 40) == [*range(12), *range(20, 40)]


def test_a_tenant_over_its_quota_pays_on_every_drive(node):
    store = node.open(tenant_quota_bytes=2 * MIB)
    loud = b"L" * 16
    for n in range(80):
        data = payload(n, 60_000)
        pending = store.begin(key(n), len(data))
        tenant = loud if n >= 10 else b"Q" * 16
        write(pending, dataclasses.replace(header(n, data), tenant_tag=tenant), data)
        pending.commit()
    assert there(store, 10) == list(range(10))
    assert store.tenants()[loud].used_bytes <= 2 * MIB
    assert store.tenants()[loud].over_quota == 70 - store.tenants()[loud].blocks
    again = node.open(tenant_quota_bytes=1 * MIB)
    again.maintain()
    assert again.tenants()[loud].used_bytes <= 1 * MIB
    assert there(again, 10) == list(range(10))
    assert len(node.files()) == again.usage().blocks


def test_a_node_has_no_more_blocks_than_its_memory_allows_and_says_so(node):
    causes: list[str] = []
    store = node.open()
    for n in range(30):
        put(store, n)
    store.close()
    events = BlockEvents()
    events.subscribe(BlocksEvicted, lambda event: causes.extend([event.cause] * event.blocks))
    store = node.store = open_local(node.tiers, CacheConfig(), "u", events=events, max_blocks=20)
    first, *others = store.drives
    first.scan()
    store.maintain()
    for drive in others:
        drive.scan()
        store.maintain()
    assert store.usage().blocks == 20 == len(node.files())
    assert causes == ["memory"] * 10
    store.reconfigure(node.tiers, CacheConfig(eviction_policy="LRU"), dict)
    for n in range(100, 110):
        put(store, n)
    store.maintain()
    assert store.usage().blocks == store.max_blocks == 20
    assert all(store.contains(key(n)) for n in range(100, 110))


def test_blocks_that_come_and_go_while_the_order_is_built_after_a_scan_are_in_it(node, monkeypatch):
    store = node.open(("a",), eviction_policy="LRU")
    for n in range(1500):
        put(store, n, 100)
    plain = evict.create

    def slow(order, limits):
        for n in range(2000, 2600):
            put(store, n, 100)
        assert store.delete(key(7))
        return plain(order, limits)

    monkeypatch.setattr(evict, "create", slow)
    store.node.sort()
    assert dict(store.keys()).keys() == {key(n) for n in (*range(1500), *range(2000, 2600)) if n != 7}
    assert store.usage().blocks == 2099


def test_used_blocks_after_a_restart_do_not_make_the_first_eviction_long():
    table = evict.S3Fifo()
    for n in range(5000):
        table.add(key(n), Entry(10, 10, n, uses=200))
    (victim, _), *_ = table.pop_victims(0, 1, at_least=1)
    assert victim == key(64)


def test_a_node_reports_how_far_the_learned_order_decides(node):
    store = node.open()
    put(store, 1)
    assert store.table.order_trust == 1.0
    policy = store.table.policy
    assert isinstance(policy, evict.PrefixAware)
    for n in range(120):  # of two blocks the one goes that comes back immediately, which LRU would still have
        one, other = key(1000 + 2 * n), key(1001 + 2 * n)
        policy._guard.store(one, 10)
        policy._guard.store(other, 10)
        policy._guard.evict(other)
        policy._guard.store(other, 10)
        policy._guard.evict(one)
        policy._guard.evict(other)
    assert store.table.order_trust < 1.0
    store.reconfigure(node.tiers, CacheConfig(eviction_policy="LRU"), dict)
    store.maintain()
    assert store.table.order_trust == 1.0
