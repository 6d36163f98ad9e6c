"""Tenants that let others read: what a reader finds on its node, on a peer, on the shared tier, and no one else does.

Real sidecars with an index and a shared directory; the rules of who finds what are held against a model in memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sc_nodes import HTTP_PORT, Cluster, wait_for
from sc_raw import FINGERPRINT, SECRET, GoneError, block_id, payload

from kvpool import config
from kvpool.protocol import block, keys, wire
from kvpool.protocol.wire import CommitStatus, Flag, OpenStatus, Tier
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.replication.lookup_events import LookupEvents
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_sidecar.serving.block_service import BlockService
from kvpool_sidecar.serving.config_holder import ConfigHolder
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.locator import BlockLocator
from kvpool_sidecar.serving.miss_causes import MissCauses
from kvpool_sidecar.serving.opener import BlockOpener
from kvpool_sidecar.serving.peer_streams import PeerStreams
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.removed_blocks import RemovedBlocks
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.tenancy.identity import Tenant
from kvpool_sidecar.tenancy.mapping import Tenancy
from kvpool_testing.blocks import write

BASE, READER, THIRD = "kvt:base:1", "kvt:reader:2", "kvt:third:3"
COUNT = 12
NAMES = [block_id(n) for n in range(COUNT)]
DATA = [payload(n) for n in range(COUNT)]
PATIENCE_S = 120.0  # no test here is about deadlines


def tenants(*reads_from: str) -> tuple[config.TenantConfig, ...]:
    return (
        config.TenantConfig("base", BASE, ("base",)),
        config.TenantConfig("reader", READER, ("reader",), reads_from=reads_from),
        config.TenantConfig("third", THIRD, ("third",)),
    )


def change(nodes, **fields) -> None:
    """Exchange the configurations' files as the kubelet does, and wait until they are in force."""
    for node in nodes:
        node.pool = dataclasses.replace(node.pool, generation=node.pool.generation + 1, **fields)
        node.write_config()
    for node in nodes:
        wanted = node.pool.generation
        wait_for(lambda n=node, w=wanted: n.status()["config"]["generation"] == w, "the configuration is in force")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    events = config.EventsConfig(enabled=True)
    with Cluster(tmp_path_factory.mktemp("sharing"), shared=True) as c:
        index = config.IndexConfig(c.index_url, username="kvpool", lookup_timeout_ms=20_000, lease_s=30)
        shape = {"tenants": ("base", "reader", "third", "plain"), "events": events, "index": index}
        made = [c.node(name, **shape) for name in ("a", "b")]
        change(made, tenants=tenants(BASE))
        yield made


@pytest.fixture(scope="module")
def common(nodes):
    """Blocks of the base tenant on the drive of `a`, whose copies are on the shared tier."""
    a, _b = nodes
    with a.connect("base") as raw:
        assert raw.put(dict(zip(NAMES, DATA, strict=True))) == [CommitStatus.STORED] * COUNT
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied", 0) >= COUNT, "copied")
    return NAMES


def lookups(node, tenant: str, names, *, granted: bool = True, flags: int = 0) -> list[int]:
    with node.connect(tenant, granted=granted) as raw:
        return raw.lookup(names, flags=flags)


def test_a_reader_finds_and_reads_them_on_its_node_on_a_peer_and_on_the_shared_tier(nodes, common):
    a, b = nodes
    for node, flags, tier in ((a, 0, Tier.LOCAL), (b, 0, Tier.PEER), (b, Flag.LOCAL_ONLY, Tier.SHARED)):
        with node.connect("reader", granted=True) as raw:
            if not flags:
                assert raw.lookup(common) == raw.lookup(common, flags=Flag.EXHAUSTIVE) == [tier] * COUNT
            entries = raw.open(common, flags=flags)
            assert {entry.tier for entry in entries} == {tier}
            for n, entry in enumerate(entries):
                data = raw.read(entry)
                assert data[block.HEADER_BYTES :] == DATA[n]
                assert entry.key == keys.block_key(SECRET, BASE, common[n])
                assert block.tenant_tag_of(data) in raw.server.readable_tags == (keys.tenant_tag(SECRET, BASE),)
            assert raw.get(common, flags=Flag.VERIFY | Flag.LOCAL_ONLY) == DATA


