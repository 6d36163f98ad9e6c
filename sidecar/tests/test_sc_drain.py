"""A node that is drained: what is hot and nowhere else gets a copy elsewhere, and nothing hotter pays for it."""

from __future__ import annotations

import math
import os
import shutil
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sc_nodes import MIB, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import ident, payload

from kvpool import config, wire
from kvpool.block import HEADER_BYTES
from kvpool.errors import CorruptBlockError, ProtocolError
from kvpool_sidecar import quota
from kvpool_sidecar.evacuate import Move, _choices, in_order
from kvpool_sidecar.heat import Hot
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.store.local import LocalStore
from kvpool_sidecar.store.root import Root
from kvpool_sidecar.testing.blocks import key, put
from kvpool_sidecar.transport.moving import Room, ask_adopt, ask_room

SIZE = 128 * 1024
FAST = 1 << 30
A, B, C = (NodeInfo(name, "127.0.0.1", n, 1) for n, name in enumerate("abc", 1))


# -- in which order


def test_what_lookups_found_most_goes_first_then_what_was_used_last():
    used = [(key(n), SIZE, idle) for n, idle in ((1, 500.0), (2, 10.0), (3, 12.0), (4, 70.0), (5, 11.0))]
    hot = [Hot(key(4), 9, None), Hot(key(9), 8, None), Hot(key(1), 1, None)]
    # 9 is not here; 3, 5 and 2 were used within one minute, and 3 first: a prompt is stored from its root on
    assert [move.key for move in in_order(hot, used)] == [key(4), key(1), key(3), key(5), key(2)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1e4)), unique_by=lambda t: t[0]), st.lists(st.integers(0, 50))
)
def test_each_block_that_is_here_is_moved_once(used, hot):
    hot = [Hot(key(n), 1.0, None) for n in dict.fromkeys(hot)]
    moves = in_order(hot, [(key(n), SIZE, idle) for n, idle in used])
    assert sorted(move.key for move in moves) == sorted(key(n) for n, _ in used)


# -- to whom


def test_who_has_room_is_asked_first_and_who_is_colder_then():
    rooms = {A: Room(0, 50.0, False), B: Room(2 * SIZE, 0.0, False), C: Room(0, 5.0, False)}
    assert _choices(rooms, Move(key(1), SIZE, 20.0)) == [(B, False), (A, True)]  # c's blocks are hotter than this one
    assert _choices(rooms, Move(key(1), SIZE, 1.0)) == [(B, False), (A, True), (C, True)]
    assert _choices(rooms, Move(key(1), 4 * SIZE, 60.0)) == []


@given(st.integers(0, 1 << 60), st.floats(0, 1e9), st.booleans())
def test_a_room_survives_the_wire(spare, idle, leaving):
    class Link:
        def request(self, op, keys, flags=0):
            assert (op, len(keys[0])) == (wire.Op.ROOM, 32)

        def small_answer(self, limit, deadline):
            return Room(spare, idle, leaving).pack()

    assert ask_room(Link(), 0) == Room(spare, idle, leaving)


@pytest.mark.parametrize(
    "body", [None, b"", b"x", bytes(23), bytes(25), Room(1, math.nan, False).pack(), Room(1, -1.0, False).pack()]
)
def test_a_hostile_answer_is_a_protocol_error(body):
    class Link:
        def request(self, op, keys, flags=0):
            pass

        def small_answer(self, limit, deadline):
            return body

    with pytest.raises(ProtocolError):
        ask_room(Link(), 0)
    if body is None or body[:1] == b"x":
        with pytest.raises(ProtocolError):
            ask_adopt(Link(), key(1), 0, evict=False)


# -- what a drive tells


@pytest.fixture
def drive(tmp_path):
    made = []

    def make(capacity: int = 64 * MIB, clock=None) -> LocalStore:
        limits = quota.Limits(capacity, 85, 75, 1000)
        root = Root("nvme", str(tmp_path / f"r{len(made)}"), limits, pool_uid="u", clock=clock)
        root.scan()
        made.append(LocalStore([root]))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_was_used_lately_is_told_and_what_is_coldest(drive):
    clock = [time.time()]
    local = drive(clock=lambda: clock[0])
    for n in range(20):
        put(local, n, SIZE)
    assert {found[0] for found in local.used_since(60)} == {key(n) for n in range(20)}
    clock[0] += 5000
    assert local.idle_of_coldest() == pytest.approx(5000, abs=5)
    local.open_many([key(n) for n in range(17)])
    found = local.used_since(3600)
    assert {one for one, _, _ in found} == {key(n) for n in range(17)}
    assert all(length == SIZE and idle < 1 for _, length, idle in found)
    assert local.idle_of_coldest() == pytest.approx(5000, abs=5)  # a tenth is colder still
    local.open_many([key(n) for n in range(19)])
    assert local.idle_of_coldest() < 1


# -- real sidecars


