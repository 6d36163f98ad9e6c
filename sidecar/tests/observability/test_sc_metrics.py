"""/metrics of real sidecars: what it tells is what happened, what the reference says, and nothing about tenants."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sc_nodes import MIB, Cluster, wait_for
from sc_raw import GoneError, block_id, payload

from kvpool.client import Client
from kvpool.config import CacheConfig, ClientConfig, LocalTier
from kvpool.protocol import wire
from kvpool.stats import STORE, Histogram
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.observability.metrics import reference

FINGERPRINT = bytes(range(32))


def families(node):
    return {f.name: f for f in text_string_to_metric_families(node.get("/metrics").decode())}


def value(node, name, **labels):
    found = [s.value for f in families(node).values() for s in f.samples if s.name == name and s.labels == labels]
    return found[0] if found else 0


@pytest.fixture
def client_of():
    made = []

    def make(node, tenant="team-a"):
        client = Client(ClientConfig(socket=str(node.sockets[tenant])), fingerprint=FINGERPRINT)
        made.append(client)
        wait_for(lambda: client.connected, "connected")
        return client

    yield make
    for client in made:
        client.close()


def test_loads_and_stores_of_a_client_are_timed_by_tier(tmp_path, client_of):
    with Cluster(tmp_path) as c:
        a, b = c.node("a"), c.node("b")
        block_ids = [block_id(n) for n in range(3)]
        writer = client_of(a)
        assert all(r.stored for r in writer.put_from(block_ids, [payload(n) for n in range(3)], time.monotonic() + 30))
        a.wait_announced()
        reader, buffers = client_of(b), [bytearray(64 * 1024) for _ in range(3)]
        there = [wire.Tier.PEER] * 3
        wait_for(lambda: reader.lookup(block_ids, time.monotonic() + 5) == there, "b knows that a has them")
        assert [r.tier for r in reader.get_into(block_ids, buffers, time.monotonic() + 30)] == there
        assert [r.ok for r in writer.get_into(block_ids, buffers, time.monotonic() + 30)] == [True] * 3
        assert [r.ok for r in writer.get_into([block_id(9)], buffers[:1])] == [False]
        reader.count_tokens({"peer": 3 * 256})
        writer.report()
        reader.report()
        assert value(a, "kvpool_client_load_seconds_count", tier="local") == 1, "a batch is one load"
        assert value(a, "kvpool_client_store_seconds_count") == 1
        assert value(b, "kvpool_client_load_seconds_count", tier="peer") == 1
        assert 0 < value(b, "kvpool_client_load_seconds_sum", tier="peer") < 60
        assert value(b, "kvpool_client_tokens_total", tier="peer") == 3 * 256
        reader.report()  # nothing has grown
        assert value(b, "kvpool_client_load_seconds_count", tier="peer") == 1
        for op in ("hello", "lookup", "open", "report"):
            counted = value(b, "kvpool_sidecar_requests_total", op=op)
            assert value(b, "kvpool_sidecar_request_seconds_count", op=op) == counted
        assert value(b, "kvpool_sidecar_request_seconds_count", op="open") >= 1


def test_what_is_told_is_what_the_reference_says(tmp_path):
    with Cluster(tmp_path, shared=True) as c:
        a = c.node("a")
        with a.connect() as raw:
            raw.put({block_id(1): payload(1)})
        reported = {(f"{n}_total" if f.type == "counter" else n): f for n, f in families(a).items()}
        wanted = {name: (kind, text) for name, kind, _, text in reference() if not name.startswith("kvpool_events_")}
        events = {name for name in reported if name.startswith("kvpool_events_")}
        assert reported.keys() - events == wanted.keys()
        assert {name: (reported[name].type, reported[name].documentation) for name in wanted} == wanted
        labels = {name: {label} - {""} for name, _, label, _ in reference()}
        for name, family in reported.items():
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == labels[name], sample
        assert value(a, "kvpool_sidecar_breaker_open", part="index") == 0
        assert {s.labels["part"] for s in reported["kvpool_sidecar_breaker_open"].samples} == {"index", "shared"}


def test_evictions_are_told_by_their_cause(tmp_path):
    tier = LocalTier("nvme", str(tmp_path / "a" / "nvme"), 8 * MIB, reserve_free_percent=0)
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a", local=(tier,), cache=CacheConfig(tenant_quota_bytes=4 * MIB))
        with a.connect("team-a") as raw:
            for n in range(80):
                raw.put({block_id(n): payload(n)})
        by_quota = value(a, "kvpool_sidecar_evicted_blocks_total", cause="quota")
        assert by_quota > 0
        for tenant in ("team-b", "team-a"):
            with a.connect(tenant) as raw:
                for n in range(100, 164):
                    raw.put({block_id(n): payload(n)})
        wait_for(lambda: value(a, "kvpool_sidecar_evicted_blocks_total", cause="capacity"), "capacity made blocks go")
        causes = [s for s in families(a)["kvpool_sidecar_evicted_blocks"].samples if s.name.endswith("_total")]
        # one look: counts grow while it is compared with another
        assert {s.labels["cause"] for s in causes if s.value} <= {"quota", "capacity"}
        evicted = "kvpool_sidecar_drive_events_total"
        wait_for(
            lambda: (
                value(a, evicted, event="evicted")
                == sum(value(a, "kvpool_sidecar_evicted_blocks_total", cause=cause) for cause in ("quota", "capacity"))
            ),
            "every eviction has one cause",
        )


def test_times_of_clients_add_up():
    stats, one = Stats(), Histogram()
    for seconds in (0.0001, 0.0005, 0.3, 60.0):
        one.observe(seconds)
    stats.observe_packed("client_seconds", "local", one.packed)
    stats.observe_packed("client_seconds", "local", one.packed)
    packed = stats.histograms("client_seconds")["local"]
    assert packed[0] == 4, "a bound belongs to its bucket"
    assert packed[-2] == 2
    assert sum(packed[:-1]) == 8
    assert packed[-1] == 2 * 60_300_600
    assert STORE not in {tier.name.lower() for tier in wire.Tier}


def test_secrets_are_in_no_log_metric_status_or_argument(tmp_path):
    """Known values in every place where secrets are kept, while things work and while they fail."""
    canaries = {"pool-secret": secrets.token_hex(32), "index-password": secrets.token_hex(16)}
    with Cluster(tmp_path, shared=True) as c:
        c.index.kill()
        for name, canary in canaries.items():
            (c.secret / name).write_text(canary)
        c.run(c.index)
        a, b = c.node("a", tenants=("tenant-c4n4ry",)), c.node("b", tenants=("tenant-c4n4ry",))
        with a.connect("tenant-c4n4ry") as raw:
            raw.put({block_id(n): payload(n) for n in range(3)})
        a.wait_announced()
        (c.secret / "index-password").write_text("another password")  # what a restart would use
        c.index.kill()
        with b.connect("tenant-c4n4ry") as raw:
            raw.get([block_id(0), block_id(7)])
            raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(1).hex()]}))
            with pytest.raises((GoneError, AssertionError, OSError)):
                raw.ask(wire.Op.REPORT, b"{")
        wait_for(lambda: b"broke the protocol" in b.log.read_bytes(), "a failure is in the log")
        wait_for(lambda: not b.status()["index"]["connected"], "the index is missed")
        reported = {"status": b.get("/status") + a.get("/status"), "metrics": b.get("/metrics") + a.get("/metrics")}
        reported["arguments"] = b"".join(Path(f"/proc/{n.process.pid}/cmdline").read_bytes() for n in (a, b))
        reported["environment"] = b"".join(Path(f"/proc/{n.process.pid}/environ").read_bytes() for n in (a, b))
        reported["log"] = b"".join(n.log.read_bytes() for n in (a, b)) + c.index.log.read_bytes()
        for where, text in reported.items():
            for name, canary in canaries.items():
                assert canary.encode() not in text, f"{name} is in {where}"
            if where in ("status", "metrics"):
                assert b"tenant-c4n4ry" not in text, f"a tenant is named in {where}"


def test_status_lists_connected_pods_and_the_time_since_the_start(tmp_path, client_of):
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a")
        assert a.status()["connected_pods"] == []
        client = client_of(a)
        wait_for(lambda: a.status()["connected_pods"], "the pod's engine is connected")
        assert 0 <= a.status()["uptime_seconds"] < 600
        client.close()
        wait_for(lambda: a.status()["connected_pods"] == [], "the pod's engine has left")