def test_nobody_else_finds_them_and_an_older_client_neither(nodes, common):
    for node in nodes:
        for tenant, granted in (("third", True), ("plain", True), ("reader", False)):
            with node.connect(tenant, granted=granted) as raw:
                assert raw.server.readable_tags == ()
                assert raw.lookup(common, flags=Flag.EXHAUSTIVE) == [Tier.MISS] * COUNT
                assert raw.get(common) == [None] * COUNT
                assert raw.get(common, flags=Flag.VERIFY | Flag.LOCAL_ONLY) == [None] * COUNT


def test_what_a_reader_stores_is_its_own_also_under_a_name_that_the_owner_has(nodes, common):
    a, b = nodes
    mine = {common[0]: payload(100), block_id(101): payload(101)}
    with a.connect("reader", granted=True) as raw:
        assert raw.put(mine) == [CommitStatus.STORED] * 2
        assert raw.get(list(mine)) == list(mine.values())
    a.wait_announced()
    for node in (a, b):
        with node.connect("base", granted=True) as raw:  # the other way nothing is granted
            assert raw.server.readable_tags == ()
            assert raw.get([common[0], block_id(101)]) == [DATA[0], None]
        assert lookups(node, "base", [block_id(101)]) == [Tier.MISS]


def test_a_prompt_of_blocks_of_both_is_found_as_one(nodes, common):
    a, b = nodes
    own = [block_id(n) for n in range(200, 206)]
    prompt = [*common[1:6], *own, *common[6:9]]
    with a.connect("reader", granted=True) as raw:
        raw.put({name: payload(200 + n) for n, name in enumerate(own)})
    a.wait_announced()
    wanted = [*DATA[1:6], *(payload(200 + n) for n in range(6)), *DATA[6:9]]
    for node, tier in ((a, Tier.LOCAL), (b, Tier.PEER)):
        with node.connect("reader", granted=True) as raw:
            assert raw.lookup([*prompt, block_id(999)]) == [tier] * len(prompt) + [Tier.MISS]
            assert raw.get(prompt) == wanted
            assert raw.lookup([block_id(999), *prompt]) == [Tier.MISS] * (len(prompt) + 1)


def test_a_router_is_told_what_the_namespaces_pods_would_find(nodes):
    a, b = nodes
    hashes = [b"hash %d" % n for n in range(5)]
    names = [keys.block_id(FINGERPRINT, one, bytes(4)) for one in hashes]
    with a.connect("base") as base, a.connect("reader") as reader:
        base.put({name: payload(n) for n, name in enumerate(names[:3])})
        reader.put({names[3]: payload(3)})
    a.wait_announced()
    token = keys.events_token(SECRET, "pool-uid", 0)

    def reach(node, namespace: str) -> dict:
        asked = {"tenant": namespace, "fingerprint": FINGERPRINT.hex(), "hashes": [one.hex() for one in hashes]}
        request = urllib.request.Request(
            f"http://{node.address}:{HTTP_PORT}/prefixes",
            json.dumps(asked).encode(),
            {"Authorization": f"Bearer {token}"},
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())

    for node in (a, b):
        assert [reach(node, who)["nodes"].get("a", 0) for who in ("base", "reader", "third", "plain")] == [3, 4, 0, 0]
    wait_for(lambda: reach(b, "reader")["shared"] == 4, "copies are reported of")
    assert (reach(b, "base")["shared"], reach(b, "third")["shared"]) == (3, 0)


def spoil(node, name: bytes) -> str:
    """Change bytes of the base tenant's block on the node's drive; the name of its file."""
    key = keys.block_key(SECRET, BASE, name).hex()
    (place,) = [f for f in node.files() if f.name == key]
    place.chmod(0o600)
    with place.open("r+b") as file:
        file.seek(block.HEADER_BYTES + 1000)
        file.write(os.urandom(64))
    return key


def report(node, tenant: str, *names: bytes) -> None:
    with node.connect(tenant, granted=True) as raw:
        raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [name.hex() for name in names]}))