@pytest.fixture
def nodes(cluster):
    """A factory: `nodes("ab", shared=True, cache=...)`: real sidecars that take orders, and a real index."""

    def make(names: str, *, shared: bool = False, cache: config.CacheConfig | None = None, index: bool = True) -> list:
        made = cluster(shared=shared, index=index)
        cache = cache or config.CacheConfig(prefetch_bytes=0)
        return [made.node(name, cache=cache, admin_port=ADMIN_PORT, tenants=TENANTS) for name in names]

    return make


TENANTS = ("team-a", "team-b")
POLICIES = {"peers": False, "shared": True}


def selective(**kw) -> config.CacheConfig:
    """Nothing goes to the shared tier by itself."""
    return config.CacheConfig(
        warm_up_bytes_per_s=1, prefetch_bytes=0, write_policy="WriteThroughSelective", write_min_hits=1000, **kw
    )


def store(node, numbers, size: int = SIZE, tenant: str = "team-a") -> None:
    with node.connect(tenant) as raw:
        assert set(raw.put({ident(n): payload(n, size) for n in numbers})) == {wire.CommitStatus.STORED}


def drain(node, bandwidth: int = FAST, **params) -> dict:
    return Operator.of(node).run(f"evacuate-{time.monotonic_ns()}", "evacuate", bandwidth=bandwidth, **params)


def remain(node) -> None:
    assert Operator.of(node).run(f"remain-{time.monotonic_ns()}", "remain")["state"] == "Succeeded"


def told(node) -> dict:
    return node.status()["drain"]


def loads(node, numbers, size: int = SIZE, tenant: str = "team-a") -> list[int]:
    """Which of the blocks can be had there, whole; one that is not is told of, as clients do."""
    found = []
    for n in numbers:
        with node.connect(tenant) as raw:
            try:
                (data,) = raw.get([ident(n)])
            except CorruptBlockError:
                raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [ident(n).hex()]}))
                continue
        assert data is None or data == payload(n, size)
        found += [n] if data is not None else []
    return found


@pytest.mark.parametrize("where", POLICIES)
def test_what_a_drained_node_had_is_found_after_it_has_gone(nodes, where):
    a, b, d = nodes("abd", shared=POLICIES[where], cache=selective() if POLICIES[where] else None)
    numbers, later = list(range(60)), list(range(100, 110))
    store(d, numbers)
    store(d, [500], tenant="team-b")
    assert told(d) == {
        "leaving": False, "clean": False, "moved_blocks": 0, "moved_bytes": 0, "remaining_blocks": 0,
        "remaining_bytes": 0, "problem": "",
    }  # fmt: skip
    report = drain(d, wait_s=60)
    assert report["state"] == "Succeeded", report
    assert report["counts"] == {
        "moved_blocks": 61, "moved_bytes": 61 * (SIZE + HEADER_BYTES), "remaining_blocks": 0,
    }  # fmt: skip
    assert loads(d, numbers) == numbers  # it serves on
    store(d, later)  # and is not left alone with what comes now
    wait_for(lambda: told(d)["clean"] and told(d)["moved_blocks"] == 71, "new blocks are moved, too", timeout=30)
    d.kill()
    for node in (a, b):
        assert node.status()["blocks"] == 0 if where == "shared" else node.status()["blocks"] > 20
        wait_for(lambda node=node: loads(node, numbers + later) == numbers + later, "all of it is found", timeout=30)
        assert loads(node, numbers + later, tenant="team-b") == []
        assert loads(node, [500], tenant="team-b") == [500]
    result = "shared" if where == "shared" else "peers"
    assert b'kvpool_sidecar_adopted_total{result="blocks"}' in a.get("/metrics") or result == "shared"


def test_the_hottest_goes_first_within_the_bandwidth(nodes):
    rate = 4 * MIB
    a, d = nodes("ad", cache=config.CacheConfig(warm_up_bytes_per_s=1, prefetch_bytes=0))
    store(d, range(64))
    hot = list(range(40, 48))
    with d.connect() as raw:
        for _ in range(3):
            assert all(raw.lookup([ident(n) for n in hot]))
    d.wait_announced()
    began = time.monotonic()
    assert drain(d, rate)["state"] == "Succeeded"

    def half_done() -> bool:
        moved = told(d)["moved_bytes"]
        assert moved <= rate * (time.monotonic() - began) + 2 * SIZE
        return moved >= 4 * MIB

    wait_for(lambda: told(d)["moved_blocks"] >= 8, "the first are moved")
    with a.connect() as raw:
        tiers = raw.lookup([ident(n) for n in hot], flags=wire.Flag.EVERY)
    assert tiers == [wire.Tier.LOCAL] * 8
    wait_for(half_done, "half of it is moved", timeout=60)
    assert time.monotonic() - began > 0.9
    remain(d)
    wait_for(lambda: not told(d)["leaving"], "it stays")
    kept = a.status()["blocks"]
    time.sleep(0.5)
    assert a.status()["blocks"] <= kept + 1 < 64


