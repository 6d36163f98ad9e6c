"""Why a block was not found: the cause of the first missing one, from the sidecar through the client to the metrics."""

from __future__ import annotations

import dataclasses
import hashlib
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sc_nodes import MIB, PEER_PORT, Cluster, fresh_address, wait_for
from sc_raw import FINGERPRINT, SECRET, block_id, payload

from kvpool.client import Client
from kvpool.config import CacheConfig, ClientConfig, LocalTier, TenantConfig
from kvpool.protocol import keys, wire
from kvpool.stats import Reason
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.miss_causes import age_label
from kvpool_sidecar.storage.removed_blocks import REMOVAL_CAUSES, RemovedBlocks
from kvpool_sidecar.tenancy.identity import Tenant

SIZE = 64 * 1024


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


def test_a_removal_is_known_with_its_cause_and_age():
    now = [5000.0]
    removed = RemovedBlocks(lambda: now[0])
    for n, cause in enumerate(REMOVAL_CAUSES):
        removed.record([key(n)], cause)
    now[0] += 600
    for n, cause in enumerate(REMOVAL_CAUSES):
        found = removed.find(key(n))
        assert found is not None
        assert found.cause == cause
        assert 592 <= found.age_s <= 608
    assert removed.find(key(99)) is None
    removed.record([key(98)], "")
    assert removed.find(key(98)) is None, "it vanished, for no known cause"
    removed.record([key(0)], "purged")
    assert removed.find(key(0)) == ("purged", 0), "the last removal counts"


def test_the_record_of_removals_is_bounded_and_keeps_the_latest():
    removed = RemovedBlocks(lambda: 0.0)
    size = removed._entries.buffer_info()[1] * removed._entries.itemsize
    removed.record([key(n) for n in range(300_000)], "capacity")
    assert removed._entries.buffer_info()[1] * removed._entries.itemsize == size == 1 << 20
    known = sum(removed.find(key(n)) is not None for n in range(300_000))
    assert 100_000 < known <= 131_072
    assert sum(removed.find(key(n)) is not None for n in range(300_000, 400_000)) <= 1


def test_ages_have_ranges():
    labels = [age_label(s) for s in (0, 59, 60, 3599, 3600, 86_399, 86_400)]
    assert labels == ["minute", "minute", "ten-minutes", "hour", "six-hours", "day", "older"]


@pytest.fixture
def client_of():
    made = []

    def make(node, tenant="team-a", fingerprint=FINGERPRINT, model="llama"):
        client = Client(
            ClientConfig(socket=str(node.sockets[tenant])), fingerprint=fingerprint, labels={"model": model}
        )
        made.append(client)
        wait_for(lambda: client.connected, "connected")
        return client

    yield make
    for client in made:
        client.close()


def reason_of(client, number: int) -> Reason:
    return client.find([block_id(number)], time.monotonic() + 10).reason


def load_reason(client, number: int) -> Reason:
    return client.get_into([block_id(number)], [bytearray(SIZE)], time.monotonic() + 10)[0].reason


def metric(node, name, **labels):
    found = text_string_to_metric_families(node.get("/metrics").decode())
    return sum(s.value for f in found for s in f.samples if s.name == name and s.labels == labels)


def small_node(cluster, tmp_path, **changes):
    tier = LocalTier("nvme", str(tmp_path / "a" / "nvme"), 8 * MIB, reserve_free_percent=0)
    return cluster.node("a", local=(tier,), **changes)


def test_evicted_and_never_stored_are_told_apart_from_the_sidecar_to_the_metrics(tmp_path, client_of):
    with Cluster(tmp_path, index=False) as c:
        a = small_node(c, tmp_path)
        client = client_of(a)
        for n in range(200):
            client.put_from([block_id(n)], [payload(n)], time.monotonic() + 30)
        wait_for(lambda: metric(a, "kvpool_sidecar_evicted_blocks_total", cause="capacity") > 0, "capacity evicts")
        assert reason_of(client, 0) == Reason.EVICTED_CAPACITY
        assert load_reason(client, 0) == Reason.EVICTED_CAPACITY
        assert reason_of(client, 999) == Reason.NEVER_STORED
        assert load_reason(client, 999) == Reason.NEVER_STORED
        client.lookup([block_id(199), block_id(0), block_id(999)], time.monotonic() + 10)
        client.lookup([block_id(999), block_id(0)], time.monotonic() + 10)
        client.report()
        assert client.stats()["lookup_misses"] == {"evicted-capacity": 2, "never-stored": 2}
        tokens = a.pool.cache.block_tokens
        assert a.status()["cache"]["misses"] == {"evicted-capacity": 2 * tokens, "never-stored": 2 * tokens}
        assert metric(a, "kvpool_client_lookup_miss_tokens_total", reason="evicted-capacity") == 2 * tokens
        assert metric(a, "kvpool_client_misses_total", reason="evicted-capacity") == 1
        assert metric(a, "kvpool_sidecar_removed_miss_lookups_total", age="minute") >= 2


