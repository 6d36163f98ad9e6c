"""Drains of real sidecars, and nodes that are lost and come back: what takes too long for `make test`."""

from __future__ import annotations

import os
import shutil
import time

from sc_drain import FAST, SIZE, drain, loads, lookup, nodes, remain, reported, spoil, store
from sc_nodes import MIB, wait_for
from sc_operator import Operator
from sc_raw import block_id

from kvpool import config
from kvpool.protocol import wire


def test_two_nodes_that_leave_do_not_rely_on_each_other(cluster):
    a, d, e = nodes(cluster, "ade")
    store(d, range(20))
    store(e, range(20))
    for node in (d, e):
        node.wait_announced()
        assert drain(node)["state"] == "Succeeded"
    wait_for(lambda: reported(d)["clean"] and reported(e)["clean"], "both are clean", timeout=40)
    assert a.status()["blocks"] == 20
    assert (d.status()["blocks"], e.status()["blocks"]) == (20, 20)


def test_the_hottest_goes_first_within_the_bandwidth(cluster):
    rate = 4 * MIB
    a, d = nodes(cluster, "ad", cache=config.CacheConfig(warm_up_bytes_per_s=1, prefetch_bytes=0))
    store(d, range(64))
    hot = list(range(40, 48))
    with d.connect() as raw:
        for _ in range(3):
            assert all(raw.lookup([block_id(n) for n in hot]))
    d.wait_announced()
    began = time.monotonic()
    assert drain(d, rate)["state"] == "Succeeded"

    def half_done() -> bool:
        moved = reported(d)["moved_bytes"]
        assert moved <= rate * (time.monotonic() - began) + 2 * SIZE
        return moved >= 4 * MIB

    wait_for(lambda: reported(d)["moved_blocks"] >= 8, "the first are moved")
    with a.connect() as raw:
        tiers = raw.lookup([block_id(n) for n in hot], flags=wire.Flag.EXHAUSTIVE)
    assert tiers == [wire.Tier.LOCAL] * 8
    wait_for(half_done, "half of it is moved", timeout=60)
    assert time.monotonic() - began > 0.9
    remain(d)
    wait_for(lambda: not reported(d)["leaving"], "it stays")
    kept = a.status()["blocks"]
    time.sleep(0.5)
    assert a.status()["blocks"] <= kept + 1 < 64


def test_nothing_hotter_is_evicted_for_it(cluster):
    a, d = nodes(cluster, "ad")
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
    wait_for(lambda: reported(d)["problem"] == "no peer has enough headroom", "the problem is reported", timeout=30)
    assert reported(d)["remaining_blocks"] >= 59
    assert loads(a, list(range(1000, 1048))) == kept
    # blocks that no one used for an hour make room for what is hot
    old = time.time() - 3600
    assert a.stop() == 0
    for file in a.files():
        os.utime(file, (old, old))
    a.start().ready()
    wait_for(lambda: reported(d)["moved_blocks"] >= 30, "they are taken", timeout=60)
    assert a.status()["used_bytes"] <= 8 * MIB
    assert len(loads(a, list(range(1000, 1048)))) < len(kept)


def test_a_block_that_is_corrupt_is_not_spread(cluster):
    a, d = nodes(cluster, "ad")
    store(d, range(6))
    d.wait_announced()
    spoil(sorted(d.files())[2])
    assert drain(d)["state"] == "Succeeded"
    wait_for(lambda: len(a.files()) == 5, "the others are moved")
    wait_for(lambda: reported(d)["clean"], "the node had a look at it and quarantined it", timeout=30)
    assert len(a.files()) == 5
    assert d.status()["blocks"] == 5


def test_an_order_that_makes_no_sense_is_refused(cluster):
    (d,) = nodes(cluster, "d", index=False)
    for n, params in enumerate([{}, {"bandwidth": 0}, {"bandwidth": "x"}, {"bandwidth": 5, "wait_s": -1}, {"b": 1}]):
        report = Operator.of(d).run(f"bad-{n}", "evacuate", **params)
        assert report["state"] == "Failed", report
    assert not reported(d)["leaving"]
    store(d, range(2))
    report = Operator.of(d).run("alone", "evacuate", bandwidth=FAST, wait_s=1)
    assert (report["state"], reported(d)["remaining_blocks"]) == ("Failed", 2)
    assert "2 hot blocks have no other copy" in report["message"]


# -- a node that is lost, and what comes back under its name


def test_a_lost_node_is_no_answer_and_its_old_disk_offers_only_what_is_right(cluster):
    a, d = nodes(cluster, "ad")
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


def test_another_machine_under_the_same_name_is_not_taken_for_the_old_one(cluster):
    a, d = nodes(cluster, "ad")
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
