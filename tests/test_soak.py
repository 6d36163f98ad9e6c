"""The soak's own judgement: what it calls growth, and that a seed says what happens."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.soak.faults import FAULTS, schedule
from bench.soak.verdict import growing, latency, outcomes

MIB = 1 << 20
NODES, CLIENTS = ("a", "b", "c"), ("a-x", "b-x", "c-y")


def grows(samples) -> bool:
    return growing(samples, limit_mib=48, limit_mib_min=6)[1]


def test_memory_that_fills_once_or_wavers_is_no_growth_and_a_leak_is():
    assert not grows([])
    assert not grows([(t, 40 * MIB) for t in range(300)])
    assert not grows([(t, min(t, 60) * 5 * MIB) for t in range(300)])
    assert not grows([(t, (100 + 60 * (t % 7)) * MIB) for t in range(300)])
    assert grows([(t, (40 + t) * MIB) for t in range(300)])
    assert growing([(t, t * MIB) for t in range(300)], limit_mib=1, limit_mib_min=1)[0] == 60


def test_a_seed_decides_what_breaks_and_when():
    plan = schedule(7, 600, NODES, CLIENTS)
    assert plan == schedule(7, 600, NODES, CLIENTS) != schedule(8, 600, NODES, CLIENTS)
    assert {fault.name for fault in schedule(7, 3600, NODES, CLIENTS)} == set(FAULTS)
    ends = [fault.at_s + fault.hold_s for fault in plan]
    assert all(end < after.at_s for end, after in zip(ends, plan[1:], strict=False))
    assert max(ends) <= 540


def test_the_first_node_and_the_first_client_live_through_it():
    for seed in range(50):
        for fault in schedule(seed, 300, NODES, CLIENTS):
            killed = fault.name in ("sidecar_killed", "client_killed", "client_stopped")
            assert not (killed and fault.target in ("a", "a-x"))


def test_counts_are_told_by_tier_reason_and_outcome():
    counts = Counter({"load": 5, "load:local": 2, "load:absent": 3, "store": 1, "store:stored": 1, "lookup": 4})
    assert outcomes(counts) == {
        "lookups": 4, "reads": 5, "writes": 1, "hits": {"local": 2}, "misses": {"absent": 3}, "stores": {"stored": 1},
    }  # fmt: skip


def test_latencies_of_several_processes_are_put_together():
    one = {"load": {"calls": 1, "p50_ms": 10.0, "p99_ms": 20.0, "max_ms": 30.0, "worst_over_deadline_ms": -5.0}}
    two = {"load": {"calls": 3, "p50_ms": 2.0, "p99_ms": 50.0, "max_ms": 25.0, "worst_over_deadline_ms": 1.0}}
    assert latency([one, two, {}]) == {
        "load": {"calls": 4, "p50_ms": 4.0, "p99_ms": 50.0, "max_ms": 30.0, "worst_over_deadline_ms": 1.0}
    }