def test_a_client_of_an_earlier_release_gets_plain_tiers_and_its_misses_have_causes(tmp_path):
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a")
        with a.connect() as raw:
            raw.put({block_id(1): payload(1)})
            assert raw.lookup([block_id(1), block_id(2), block_id(3)]) == [1, 0, 0]
        assert a.status()["cache"]["misses"] == {"never-stored": 2 * a.pool.cache.block_tokens}


def test_a_quota_and_a_corrupt_block_are_causes(tmp_path, client_of):
    with Cluster(tmp_path, index=False) as c:
        a = small_node(c, tmp_path, cache=CacheConfig(tenant_quota_bytes=4 * MIB))
        client = client_of(a)
        for n in range(80):
            client.put_from([block_id(n)], [payload(n)], time.monotonic() + 30)
        wait_for(lambda: reason_of(client, 0) == Reason.EVICTED_QUOTA, "a quota evicts")
        name = Tenant(SECRET, "team-a").block_key(block_id(79)).hex()
        file = next(f for f in a.files() if f.name == name)
        file.chmod(0o600)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert load_reason(client, 79) == Reason.CORRUPT
        client.report()
        wait_for(lambda: reason_of(client, 79) == Reason.QUARANTINED, "it is in quarantine")


def test_blocks_of_the_model_under_another_fingerprint_are_a_cause_within_a_tenant_only(tmp_path, client_of):
    other = keys.fingerprint({"model": "another version"})
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a")
        client_of(a, fingerprint=other).put_from([block_id(1)], [payload(1)], time.monotonic() + 30)
        assert reason_of(client_of(a), 2) == Reason.FINGERPRINT_DIFFERS
        assert reason_of(client_of(a, model="mistral"), 2) == Reason.NEVER_STORED
        foreign = client_of(a, "team-b")
        for n in (1, 2):
            assert reason_of(foreign, n) == Reason.NEVER_STORED, "whether another tenant has blocks is not disclosed"
            assert load_reason(foreign, n) == Reason.NEVER_STORED


def test_a_fingerprint_that_has_found_blocks_is_not_the_cause():
    known = Fingerprints()
    old, new = (wire.ClientHello(bytes([n]) * 32, "vllm", "llama") for n in (1, 2))
    known.stored(old, 100, b"tenant")
    assert known.has_only_others(new, b"tenant")
    assert not known.has_only_others(old, b"tenant")
    known.found(new)
    assert not known.has_only_others(new, b"tenant")


def test_a_grant_that_an_old_client_cannot_use_is_a_cause(tmp_path):
    granted = (
        TenantConfig("base", "kvt:base:1", ("base",)),
        TenantConfig("reader", "kvt:reader:2", ("reader",), reads_from=("kvt:base:1",)),
    )
    with Cluster(tmp_path, index=False) as c:
        a = c.node("a", tenants=("base", "reader"))
        a.pool = dataclasses.replace(a.pool, generation=a.pool.generation + 1, tenants=granted)
        a.write_config()
        wait_for(lambda: a.status()["config"]["generation"] == a.pool.generation, "the grant is in force")
        with a.connect("base") as raw:
            raw.put({block_id(1): payload(1)})
        with a.connect("reader") as old:
            assert old.lookup([block_id(1)]) == [0]
        wait_for(lambda: list(a.status()["cache"]["misses"]) == ["grant-unused"], "counted after the reply")


def test_only_peers_that_cannot_be_reached_have_it(tmp_path, client_of):
    with Cluster(tmp_path) as c:
        b = c.node("b")
        index = RedisIndex(
            c.index_url, credentials=IndexCredentials("kvpool", Passwords(lambda: ("index password",))), lease_s=120
        )
        number = index.join(NodeInfo("ghost", fresh_address(), PEER_PORT, 7))
        index.announce([(Tenant(SECRET, "team-a").block_key(block_id(1)), Record(number, SIZE, 7))])
        client = client_of(b)
        wait_for(lambda: load_reason(client, 1) == Reason.PEER_UNREACHABLE, "the peer cannot be reached", timeout=60)
        wait_for(lambda: reason_of(client, 1) == Reason.PEER_UNREACHABLE, "nor is it promised", timeout=60)
        index.close()


def test_an_index_that_does_not_respond_is_a_cause(tmp_path, client_of):
    with Cluster(tmp_path) as c:
        client = client_of(c.node("a"))
        assert reason_of(client, 1) == Reason.NEVER_STORED
        c.index.kill()
        wait_for(lambda: reason_of(client, 1) == Reason.INDEX_UNAVAILABLE, "the index is away", timeout=60)