def test_a_false_report_of_a_reader_leaves_the_owners_block_and_a_true_one_takes_it(nodes, common):
    a, b = nodes
    fine, gone = common[8], set()
    for node, bad, worse in ((a, *common[6:8]), (b, *common[9:11])):  # on b it is the peer that has a look
        not_yet = spoil(a, bad)
        gone.add(spoil(a, worse))
        report(node, "third", bad)  # who may not read it has no say
        report(node, "reader", fine, worse)  # they are checked in this order
        wait_for(lambda: {f.name for f in a.files("quarantine")} >= gone, "quarantined")
        assert {f.name for f in a.files("quarantine")} == gone
        with node.connect("base") as raw:
            assert raw.get([fine]) == [DATA[8]]
        assert keys.block_key(SECRET, BASE, fine).hex() in {f.name for f in a.files()}
        report(node, "reader", bad)
        gone.add(not_yet)
        wait_for(lambda: {f.name for f in a.files("quarantine")} == gone, "the other one, too")


def test_a_grant_comes_and_goes_without_a_restart(nodes, common):
    a, b = nodes
    name, data = common[11], DATA[11]
    processes = [node.process.pid for node in nodes]
    held = [node.connect("reader", granted=True) for node in nodes]
    owners = [node.connect("base", granted=True) for node in nodes]
    assert [raw.get([name]) for raw in held] == [[data], [data]]
    change(nodes, tenants=tenants())
    for node, raw in zip(nodes, held, strict=True):
        with pytest.raises(GoneError):
            raw.lookup([name])
        raw.close()
        with node.connect("reader", granted=True) as raw:
            assert raw.server.readable_tags == ()
            assert raw.lookup([name]) == [Tier.MISS]
            assert raw.get([name]) == [None]
    change(nodes, tenants=tenants(BASE))
    kept = [node.connect("reader", granted=True) for node in nodes]
    assert [raw.lookup([name]) for raw in kept] == [[Tier.LOCAL], [Tier.PEER]]
    change(nodes, tenants=(*tenants(BASE), config.TenantConfig("new", "kvt:new:4", ("other",))))
    assert [raw.get([name]) for raw in (*kept, *owners)] == [[data]] * 4  # what does not concern them ends nothing
    change(nodes, tenants=tenants(BASE)[1:])  # the tenant itself is gone, and with it what it gave
    for raw in (*kept, *owners):
        with pytest.raises(GoneError):
            raw.lookup([name])
        raw.close()
    assert lookups(a, "reader", [name]) == lookups(b, "reader", [name]) == [Tier.MISS]
    assert [node.process.pid for node in nodes if node.running] == processes


# -- who finds what, held against a model ------------------------------------------------------------------------------

FOUR = ("kvt:t:0", "kvt:t:1", "kvt:t:2", "kvt:t:3")
TAGS = {keys.tenant_tag(SECRET, name): name for name in FOUR}
PLACES = st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([Tier.LOCAL, Tier.PEER, Tier.SHARED]))
GRANTS = st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True), min_size=4, max_size=4)


def no_dial(*_):
    raise KeyError("no test reads from a peer here")


class World:
    """One node without drives: blocks in memory, an index that knows one peer, a shared tier in memory."""

    def __init__(self) -> None:
        self.local, self.far, self.index = MemoryStore(1 << 28), MemoryStore(1 << 28), MemoryIndex(lease_s=600)
        self.shared = SharedTier(self.far)
        self.bulkhead = Bulkhead("index", 1, 8, CircuitBreaker(3, 1, time.monotonic))
        self.directory = BlockResolver(self.index, self.bulkhead, lambda: 0, lease_s=600, lookup_s=PATIENCE_S)
        self.peer = self.index.join(NodeInfo("peer", "127.0.0.1", 1, 1))
        self.heard: list[tuple] = []
        self.learned: list[tuple] = []
        pool = config.PoolConfig("p", "n", "u", (config.LocalTier("l", "/x", 1),), config.IndexConfig(""))
        after = LookupEvents(
            [lambda *reported: self.heard.append(reported)], Stats(), lambda *reported: self.learned.append(reported)
        )
        after.start()
        self.after = after
        holder = ConfigHolder(SECRET, pool)
        self.node = BlockService(
            holder,
            BlockLocator(self.local, self.shared, self.directory),
            BlockOpener(holder, self.local, self.shared, self.directory, Stats()),
            None,
            Stats(),
            MissCauses(self.local, self.directory, RemovedBlocks(), Fingerprints(), Stats()),
            lookup_events=after,
        )

    def stop(self) -> None:
        self.after.stop()
        self.shared.close()
        self.bulkhead.close()

    def put(self, owner: str, n: int, tier: int) -> None:
        key, data = keys.block_key(SECRET, owner, block_id(n)), f"{owner} {n}".encode()
        if tier == Tier.PEER:
            self.index.announce([(key, Record(self.peer, len(data), 1))])
            return
        store = self.local if tier == Tier.LOCAL else self.far
        if (pending := store.begin(key, len(data))) is not None:
            tag = keys.tenant_tag(SECRET, owner)
            write(
                pending, block.BlockHeader(key, block_id(n), FINGERPRINT, tag, len(data), block.checksum(data), 1), data
            )
            pending.commit()

    def read(self, tenants, n: int) -> bytes | None:
        (entry,) = opened = self.node.opener.open(
            tenants, [block_id(n)], Flag.LOCAL_ONLY, PATIENCE_S, PeerStreams(None, no_dial)
        )
        try:
            if entry.status == OpenStatus.MISS:
                return None
            return os.pread(entry.fd, entry.payload_len, block.HEADER_BYTES)
        finally:
            self.node.opener.close_files(opened)


