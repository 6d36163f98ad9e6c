"""A plan beside a pool's status, and what a pool saved."""

from __future__ import annotations

import copy

import pytest

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import catalog
from kvpool_cli.planner.attention import read_layout
from kvpool_cli.planner.checks import check
from kvpool_cli.planner.demand import Fleet, Workload, demand, gain
from kvpool_cli.planner.gpus import find_gpu
from kvpool_cli.planner.plan import Plan
from kvpool_cli.planner.pool_status import read_status
from kvpool_cli.planner.savings import Rates, report, savings
from kvpool_operator.api.pool.status import PoolStatus
from kvpool_operator.api.v1alpha1 import PoolSpec

MODEL = catalog.find("Qwen/Qwen3-8B")
LAYOUT = read_layout(MODEL.config)
LOAD = Workload(tokens=20_000, new_tokens=600, sessions=100, every_s=60)
FLEET = Fleet(nodes=4, drives=1, drive_bytes=10**12, drive_read=3e9)
NEED = demand(LAYOUT, LOAD, FLEET, 256)
PLAN = Plan(MODEL, LAYOUT, 256, 20_000, FLEET, LOAD, NEED, gain(LAYOUT, LOAD, FLEET, 10_000))
POOL = {
    "kind": "KVCachePool",
    "metadata": {"namespace": "ai", "name": "chat"},
    "spec": {"tiers": [{"name": "nvme", "local": {"path": "/mnt/a", "capacity": "500Gi"}}]},
    "status": {
        "nodes": {"ready": 4},
        "capacity": {"total": "2Ti", "used": "360Gi", "blocks": 10_240},
        "cache": {
            "hitRate": "0.95",
            "loadSuccessRate": "0.99",
            "secondsSaved": 1234,
            "models": [
                {"model": "Qwen/Qwen3-8B", "tokensAsked": 4_000_000, "tokensFound": 3_000_000},
                {"model": "other", "tokensAsked": 10, "tokensFound": 5},
            ],
        },
        "index": {"memory": "256Mi"},
        "preflight": {"measured": [{"tier": "nvme", "readMBps": 3000}, {"tier": "share", "readMBps": 10}]},
    },
}


def pool(**changes):
    made = copy.deepcopy(POOL)
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return read_status(made)


def levels(**changes):
    return {verdict.subject: verdict.level for verdict in check(PLAN, pool(**changes))}


def test_the_sample_is_a_status_that_the_operator_writes():
    PoolStatus.model_validate(POOL["status"])
    PoolSpec.model_validate(POOL["spec"])


def test_a_pool_as_planned_has_no_finding():
    found = levels()
    assert set(found.values()) == {"ok"}
    assert found.keys() == {
        "bytes of a block", "nodes", "capacity", "index", "tier nvme", "hit rate", "loads", "time saved",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "subject", "level"),
    [
        ({"spec__cache": {"blockTokens": 512}}, "block tokens", "warn"),
        ({"spec__cache": {"maxBlockSize": "16Mi"}}, "block size", "fail"),
        ({"status__capacity__used": "180Gi"}, "bytes of a block", "warn"),
        ({"status__nodes__ready": 3}, "nodes", "warn"),
        ({"status__capacity__total": "100Gi"}, "capacity", "fail"),
        ({"status__index__memory": "512Ki"}, "index", "fail"),
        ({"status__preflight__measured": [{"tier": "nvme", "readMBps": 2000}]}, "tier nvme", "warn"),
        ({"status__preflight__measured": [{"tier": "nvme", "readMBps": 1000}]}, "tier nvme", "fail"),
        ({"status__cache__hitRate": "0.40"}, "hit rate", "warn"),
        ({"status__cache__loadSuccessRate": "0.50"}, "loads", "warn"),
        ({"status__cache__secondsSaved": -9}, "time saved", "fail"),
    ],
)
def test_each_deviation_is_found_with_advice(change, subject, level):
    found = {verdict.subject: verdict for verdict in check(PLAN, pool(**change))}
    assert found[subject].level == level
    assert found[subject].advice or subject == "nodes"


def test_what_a_pool_does_not_report_is_not_judged():
    assert check(PLAN, read_status({"kind": "KVCachePool"})) == []


@pytest.mark.parametrize("odd", ["x", [], None, -5, True, {"a": 1}])
def test_odd_fields_count_as_not_reported(odd):
    for path in (
        "status",
        "spec",
        "status__capacity",
        "status__cache",
        "status__nodes__ready",
        "status__cache__models",
    ):
        pool(**{path: odd})
    assert pool(status__capacity__total=odd).capacity == 0
    assert pool(status__cache__hitRate=odd).hit_rate is None


def test_another_kind_is_refused():
    with pytest.raises(UsageError, match="KVCacheNode"):
        read_status({"kind": "KVCacheNode"})


def test_savings_are_tokens_by_the_given_rate_and_watts():
    rows = savings([pool()], Rates({"Qwen/Qwen3-8B": 10_000.0}, None, tensor_parallel=2, watts=500.0))
    first, other = rows
    assert (first.engine_seconds, first.gpu_seconds) == (300.0, 600.0)
    assert first.kwh == pytest.approx(600 * 500 / 3.6e6)
    assert (other.model, other.engine_seconds, other.kwh) == ("other", None, None)
    assert "--prefill-rate" in other.prefill_source


def test_a_rate_is_estimated_for_shipped_models_only():
    first, other = savings([pool()], Rates({}, find_gpu("H100"), 1, 700.0))
    assert first.prefill_rate == pytest.approx(989e12 * 0.4 / (2 * 8.2e9))
    assert "estimated" in first.prefill_source
    assert other.prefill_rate is None


def test_without_a_gpu_no_energy_is_computed():
    first, _ = savings([pool()], Rates({"*": 5000.0}, None))
    assert (first.engine_seconds, first.kwh) == (600.0, None)


def test_the_report_has_its_sums_and_the_figures_that_engines_measured():
    pools = [pool(), pool(metadata__name="batch", status__cache__secondsSaved=-7)]
    found = report(pools, savings(pools, Rates({"Qwen/Qwen3-8B": 10_000.0}, None)))
    assert found["total"]["tokens_found"] == 2 * 3_000_005
    assert found["total"]["engine_seconds"] == 600.0
    assert found["total"]["models_not_computed"] == 2
    assert found["measured_engine_seconds"] == {"ai/chat": 1234, "ai/batch": -7}
