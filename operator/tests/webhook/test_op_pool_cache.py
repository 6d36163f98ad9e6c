"""The choice of a pool, and the cached view it is made from."""

import asyncio

import pytest

from kvpool.config import CacheConfig, Deadlines
from kvpool_operator.injection.annotations import InjectionRequest
from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.selectors import matches
from kvpool_operator.webhook.pool_cache import PoolCache


def a_pool(namespace="kvpool-system", name="chat", **injection):
    tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}]
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"tiers": tiers, "injection": {"allowedNamespaces": {"from": "All"}} | injection},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def admits(kind, selector=None):
    return {"from": kind} | ({"selector": selector} if selector is not None else {})


class Cluster:
    """What the view reads, counted."""

    def __init__(self, *pools, labels=None, annotations=None):
        self.pools = list(pools)
        self.labels = labels or {}
        self.annotations = annotations or {}
        self.listed = 0
        self.fails = False

    async def list_pools(self):
        self.listed += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError("no API server")
        return self.pools

    async def read_namespace(self, name):
        return NamespaceView(self.labels.get(name, {}), self.annotations.get(name, {}))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


async def until(holds):
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


async def resolve(cluster, namespace, name="", pool_namespace=""):
    cache = PoolCache(cluster)
    return (await cache.resolve(InjectionRequest(pool_namespace=pool_namespace, pool_name=name), namespace)).key


async def refused(cluster, namespace, name="", pool_namespace=""):
    with pytest.raises(Skip) as e:
        await resolve(cluster, namespace, name, pool_namespace)
    return e.value.reason


async def test_a_full_name_is_that_pool():
    cluster = Cluster(a_pool(), a_pool("other"))
    assert await resolve(cluster, "team-a", "chat", "other") == "other/chat"
    assert await refused(cluster, "team-a", "chat", "third") is SkipReason.POOL_NOT_FOUND


async def test_a_bare_name_is_the_pods_own_namespaces_first():
    cluster = Cluster(a_pool(), a_pool("team-a"))
    assert await resolve(cluster, "team-a", "chat") == "team-a/chat"


async def test_a_bare_name_is_else_the_only_one_that_admits_the_pod():
    one = a_pool("one", allowedNamespaces=admits("Same"))
    two = a_pool("two")
    assert await resolve(Cluster(one, two), "team-a", "chat") == "two/chat"
    assert await refused(Cluster(a_pool("one"), two), "team-a", "chat") is SkipReason.POOL_AMBIGUOUS
    assert await refused(Cluster(one), "team-a", "chat") is SkipReason.NAMESPACE_NOT_ALLOWED
    assert await refused(Cluster(one), "team-a", "batch") is SkipReason.POOL_NOT_FOUND


async def test_without_a_name_the_only_pool_that_admits_is_taken():
    assert await resolve(Cluster(a_pool(name="only")), "team-a") == "kvpool-system/only"
    assert await refused(Cluster(a_pool(name="a"), a_pool(name="b")), "team-a") is SkipReason.POOL_AMBIGUOUS
    assert await refused(Cluster(), "team-a") is SkipReason.POOL_NOT_FOUND


async def test_same_admits_only_the_pools_namespace():
    cluster = Cluster(a_pool(allowedNamespaces=admits("Same")))
    assert await resolve(cluster, "kvpool-system", "chat") == "kvpool-system/chat"
    assert await refused(cluster, "team-a", "chat") is SkipReason.NAMESPACE_NOT_ALLOWED


async def test_a_selector_reads_the_namespaces_labels():
    cluster = Cluster(
        a_pool(allowedNamespaces=admits("Selector", {"matchLabels": {"pool": "chat"}})),
        labels={"team-a": {"pool": "chat"}, "team-b": {"pool": "batch"}},
    )
    assert await resolve(cluster, "team-a", "chat") == "kvpool-system/chat"
    assert await refused(cluster, "team-b", "chat") is SkipReason.NAMESPACE_NOT_ALLOWED
    assert await refused(cluster, "team-c", "chat") is SkipReason.NAMESPACE_NOT_ALLOWED