def session_tenants(namespace: str, tenancy: Tenancy) -> tuple[Tenant, ...]:
    """As the server makes them of a configuration."""
    return tuple(Tenant(SECRET, name) for name in (tenancy.tenant_id(namespace), *tenancy.reads_from(namespace)))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(placed=st.sets(PLACES, max_size=24), grants=GRANTS, order=st.permutations(range(10)))
def test_a_session_finds_exactly_its_own_and_what_was_granted(placed, grants, order):
    world = World()
    made = tuple(
        config.TenantConfig(f"t{n}", FOUR[n], (f"ns{n}",), reads_from=tuple(FOUR[m] for m in may if m != n))
        for n, may in enumerate(grants)
    )
    pool = config.PoolConfig("p", "n", "u", (config.LocalTier("l", "/x", 1),), config.IndexConfig(""), tenants=made)
    tenancy = Tenancy(SECRET, pool)
    try:
        for owner, n, tier in sorted(placed):
            world.put(FOUR[owner], n, tier)
        names = [block_id(n) for n in order]
        for who in (*range(4), 99):
            readable = {who, *grants[who]} if who < 4 else set()
            may = session_tenants(f"ns{who}", tenancy)
            there = [{(tier, owner) for owner, m, tier in placed if m == n and owner in readable} for n in order]
            nearest = [min((tier for tier, _ in some), default=Tier.MISS) for some in there]
            every = world.node.locator.locate(may, names, PATIENCE_S, exhaustive=True)
            assert list(every.tiers) == nearest
            for n, some, tier, key in zip(order, there, nearest, every.keys, strict=True):
                if tier:
                    assert key in {keys.block_key(SECRET, FOUR[owner], block_id(n)) for at, owner in some if at == tier}
            miss = nearest.index(Tier.MISS) if Tier.MISS in nearest else len(nearest)
            assert list(world.node.locator.locate(may, names, PATIENCE_S, exhaustive=False).tiers) == nearest[:miss] + [
                0
            ] * (10 - miss)
            for n, some in zip(order, there, strict=True):
                data = world.read(may, n)
                owners = {owner for tier, owner in some if tier != Tier.PEER}
                assert data in ({f"{FOUR[owner]} {n}".encode() for owner in owners} or {None})
    finally:
        world.stop()


def test_one_that_may_read_nobody_asks_what_it_always_asked_and_a_foreign_block_is_no_other_miss():
    """By what is asked, not by time: the names and the number of questions of a block of another tenant and of none."""
    asked: dict[str, list[int]] = {}

    class Counting:
        def __init__(self, name: str, answer) -> None:
            self.name, self.answer = name, answer

        def __call__(self, some, *_):
            many = [some] if isinstance(some, bytes) else list(some)
            asked.setdefault(self.name, []).append(len(many))
            return self.answer(some, *_)

    world = World()
    try:
        world.put(FOUR[1], 1, Tier.LOCAL)
        world.put(FOUR[1], 2, Tier.SHARED)
        for holder, name in (
            (world.local, "contains"),
            (world.shared, "contains_many"),
            (world.directory, "longest_prefix"),
        ):
            setattr(holder, name, Counting(name, getattr(holder, name)))
        locator, own = BlockLocator(world.local, world.shared, world.directory), Tenant(SECRET, FOUR[0])
        reported = []
        for names in ([1, 2, 3], [7, 8, 9]):
            asked.clear()
            found = locator.locate((own,), [block_id(n) for n in names], PATIENCE_S, exhaustive=False)
            reported.append((list(found.tiers), dict(asked)))
        assert (
            reported[0]
            == reported[1]
            == ([0, 0, 0], {"contains": [1, 1, 1], "longest_prefix": [3], "contains_many": [1]})
        )
        granted = (own, Tenant(SECRET, FOUR[1]))
        asked.clear()
        block_ids = [block_id(1), block_id(2), block_id(3)]
        assert list(locator.locate(granted, block_ids, PATIENCE_S, exhaustive=False).tiers) == [1, 3, 0]
        assert asked["longest_prefix"] == [2, 2]
    finally:
        world.stop()


