"""New blocks are written by the admission policy, which changes without a restart; written bytes are counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from sc_nodes import Cluster, wait_for
from sc_raw import block_id, payload

from kvpool.config import CacheConfig
from kvpool.protocol.wire import CommitStatus
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.serving.admission import LocalAdmission, WriteBudget
from kvpool_sidecar.storage.local.endurance import DAY_S, WriteMeter

GIB = 1 << 30
STORED, HAVE = CommitStatus.STORED, CommitStatus.HAVE


class Clock:
    now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def admission(clock, policy: str, percent: int = 100, size: int = 24 * GIB) -> LocalAdmission:
    cache = CacheConfig(admission=policy, admission_percent=percent)
    config = SimpleNamespace(current=SimpleNamespace(cache=cache))
    drive = SimpleNamespace(endurance=SimpleNamespace(size_bytes=size))
    local = SimpleNamespace(contains=lambda _: False, drives=[drive])
    return LocalAdmission(config, local, Stats(), clock)


def test_always_admits_everything_and_counts_nothing(clock):
    one = admission(clock, "Always")
    assert all(one.admits(block_id(n), GIB) for n in range(100))
    assert one._stats.family("admission") == {}


def test_the_second_offer_of_a_block_is_written(clock):
    one = admission(clock, "SecondUse")
    assert [one.admits(block_id(n), 1) for n in (1, 2, 1, 2, 3)] == [False, False, True, True, False]
    assert one._stats.family("admission") == {"admitted": 2, "skipped": 3}


def test_blocks_that_are_offered_once_do_not_grow_the_table_without_bound(clock, monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.serving.admission._GHOSTS", 8)
    one = admission(clock, "SecondUse")
    for n in range(1000):
        one.admits(block_id(n), 1)
    assert len(one._ghosts) == 8


def test_a_budget_is_an_hours_share_immediately_and_then_its_rate(clock):
    one = admission(clock, "Budget")  # 24 GiB a day: 1 GiB an hour
    assert sum(one.admits(block_id(n), GIB // 8) for n in range(100)) == 8
    clock.now += 1800
    assert sum(one.admits(block_id(n), GIB // 8) for n in range(100)) == 4
    clock.now += 10 * 3600
    assert sum(one.admits(block_id(n), GIB // 8) for n in range(100)) == 8, "no more than an hour's share is saved"


def test_a_day_of_writes_stays_within_the_budget(clock):
    one, written = admission(clock, "Budget", percent=50), 0
    for _ in range(24 * 60):
        clock.now += 60
        written += sum(GIB // 16 for n in range(20) if one.admits(block_id(n), GIB // 16))
    assert 11.5 * GIB <= written <= 12.6 * GIB


def test_a_block_larger_than_an_hours_share_waits_until_it_is_saved(clock):
    budget = WriteBudget(clock)
    assert budget.spend(100, DAY_S / 3600), "1 byte in 3600 s"
    assert not budget.spend(100, DAY_S / 3600)
    clock.now += 99 * 3600
    assert not budget.spend(100, DAY_S / 3600)
    clock.now += 2 * 3600
    assert budget.spend(100, DAY_S / 3600)


def test_writes_per_day_look_at_a_day_and_do_not_multiply_the_first_minute(clock):
    meter = WriteMeter(clock)
    meter.add(100)
    clock.now += 60
    assert meter.per_day() == 2400
    for _ in range(52):
        clock.now += 1800
        meter.add(10)
    assert meter.per_day() == pytest.approx(480, rel=0.03), "the first hundred is older than a day"
    assert meter.total == 620
    assert len(meter._samples) < 160


def test_a_running_sidecar_follows_the_policy_and_reports_written_bytes(tmp_path):
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a")

        def offer(*numbers: int) -> list[int]:
            with a.connect() as raw:
                return [raw.put({block_id(n): payload(n)})[0] for n in numbers]

        assert offer(1) == [STORED]
        drive = a.status()["endurance"]["nvme"]
        assert drive["written_bytes"] >= 64 * 1024
        assert drive["size_bytes"] > 0
        assert b'kvpool_sidecar_drive_written_bytes_total{drive="nvme"}' in a.get("/metrics")
        a.pool = replace(a.pool, generation=a.pool.generation + 1, cache=CacheConfig(admission="SecondUse"))
        a.write_config()
        wait_for(lambda: a.status()["generation"] == a.pool.generation, "the policy is in force")
        assert offer(2, 2, 2) == [-1, STORED, HAVE]
        assert offer(1) == [HAVE], "a block that is there is no new one"
        assert a.status()["endurance"]["nvme"]["written_bytes"] < 3 * drive["written_bytes"]