async def test_injection_can_be_switched_off():
    assert await refused(Cluster(a_pool(enabled=False)), "team-a", "chat") is SkipReason.INJECTION_DISABLED


async def test_a_pool_that_cannot_be_read_does_not_hide_the_others(caplog):
    broken = a_pool(name="broken")
    broken["spec"]["cache"] = {"blockTokens": "many"}
    assert await resolve(Cluster(broken, a_pool()), "team-a", "chat") == "kvpool-system/chat"
    assert "kvpool-system/broken" in caplog.text


async def test_a_pool_made_just_before_its_pod_is_found():
    clock, cluster = Clock(), Cluster()
    cache = PoolCache(cluster, clock=clock)
    await cache.refresh()
    clock.now += 2
    cluster.pools.append(a_pool())
    assert (await cache.resolve(InjectionRequest(pool_name="chat"), "team-a")).key == "kvpool-system/chat"


async def test_missing_pools_do_not_make_every_pod_list_them():
    clock, cluster = Clock(), Cluster()
    cache = PoolCache(cluster, clock=clock)
    for _ in range(100):
        clock.now += 0.001
        with pytest.raises(Skip):
            await cache.resolve(InjectionRequest(pool_name="chat"), "team-a")
    assert cluster.listed <= 2


async def test_requests_that_wait_share_one_listing():
    cluster = Cluster()
    cache = PoolCache(cluster)
    await asyncio.gather(*(cache.refresh() for _ in range(20)))
    assert cluster.listed <= 2


async def test_the_last_view_outlives_the_api_server():
    clock, cluster = Clock(), Cluster(a_pool())
    cache = PoolCache(cluster, clock=clock)
    await cache.refresh()
    cluster.fails = True
    clock.now += 3600
    with pytest.raises(ConnectionError):
        await cache.refresh()
    assert cache.synced
    assert cache.age_s == 3600
    assert (await cache.resolve(InjectionRequest(pool_name="chat"), "team-a")).ready


async def test_the_loop_survives_failures(caplog):
    cluster = Cluster(a_pool())
    cluster.fails = True
    cache = PoolCache(cluster, refresh_s=0.001)
    task = asyncio.create_task(cache.run())
    await until(lambda: cluster.listed >= 3)
    assert not cache.synced
    cluster.fails = False
    await until(lambda: cache.synced)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(cache) == 1
    assert "cannot list the pools" in caplog.text


def expression(operator, *values):
    return {"matchExpressions": [{"key": "a", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "labels", "fits"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchLabels": {"a": "1"}}, {}, False),
        (expression("In", "1", "2"), {"a": "2"}, True),
        (expression("In", "1"), {}, False),
        (expression("NotIn", "1"), {"a": "1"}, False),
        (expression("NotIn", "1"), {}, True),
        (expression("Exists"), {"a": ""}, True),
        (expression("Exists"), {}, False),
        (expression("DoesNotExist"), {"a": ""}, False),
        (expression("DoesNotExist"), {}, True),
        (expression("Like", "1"), {"a": "1"}, False),
    ],
)
def test_selectors(selector, labels, fits):
    assert matches(selector, labels) is fits


async def test_a_clients_deadlines_are_left_to_the_sidecar_and_the_breaker_is_the_pools():
    pool = a_pool()
    pool["spec"]["failOpen"] = {
        "lookupDeadline": "30ms",
        "loadDeadline": "1s500ms",
        "expectedBandwidth": "2G",
        "storeDeadline": "1m",
        "breaker": {"failures": 3, "cooldown": "4s"},
    }
    view = await PoolCache(Cluster(pool)).resolve(InjectionRequest(pool_name="chat"), "team-a")
    assert view.client.deadlines == Deadlines(breaker_failures=3, breaker_cooldown_ms=4000)


async def test_without_a_word_the_clients_defaults_hold():
    view = await PoolCache(Cluster(a_pool())).resolve(InjectionRequest(pool_name="chat"), "team-a")
    assert view.client.deadlines == Deadlines()
    assert view.block_tokens == CacheConfig().block_tokens