def test_what_follows_a_lookup_is_told_of_the_owners_blocks_but_learns_the_readers_order_alone():
    world = World()
    try:
        world.put(FOUR[1], 1, Tier.LOCAL)
        world.put(FOUR[0], 2, Tier.LOCAL)
        mine, granted = Tenant(SECRET, FOUR[0]), Tenant(SECRET, FOUR[1])
        names = [block_id(1), block_id(2), block_id(3)]
        world.node.on_lookup(
            mine, names, world.node.locator.locate((mine, granted), names, PATIENCE_S, exhaustive=False)
        )
        wait_for(lambda: world.learned, "heard of")
        ((tag, found, tiers, _at),) = world.heard
        assert (tag, found, list(tiers)) == (mine.tag, [granted.block_key(names[0]), mine.block_key(names[1])], [1, 1])
        assert world.learned == [([mine.block_key(name) for name in names], mine.tag)]
    finally:
        world.stop()


def test_names_of_others_do_not_use_up_the_time_for_ones_own():
    named = []

    class Slow(Tenant):
        def block_key(self, block_id: bytes) -> bytes:
            named.append(block_id)
            time.sleep(0.02)
            return super().block_key(block_id)

    world = World()
    try:
        mine = (Tenant(SECRET, FOUR[0]), Slow(SECRET, FOUR[1]))
        for n in range(100, 110):
            world.put(FOUR[0], n, Tier.LOCAL)
        names = [block_id(n) for n in range(110)]
        found = world.node.locator.locate(mine, names, 0.4, exhaustive=True)
        assert list(found.tiers[100:]) == [Tier.LOCAL] * 10
        assert 0 < len(named) <= 21  # 0.4 s at 0.02 s each
    finally:
        world.stop()


def test_long_prompts_are_followed_over_all_tenants_at_a_peer():
    world = World()
    try:
        for n in range(600):
            world.put(FOUR[n // 150 % 2], n, Tier.PEER)
        tenants = tuple(Tenant(SECRET, name) for name in FOUR[:3])
        names = [block_id(n) for n in range(700)]
        found = world.node.locator.locate(tenants, names, PATIENCE_S, exhaustive=False)
        assert list(found.tiers) == [Tier.PEER] * 600 + [0] * 100
        assert all(found.keys[n] == tenants[n // 150 % 2].block_key(names[n]) for n in range(600))
        alone = world.node.locator.locate(tenants[:1], names, PATIENCE_S, exhaustive=False)
        assert alone.tiers.index(0) == 150
    finally:
        world.stop()


def test_a_configuration_grants_only_what_it_has():
    pool = config.PoolConfig("p", "n", "u", (config.LocalTier("l", "/x", 1),), config.IndexConfig(""))
    given = dataclasses.replace(pool, tenants=tenants("kvt:gone:9", BASE))
    tenancy = Tenancy(SECRET, given)
    assert tenancy.reads_from("reader") == (BASE,)
    assert tenancy.reads_from("base") == tenancy.reads_from("third") == tenancy.reads_from("plain") == ()
    assert config.loads(config.PoolConfig, config.dumps(given)) == given
    before = json.loads(config.dumps(given))
    for tenant in before["tenants"]:
        del tenant["reads_from"]
    assert {t.reads_from for t in config.loads(config.PoolConfig, json.dumps(before)).tenants} == {()}
    for wrong in (("plain",), (READER,), (BASE, BASE), tuple(f"kvt:t:{n}" for n in range(9))):
        with pytest.raises(config.ConfigError, match="at most 8 other tenants"):
            tenants(*wrong)
