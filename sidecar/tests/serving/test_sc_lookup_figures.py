"""The hit rate of a sidecar: tokens found over tokens asked for, by model and window, in /status and /metrics."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sc_nodes import Cluster, wait_for
from sc_raw import FINGERPRINT, block_id, payload

from kvpool.client import Client
from kvpool.config import CacheConfig, ClientConfig
from kvpool.protocol import wire
from kvpool_sidecar.serving.lookup_figures import MAX_MODELS, MAX_TENANT_MODELS, LookupCounts, LookupFigures

TOKENS = 64


def counts(asked: int, found: int, **misses: int) -> LookupCounts:
    return LookupCounts(asked, found, misses, 1, int(asked == found))


def test_a_window_forgets_what_is_older():
    now = [1000.0]
    figures = LookupFigures(lambda: now[0])
    assert figures.status()["hitRate"] == "", "nothing was asked for"
    figures.record("llama", counts(100, 100))
    now[0] += 400
    figures.record("llama", counts(300, 0, expired=300))
    status = figures.status()
    assert [(w["window"], w["tokensAsked"], w["tokensFound"], w["hitRate"]) for w in status["windows"]] == [
        ("5m", 300, 0, "0.00"),
        ("1h", 400, 100, "0.25"),
    ]
    assert (status["tokensAsked"], status["tokensFound"], status["hitRate"]) == (400, 100, "0.25")
    assert status["misses"] == {"expired": 300}
    now[0] += 3300
    assert figures.status()["windows"][1]["tokensAsked"] == 300
    now[0] += 400
    assert [w["hitRate"] for w in figures.status()["windows"]] == ["", ""]
    assert figures.status()["sinceStart"]["models"]["llama"]["tokensAsked"] == 400
    assert not figures._buckets


def test_models_are_bounded():
    figures = LookupFigures(lambda: 0.0)
    for n in range(100):
        figures.record(f"model {n}", counts(10, 5))
    figures.record("", counts(1, 1))
    models = {m["model"]: m["tokensAsked"] for m in figures.status()["models"]}
    assert len(models) == MAX_MODELS
    assert models["other"] == 10 * (100 - MAX_MODELS + 1) + 1
    assert figures.status()["tokensAsked"] == 1001


def test_tenants_are_reported_by_tag_only_if_the_setting_is_on():
    now = [1000.0]
    figures = LookupFigures(lambda: now[0], per_tenant=True)
    assert figures.status()["tenants"] == []
    figures.record("llama 3", counts(100, 40), b"\xab\x12")
    figures.record("llama 3", counts(10, 10), b"\xab\x12")
    figures.record("llama 3", counts(5, 0), b"\x77")
    assert figures.status()["tenants"] == [
        {"tenant": "77", "model": "llama 3", "tokensAsked": 5, "tokensFound": 0},
        {"tenant": "ab12", "model": "llama 3", "tokensAsked": 110, "tokensFound": 50},
    ]
    assert [m["model"] for m in figures.status()["models"]] == ["llama 3"]
    now[0] += 4000
    assert {row["tokensAsked"] for row in figures.status()["tenants"]} == {0}
    plain = LookupFigures(lambda: now[0])
    plain.record("llama", counts(1, 1), b"\x77")
    assert "tenants" not in plain.status()


def test_pairs_of_tenant_and_model_are_bounded():
    figures = LookupFigures(lambda: 0.0, per_tenant=True)
    for n in range(300):
        figures.record("m", counts(10, 5), n.to_bytes(2, "big"))
    rows = figures.status()["tenants"]
    assert len(rows) == MAX_TENANT_MODELS
    others = [row for row in rows if not row["tenant"]]
    assert others == [
        {
            "tenant": "",
            "model": "other",
            "tokensAsked": 10 * (300 - MAX_TENANT_MODELS + 1),
            "tokensFound": 5 * (300 - MAX_TENANT_MODELS + 1),
        }
    ]


@pytest.fixture
def node(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        yield cluster.node("a", cache=CacheConfig(block_tokens=TOKENS))


def metric(node, name, **labels):
    found = text_string_to_metric_families(node.get("/metrics").decode())
    values = [s.value for f in found for s in f.samples if s.name == name and s.labels == labels]
    return values[0] if values else None


def client_of(node, **changes):
    client = Client(
        ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT, labels={"model": "Llama"}, **changes
    )
    wait_for(lambda: client.connected, "connected")
    return client


@pytest.mark.parametrize(("present", "rate"), [(0, "0.00"), (2, "0.50"), (4, "1.00")], ids=["nothing", "half", "all"])
def test_a_client_reports_its_lookups(node, present, rate):
    assert node.status()["cache"]["hitRate"] == ""
    assert metric(node, "kvpool_client_lookup_miss_tokens_total", reason="never-stored") == 0, "a rate exists at once"
    client = client_of(node)
    names = [block_id(n) for n in range(4)]
    if present:
        client.put_from(names[:present], [payload(n) for n in range(present)], time.monotonic() + 30)
    for _ in range(3):
        client.lookup(names, time.monotonic() + 10)
    client.close()
    cache = node.status()["cache"]
    asked, found = 3 * 4 * TOKENS, 3 * present * TOKENS
    for figures in (cache, *cache["windows"], cache["models"][0], *cache["models"][0]["windows"]):
        assert (figures["tokensAsked"], figures["tokensFound"], figures["hitRate"]) == (asked, found, rate)
        assert sum(figures["misses"].values()) == asked - found
    assert [w["window"] for w in cache["windows"]] == ["5m", "1h"]
    assert [m["model"] for m in cache["models"]] == ["Llama"]
    assert cache["loadSuccessRate"] == "", "nothing was loaded"
    assert metric(node, "kvpool_client_lookup_tokens_total", model="Llama") == asked
    assert metric(node, "kvpool_client_lookup_hit_tokens_total", model="Llama") == found
    broken = sum(
        s.value
        for f in text_string_to_metric_families(node.get("/metrics").decode())
        for s in f.samples
        if s.name == "kvpool_client_broken_lookups_total"
    )
    assert broken == (0 if present == 4 else 3)


def test_the_engines_tokens_per_block_win_over_the_pools(node):
    client = client_of(node, tokens_per_block=16)
    client.lookup([block_id(n) for n in range(4)], time.monotonic() + 10)
    client.close()
    assert node.status()["cache"]["tokensAsked"] == 4 * 16


def test_lookups_of_a_client_that_does_not_report_them_are_counted_here(node):
    with node.connect() as raw:
        raw.put({block_id(n): payload(n) for n in range(2)})
        raw.lookup([block_id(n) for n in range(8)])
    cache = node.status()["cache"]
    assert (cache["tokensAsked"], cache["tokensFound"], cache["hitRate"]) == (8 * TOKENS, 2 * TOKENS, "0.25")
    assert metric(node, "kvpool_client_broken_lookups_total", depth="below-4") == 1


def test_time_saved_is_what_loads_saved_less_what_they_cost(node):
    assert metric(node, "kvpool_client_saved_seconds_total") == 0
    with node.connect() as raw:
        for saved, lost in ((5_000_000, 0), (0, 7_500_000)):
            figures = {"saved_us": saved, "lost_us": lost, "computed_tokens": 100, "computed_us": 500_000}
            raw.ask(wire.Op.REPORT, wire.pack_json({"time": figures}))
    assert node.status()["cache"]["secondsSaved"] == -3, "it may become negative"
    assert metric(node, "kvpool_client_saved_seconds_total") == 5
    assert metric(node, "kvpool_client_lost_seconds_total") == 7.5
    assert metric(node, "kvpool_client_computed_tokens_total") == 200
    assert metric(node, "kvpool_client_computed_seconds_total") == 1


def test_a_failed_load_lowers_the_success_rate_and_not_the_hit_rate(node):
    client = client_of(node)
    names = [block_id(n) for n in range(4)]
    client.put_from(names[:1], [payload(0)], time.monotonic() + 30)
    client.lookup(names[:1], time.monotonic() + 10)
    client.get_into(names, [bytearray(64 * 1024) for _ in names], time.monotonic() + 30)
    client.close()
    cache = node.status()["cache"]
    assert cache["hitRate"] == "1.00"
    assert cache["loadSuccessRate"] == "0.25"


@pytest.mark.parametrize(
    "report",
    [
        {"lookup": {"requests": 1, "asked_blocks": 1, "found_blocks": 2}},
        {"lookup": {"requests": 1, "asked_blocks": -1}},
        {"lookup": [1]},
        {"lookup_misses": {f"reason {n}": 1 for n in range(64)}},
        {"lookup_depth": "deep"},
    ],
    ids=["more found than asked", "negative", "a list", "too many reasons", "a text"],
)
def test_a_report_that_makes_no_sense_ends_the_connection(node, report):
    with node.connect() as raw:
        raw.send(wire.pack(wire.Op.REPORT, wire.pack_json(report), request=9))
        head, _, _ = raw.receive()
        assert head.op == wire.Op.ERROR | wire.REPLY
    assert node.status()["cache"]["hitRate"] == ""


def test_a_node_with_metrics_per_tenant_reports_the_tokens_of_each(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        env = {"KVPOOL_METRICS_PER_TENANT": "true"}
        node = cluster.node("a", env=env, cache=CacheConfig(block_tokens=TOKENS))
        client = client_of(node)
        client.lookup([block_id(n) for n in range(4)], time.monotonic() + 10)
        client.close()
        (row,) = node.status()["cache"]["tenants"]
    assert len(bytes.fromhex(row.pop("tenant"))) == 16
    assert row == {"model": "Llama", "tokensAsked": 4 * TOKENS, "tokensFound": 0}