def test_nothing_hotter_is_evicted_for_it(nodes):
    a, d = nodes("ad")
    store(d, range(60))
    assert a.stop() == 0
    tier = config.LocalTier("nvme", str(a.nvme), 8 * MIB, reserve_free_percent=0)
    a.pool = config.PoolConfig(**{**a.pool.__dict__, "local": (tier,)})
    a.write_config()
    a.start().ready()
    for n in range(1000, 1048):
        store(a, [n])
    kept = loads(a, list(range(1000, 1048)))
    assert len(kept) > 30
    assert drain(d)["state"] == "Succeeded"
    wait_for(lambda: told(d)["problem"] == "no peer has room", "it says why", timeout=30)
    assert told(d)["remaining_blocks"] >= 59
    assert loads(a, list(range(1000, 1048))) == kept
    # blocks that nobody used for an hour make room for what is hot
    old = time.time() - 3600
    assert a.stop() == 0
    for file in a.files():
        os.utime(file, (old, old))
    a.start().ready()
    wait_for(lambda: told(d)["moved_blocks"] >= 30, "they are taken", timeout=60)
    assert a.status()["used_bytes"] <= 8 * MIB
    assert len(loads(a, list(range(1000, 1048)))) < len(kept)


def test_two_nodes_that_leave_do_not_rely_on_each_other(nodes):
    a, d, e = nodes("ade")
    store(d, range(20))
    store(e, range(20))
    for node in (d, e):
        node.wait_announced()
        assert drain(node)["state"] == "Succeeded"
    wait_for(lambda: told(d)["clean"] and told(e)["clean"], "both are clean", timeout=40)
    assert a.status()["blocks"] == 20
    assert (d.status()["blocks"], e.status()["blocks"]) == (20, 20)


def test_a_block_that_is_corrupt_is_not_spread(nodes):
    a, d = nodes("ad")
    store(d, range(6))
    d.wait_announced()
    spoil(sorted(d.files())[2])
    assert drain(d)["state"] == "Succeeded"
    wait_for(lambda: len(a.files()) == 5, "the others are moved")
    wait_for(lambda: told(d)["clean"], "the node had a look at it and quarantined it", timeout=30)
    assert len(a.files()) == 5
    assert d.status()["blocks"] == 5


def spoil(file) -> None:
    """Flip a bit of the payload."""
    file.chmod(0o600)
    with file.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))


def test_an_order_that_makes_no_sense_is_refused(nodes):
    (d,) = nodes("d", index=False)
    for n, params in enumerate([{}, {"bandwidth": 0}, {"bandwidth": "x"}, {"bandwidth": 5, "wait_s": -1}, {"b": 1}]):
        report = Operator.of(d).run(f"bad-{n}", "evacuate", **params)
        assert report["state"] == "Failed", report
    assert not told(d)["leaving"]
    store(d, range(2))
    report = Operator.of(d).run("alone", "evacuate", bandwidth=FAST, wait_s=1)
    assert (report["state"], told(d)["remaining_blocks"]) == ("Failed", 2)
    assert "2 hot blocks are here alone" in report["message"]


# -- a node that is lost, and what comes back under its name


def test_a_lost_node_is_no_answer_and_its_old_disk_offers_only_what_is_right(nodes):
    a, d = nodes("ad")
    store(d, range(12))
    d.wait_announced()
    assert loads(a, list(range(12))) == list(range(12))
    d.kill()
    wait_for(lambda: lookup(a, range(12)) == [0] * 12, "its entries are no answers any more")
    files = sorted(d.files())
    spoil(files[0])
    files[1].unlink()
    os.truncate(files[2], 100)
    d.start().ready()
    wait_for(lambda: sum(map(bool, lookup(a, range(12)))) >= 9, "its blocks are found again")
    every = list(range(12))
    good = wait_for(lambda: len(f := loads(a, every)) == 9 and f, "nine of them are whole", timeout=30)
    wait_for(lambda: d.status()["blocks"] == 9, "the others are gone", timeout=30)
    assert loads(d, every) == good


def test_another_machine_under_the_same_name_is_not_taken_for_the_old_one(nodes):
    a, d = nodes("ad")
    store(d, range(12))
    d.wait_announced()
    before = d.status()["index"]["node_generation"]
    assert lookup(a, range(12)) == [wire.Tier.PEER] * 12
    d.kill()
    shutil.rmtree(d.nvme)
    d.start().ready()
    wait_for(lambda: d.status()["index"]["connected"], "it has joined")
    assert d.status()["index"]["node_generation"] != before
    wait_for(lambda: lookup(a, range(12)) == [0] * 12, "what the old drive had is no answer")
    store(d, range(6))
    d.wait_announced()
    wait_for(lambda: lookup(a, range(6)) == [wire.Tier.PEER] * 6, "what it has now is")
    assert loads(a, list(range(12))) == list(range(6))


def lookup(node, numbers) -> list[int]:
    with node.connect() as raw:
        return raw.lookup([ident(n) for n in numbers], flags=wire.Flag.EVERY)
