"""Tenants of their own quota, ages and priority on a drive and in a shared directory, and limits that change."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from sc_nodes import wait_for

from kvpool.config import (
    CacheConfig,
    HintsConfig,
    IndexConfig,
    LocalTier,
    PoolConfig,
    TenantConfig,
    digest,
    dumps,
    loads,
    static_part,
)
from kvpool.config import SharedTier as SharedTierConfig
from kvpool.errors import ConfigError
from kvpool.protocol import keys
from kvpool_sidecar import eviction as evict
from kvpool_sidecar.app.config_reload import ConfigReloader, differences
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.serving.socket_handoff import SocketHandoff
from kvpool_sidecar.settings import ConfigFile
from kvpool_sidecar.shared_gc.controller import create_controller
from kvpool_sidecar.shared_gc.plan import CollectionLimits, Group, Inventory, make_plan
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.tenancy import limits as quota
from kvpool_sidecar.tenancy.limits import NO_HINTS, TenantLimits
from kvpool_sidecar.tenancy.mapping import Tenancy
from kvpool_testing.blocks import header, key, payload, read, write
from kvpool_testing.drives import make_drive

if TYPE_CHECKING:
    from kvpool_sidecar.storage.local.drive import Drive

MIB = 1 << 20
GOLD, LEAD = b"G" * 16, b"L" * 16
SECRET = b"a secret of this test, long enough"


@pytest.fixture
def make(tmp_path):
    made = []

    def root(limits: quota.CapacityLimits, **kw) -> Drive:
        made.append(make_drive("nvme", str(tmp_path / "r"), limits, pool_uid="u", **kw))
        made[-1].scan()
        return made[-1]

    yield root
    for one in made:
        one.close()


def limits(capacity: int = 32 * MIB, **kw) -> quota.CapacityLimits:
    return quota.CapacityLimits(capacity, 85, 75, 1000, **kw)


def put(root: Drive, n: int, tenant: bytes, size: int = MIB - 4096, **fields) -> None:
    data = payload(n, size)
    pending = root.begin(key(n), len(data))
    assert pending is not None
    write(pending, dataclasses.replace(header(n, data), tenant_tag=tenant, **fields), data)
    assert pending.commit() == CommitOutcome.STORED


def those_of(root: Drive, *numbers: int) -> int:
    return sum(root.contains(key(n)) for n in numbers)


def test_each_tenant_has_its_own_quota(make):
    root = make(limits(tenant_bytes=2 * MIB, tenants={GOLD: TenantLimits(8 * MIB)}))
    for n in range(12):
        put(root, n, GOLD)
        put(root, 100 + n, LEAD)
    assert those_of(root, *range(12)) == 8
    assert those_of(root, *range(100, 112)) == 2
    assert {tag: use.over_quota for tag, use in root.node.table.tenants().items()} == {GOLD: 4, LEAD: 10}


def test_on_a_full_drive_the_tenant_of_the_lowest_priority_makes_room(make):
    root = make(limits(20 * MIB, tenants={GOLD: TenantLimits(priority=5)}))
    for n in range(10):
        put(root, n, GOLD)
    for n in range(100, 104):  # it takes less, and still it is the one
        put(root, n, LEAD)
    for n in range(200, 207):
        put(root, n, GOLD)
        root.maintain()
    assert those_of(root, *range(10), *range(200, 207)) == 15
    assert those_of(root, *range(100, 104)) == 0


def test_each_tenant_has_its_own_ages(make):
    now = [10_000_000_000.0]
    root = make(limits(tenants={LEAD: TenantLimits(idle_s=100.0), GOLD: TenantLimits()}), clock=lambda: now[0])
    for n in range(4):
        put(root, n, GOLD)
        put(root, 100 + n, LEAD)
        read(root, n)  # the files are of today, the clock is not
        read(root, 100 + n)
    now[0] += 300
    root.maintain()
    assert those_of(root, *range(4)) == 4
    assert those_of(root, *range(100, 104)) == 0


def test_a_smaller_drive_is_emptied_by_housekeeping_in_its_order(make):
    root = make(limits(), policy="LRU")
    for n in range(20):
        put(root, n, LEAD)
    root.reconfigure(limits(8 * MIB), EvictionConfig("LRU"))
    assert root.usage().capacity_bytes == 8 * MIB
    assert those_of(root, *range(20)) == 20  # nothing is waited for
    root.maintain()
    assert [n for n in range(20) if root.contains(key(n))] == list(range(14, 20))


@pytest.mark.parametrize("policy", ["LRU", "FIFO"])
def test_another_order_holds_after_the_next_housekeeping(make, policy):
    root = make(limits(), policy="FIFO" if policy == "LRU" else "LRU")
    for n in range(10):
        put(root, n, LEAD)
    root.reconfigure(limits(), EvictionConfig(policy))
    assert not root.settled
    root.maintain()
    assert root.settled
    assert read(root, 0) == payload(0, MIB - 4096)
    root.reconfigure(limits(6 * MIB), EvictionConfig(policy))
    root.maintain()
    assert root.contains(key(0)) == (policy == "LRU")


def test_what_comes_and_goes_while_the_table_is_made_anew_is_not_forgotten(make, monkeypatch):
    """A rebuild that is stopped in the middle by stores, reads and removals of another thread."""
    root = make(limits(64 * MIB))
    for n in range(20):
        put(root, n, LEAD)
    arrived, go_on = threading.Event(), threading.Event()
    plain = evict.create

    def slow(order, its_limits):
        arrived.set()
        assert go_on.wait(10)
        return plain(order, its_limits)

    monkeypatch.setattr(evict, "create", slow)
    root.reconfigure(limits(64 * MIB, tenants={GOLD: TenantLimits(4 * MIB)}), EvictionConfig("LRU"))
    thread = threading.Thread(target=root.maintain)
    thread.start()
    assert arrived.wait(10)
    for n in range(100, 110):
        put(root, n, GOLD)
    for n in range(5):
        assert root.delete(key(n))
    assert read(root, 6) == payload(6, MIB - 4096)
    go_on.set()
    thread.join(10)
    assert {tag: use.blocks for tag, use in root.node.table.tenants().items()} == {LEAD: 15, GOLD: 4}
    assert root.usage().used_bytes == 19 * MIB
    assert sorted(dict(root.keys())) == sorted(key(n) for n in (*range(5, 20), *range(106, 110)))


def test_quotas_of_before_a_restart_are_known_again_when_they_are_asked_for_later(make):
    root = make(limits())
    for n in range(6):
        put(root, n, GOLD)
        put(root, 100 + n, LEAD)
    root.close()
    again = make(limits())  # it reads no headers
    again.reconfigure(limits(tenant_bytes=4 * MIB), EvictionConfig())
    again.maintain()
    assert those_of(again, *range(6)) == 4
    assert those_of(again, *range(100, 106)) == 4


def test_an_age_that_is_asked_for_later_counts_from_when_blocks_were_made(make):
    root = make(limits())
    put(root, 1, LEAD, created_ms=1_000)
    put(root, 2, LEAD, created_ms=int(time.time() * 1000))
    root.close()
    again = make(limits())
    again.reconfigure(limits(max_age_s=1000.0), EvictionConfig())
    again.maintain()
    assert not again.contains(key(1))
    assert again.contains(key(2))


def test_a_shorter_idle_time_spares_what_was_in_use_but_not_noted(make):
    now = [10_000_000_000.0]
    root = make(limits(), clock=lambda: now[0])
    put(root, 1, LEAD)
    read(root, 1)
    now[0] += 500
    read(root, 1)  # within ten minutes of the last note: not noted
    root.reconfigure(limits(idle_s=100.0), EvictionConfig())
    root.maintain()
    assert root.contains(key(1))


def test_pins_follow_their_share(make):
    root = make(limits(), order=EvictionConfig("LRU", 50, 2))
    for n in range(16):
        put(root, n, LEAD)
    for _ in range(2):
        for n in range(8):
            read(root, n)
    assert root.node.table.pinned_bytes == 8 * MIB
    root.reconfigure(limits(), EvictionConfig("LRU", 10, 2))
    assert root.node.table.pinned_bytes == 3 * MIB
    root.reconfigure(limits(8 * MIB), EvictionConfig("LRU", 0, 2))
    root.maintain()
    assert root.node.table.pinned_bytes == 0
    assert those_of(root, *range(16)) == 6
    assert root.usage().used_bytes == 6 * MIB


@pytest.mark.parametrize("policy", [*evict.POLICIES, "PerTenant"])
def test_a_table_and_its_journal_agree_whatever_happens(policy):
    """The rule of the rebuild: a copy, and then every block of the journal as it is now, is the table."""
    rng = random.Random(7)
    lim = limits(1 << 40, tenants={GOLD: TenantLimits(priority=1)} if policy == "PerTenant" else {})
    order = EvictionConfig("PrefixAware" if policy == "PerTenant" else policy, 20, 3)
    table = evict.create(order, lim)
    for n in range(200):
        table.add(key(n), evict.Entry(4096, 10, float(n), 0, rng.choice([GOLD, LEAD])))
    copy = {k: table.get(k) for k in list(table)}
    table.journal = {}
    for step in range(2000):
        n = rng.randrange(300)
        match rng.randrange(6):
            case 0:
                table.add(key(n), evict.Entry(4096 * (step % 3 + 1), 10, 1e3, 0, rng.choice([GOLD, LEAD])))
            case 1:
                table.discard(key(n))
            case 2 if len(table) > 50:
                table.pop_victims(5000, 3)
            case 3 if isinstance(table, evict.PerTenant):
                table.pop_victims_of(LEAD, 5000, 3)
            case _:
                table.touch(key(n), 2.0)
        if step == 1000:
            evict.reconfigure(table, order._replace(pinned_percent=1), lim)
    for k in table.journal:
        copy.pop(k, None)
        if k in table:
            copy[k] = table.get(k)
    assert {k: e.size for k, e in copy.items()} == {k: table.get(k).size for k in list(table)}
    assert sum(e.size for e in copy.values()) == table.total_bytes


# -- a drive's part of a quota, and blocks whose place moves -----------------------------------------------------------


def config(**fields) -> PoolConfig:
    tiers = (LocalTier("a", "/a", 1000), LocalTier("b", "/b", 3000))
    return PoolConfig("chat", "kvpool", "u", tiers, IndexConfig(""), **fields)


ACME = TenantConfig("acme", "kvt:acme:1", ("acme-dev", "acme-prod"), 400, 800, 60, 600, 3)


def test_a_tenants_share_for_hints_lowers_the_pools():
    def share(tenant: int, pool: HintsConfig) -> int:
        acme = dataclasses.replace(ACME, hints_share_percent=tenant)
        limits = Tenancy(SECRET, config(tenants=(acme,), hints=pool)).local_limits()
        return next(iter(limits.values())).hints_percent

    assert share(10, HintsConfig()) == 10
    assert share(60, HintsConfig(share_percent=40)) == 40
    assert share(10, HintsConfig(enabled=False)) == NO_HINTS


def test_with_hints_each_tenant_has_an_order_of_its_own():
    shared = limits(1 << 30)
    assert not shared.by_tenant
    assert shared._replace(hints_percent=0).by_tenant
    assert isinstance(evict.create(EvictionConfig(), shared._replace(hints_percent=25)), evict.PerTenant)


def test_who_is_whose():
    tenancy = Tenancy(SECRET, config(tenants=(ACME,)))
    assert {tenancy.tenant_id("acme-dev"), tenancy.tenant_id("acme-prod")} == {"kvt:acme:1"}
    assert (tenancy.tenant_id("acme"), tenancy.display_name("acme")) == ("acme", "acme")
    assert tenancy.display_name("acme-dev") == "kvt/acme"
    tag = keys.tenant_tag(SECRET, "kvt:acme:1")
    assert tenancy.local_limits() == {tag: TenantLimits(400, 60, 600, 3, hints_percent=25)}
    assert tenancy.shared_limits() == {tag: TenantLimits(800, 60, 600, 3)}


def test_a_drive_that_grows_takes_more_of_the_blocks_and_what_is_being_written_arrives_where_it_began(tmp_path):
    tiers = [LocalTier(n, str(tmp_path / n), 32 * MIB, 0, 0) for n in ("a", "b")]
    store = open_local(tiers, CacheConfig(), "u")
    for root in store.drives:
        root.scan()
    begun = []
    for n in range(24):
        data = payload(n, 4096)
        pending = store.begin(key(n), len(data))
        write(pending, header(n, data), data)
        begun.append(pending)
    grown = [dataclasses.replace(tiers[0], capacity_bytes=1 << 40), tiers[1]]
    store.reconfigure(grown, CacheConfig(), dict)
    assert {store._home(key(n)).name for n in range(24)} == {"a"}
    for n, pending in enumerate(begun):
        assert pending.commit() == CommitOutcome.STORED
        assert read(store, n) == payload(n, 4096)
    assert [root._state.pending_bytes for root in store.drives] == [0, 0]
    assert all(root.usage().blocks for root in store.drives)
    store.close()


# -- the shared directory ---------------------------------------------------------------------------------------------


def census(**sizes: int) -> Inventory:
    found = Inventory()
    for name, size in sizes.items():
        for n in range(size):
            found.add(1, 10.0 + n)
            found.attribute(Group(name.encode()), 1, 10.0 + n, 10.0 + n)
    return found


def test_a_full_shared_tier_is_paid_for_by_the_lowest_priority_first():
    its = CollectionLimits(100, 90, 60, tenants={b"gold": TenantLimits(priority=2), b"lead": TenantLimits(priority=-1)})
    plan = make_plan(census(gold=50, lead=10, other=40), its, [])
    assert set(plan.tenants) == {b"lead", b"other"}
    taken = {name: sum(cut.selects(10.0 + n, 1) for n in range(40)) for name, cut in plan.tenants.items()}
    assert taken == {b"lead": 40, b"other": 30}  # all of lead's


def test_each_tenant_has_its_own_quota_in_the_shared_tier():
    its = CollectionLimits(1000, 90, 60, tenant_bytes=20, tenants={b"gold": TenantLimits(40), b"free": TenantLimits(0)})
    plan = make_plan(census(gold=50, free=60, other=30), its, [])
    assert set(plan.quota) == {b"gold", b"other"}
    assert not plan.tenants


def test_a_quota_in_the_shared_directory_changes_with_the_next_turn(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    tag = keys.tenant_tag(SECRET, ACME.id)

    def asked(quota_bytes: int) -> PoolConfig:
        tenants = (dataclasses.replace(ACME, shared_quota_bytes=quota_bytes, idle_ttl_s=0, max_age_s=0),)
        return config(tenants=tenants, shared=SharedTierConfig("cold", str(shared), 1 << 40))

    store = FilesystemStore(str(shared), pool_uid="u")
    keeper = create_controller(asked(0), Tenancy(SECRET, asked(0)), "a", SharedTier(store), Stats(), list)
    for n in range(8):
        data = payload(n, 100_000 - 4096)
        for number, tenant in ((n, tag), (100 + n, LEAD)):
            pending = store.begin(key(number), len(data))
            write(pending, dataclasses.replace(header(number, data), tenant_tag=tenant), data)
            assert pending.commit() == CommitOutcome.STORED
    keeper.collector.step()
    assert keeper.status()["tenants"] == {tag.hex(): 800_000, LEAD.hex(): 800_000}
    keeper.reconfigure(asked(400_000), Tenancy(SECRET, asked(400_000)))

    def left() -> dict[str, int]:
        keeper.collector.step()  # it rests for as long as the last sweep took
        return keeper.status()["tenants"]

    wait_for(lambda: 0 < left()[tag.hex()] <= 400_000, "the quota holds")
    assert left()[LEAD.hex()] == 800_000
    keeper.collector.resign()
    store.close()


def test_a_rendezvous_is_asked_to_tell_all_anew(tmp_path):
    reported: list[set[str]] = []
    pods = SimpleNamespace(admit=lambda *_: None, remove=lambda _: None, retain=reported.append)
    handoff = SocketHandoff(str(tmp_path / "h.sock"), pods)
    handoff.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rendezvous:
        rendezvous.settimeout(10)
        rendezvous.connect(str(tmp_path / "h.sock"))
        rendezvous.sendall(b'{"op": "synced"}')
        wait_for(lambda: reported == [set()], "it was heard")
        handoff.resync()
        assert rendezvous.recv(100) == b""
    handoff.stop()


# -- the configuration -------------------------------------------------------------------------------------------------


def test_what_is_live_is_not_part_of_what_a_restart_is_for():
    one = config()
    other = config(
        tenants=(ACME,),
        allowed_namespaces=("acme-dev",),
        generation=9,
        cache=CacheConfig(eviction_policy="LRU", idle_ttl_s=5, high_watermark=99, tenant_quota_bytes=7),
        **{},
    )
    other = dataclasses.replace(other, local=(LocalTier("a", "/a", 7, 8, 9), other.local[1]))
    assert static_part(one) == static_part(other)
    assert differences(static_part(one), static_part(dataclasses.replace(other, local=other.local[:1]))) == ["local"]
    moved = dataclasses.replace(other, local=(LocalTier("a", "/elsewhere", 7), other.local[1]), http_port=1)
    assert differences(static_part(one), static_part(moved)) == ["http_port", "local[0].path"]


def test_a_digest_knows_every_field_but_the_generation():
    text = dumps(config(generation=1))
    assert digest(text) == digest(dumps(config(generation=2)))
    assert digest(text) != digest(dumps(config(http_port=1)))
    assert digest(text) != digest(text.replace("{", '{"of a newer build": 1,', 1))


@pytest.mark.parametrize(
    ("tenants", "reported"),
    [
        ((ACME, dataclasses.replace(ACME, id="kvt:other:2")), "a namespace belongs to one tenant only"),
        ((ACME, dataclasses.replace(ACME, namespaces=())), "each with a unique id"),
        ((ACME,) * 1025, "at most 1024"),
    ],
)
def test_tenants_that_cannot_be_are_refused(tenants, reported):
    with pytest.raises(ConfigError, match=reported):
        config(tenants=tenants)


@pytest.mark.parametrize("wrong", [{"id": "acme-prod"}, {"name": ""}, {"quota_bytes": -1}])
def test_a_tenant_that_could_be_taken_for_a_namespace_is_refused(wrong):
    with pytest.raises(ConfigError, match="tenants"):
        dataclasses.replace(ACME, **wrong)


def test_tenants_are_read_as_they_were_written():
    made = config(tenants=(ACME,))
    assert loads(PoolConfig, dumps(made)) == made


def test_a_file_that_comes_late_does_not_undo_what_the_operator_brought(tmp_path):
    path = tmp_path / "pool.json"

    def text(generation: int, *namespaces: str) -> str:
        return dumps(config(generation=generation, allowed_namespaces=namespaces))

    path.write_text(text(1, "a"))
    applied: list[tuple[str, ...]] = []
    live = ConfigReloader(
        ConfigFile(str(path), path.read_text()),
        config(generation=1, allowed_namespaces=("a",)),
        lambda made: applied.append(made.allowed_namespaces),
    )
    assert live.apply(text(2, "b")) == ""
    path.write_text(text(2, "a", "b"))  # of the same generation: which of the two is newer it does not say
    live._poll()
    assert applied == [("b",)]
    path.write_text(text(2, "b"))
    live._poll()
    path.write_text(text(2, "c"))  # the file has caught up: it is followed again
    live._poll()
    path.write_text(text(1, "a"))
    live._poll()
    path.write_text(text(3, "d"))
    live._poll()
    assert applied == [("b",), ("c",), ("d",)]
    assert live.status()["generation"] == 3
