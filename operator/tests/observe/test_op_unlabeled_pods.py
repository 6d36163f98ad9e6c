"""Engine pods without the label that a namespace or a pool selects, as the operator finds and counts them."""

from __future__ import annotations

from typing import Any

from op_samples import MemoryCluster, MemoryLister

from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.engine_pods import count
from kvpool_operator.observe.unlabeled_pods import AllEnginePods, UnlabeledPods
from kvpool_operator.pools.injection_watchdog import pod_event

ENABLED = {"kvpool.dev/inject": "enabled"}
VLLM = ["vllm", "serve", "m"]


class Cluster(MemoryCluster):
    """Remembers what was listed; the selectors are the API server's."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: set[tuple[str, str]] = set()

    async def list(self, kind: str, *, namespace: str = "", labels: str = "", **_: Any) -> list[dict[str, Any]]:
        if kind == "Pod":
            self.queries.add((namespace, labels))
        found = [o for r, o in sorted(self.objects.items()) if r.kind == kind and namespace in ("", r.namespace)]
        return [o for o in found if "kvpool.dev/inject" not in (o["metadata"].get("labels") or {})]


class World:
    def __init__(self, *watched: str) -> None:
        self.cluster = Cluster()
        self.unlabeled = UnlabeledPods(self.cluster, MemoryLister(self.cluster, "Namespace"), watched)
        labeled = MemoryLister(self.cluster, "Pod", {"kvpool.dev/inject": "true"})
        self.pods = AllEnginePods(labeled, self.unlabeled)

    def namespace(self, name: str, labels: dict[str, str] | None = None, **annotations: str) -> None:
        notes = {f"kvpool.dev/{k}": v for k, v in annotations.items()}
        self.cluster.objects[ObjectRef("Namespace", "", name)] = {
            "metadata": {"name": name, "labels": labels or {}, "annotations": notes}
        }

    def pool(self, name: str, **injection: Any) -> None:
        tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}]
        self.cluster.objects[ObjectRef("KVCachePool", "kvpool-system", name)] = {
            "metadata": {"name": name, "namespace": "kvpool-system"},
            "spec": {"tiers": tiers, "injection": injection},
        }

    def pod(self, namespace: str, name: str, command: list[str], labels: dict[str, str] | None = None) -> None:
        self.cluster.objects[ObjectRef("Pod", namespace, name)] = {
            "metadata": {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}", "labels": labels or {}},
            "spec": {"containers": [{"name": "c", "image": "i", "command": command}]},
            "status": {"phase": "Running"},
        }

    async def missed(self, pool: str) -> list[str]:
        await self.unlabeled.refresh()
        counted = count(self.pods.list(), "kvpool-system", pool, "", {})
        assert counted.not_injected == len([p for p in counted.pods if p.state == "not_injected"])
        return [p.full_name for p in counted.pods if p.state == "not_injected"]


async def test_engines_of_a_namespace_with_the_label_count_for_its_pool():
    world = World()
    world.namespace("team", ENABLED, pool="batch")
    world.namespace("other")
    world.pool("chat")
    world.pool("batch")
    for namespace in ("team", "other"):
        world.pod(namespace, "engine", VLLM)
        world.pod(namespace, "redis", ["redis-server"])
    assert await world.missed("batch") == ["team/engine"]
    assert await world.missed("chat") == []
    assert world.cluster.queries == {("team", "kvpool.dev/inject notin (true,disabled,false)")}


async def test_pods_that_a_pool_selects_are_listed_by_its_selector_in_its_namespaces():
    world = World()
    world.namespace("kvpool-system")
    world.namespace("team", {"team": "a"})
    world.namespace("closed", {"team": "a", "kvpool.dev/inject": "disabled"})
    world.namespace("other")
    selector = {
        "matchLabels": {"app": "llm"},
        "matchExpressions": [{"key": "x", "operator": "In", "values": ["1", "2"]}],
    }
    teams = {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}
    world.pool("chat", selector=selector, allowedNamespaces=teams)
    for namespace in ("team", "closed", "other"):
        world.pod(namespace, "engine", VLLM, {"app": "llm", "x": "2"})
    assert await world.missed("chat") == ["team/engine"]
    labels = "app=llm,x in (1,2),kvpool.dev/inject notin (true,disabled,false)"
    assert world.cluster.queries == {("kvpool-system", labels), ("team", labels)}


async def test_a_pod_that_two_pools_select_counts_for_none():
    world = World()
    world.namespace("kvpool-system")
    for name in ("chat", "batch"):
        world.pool(name, selector={"matchLabels": {"app": "llm"}}, allowedNamespaces={"from": "Same"})
    world.pod("kvpool-system", "engine", VLLM, {"app": "llm"})
    assert await world.missed("chat") == await world.missed("batch") == []


async def test_nothing_is_listed_without_a_selection_or_outside_of_the_operators_namespaces():
    world = World()
    world.namespace("team")
    world.pool("chat")
    await world.missed("chat")
    assert world.cluster.queries == set()
    limited = World("mine")
    limited.namespace("team", ENABLED)
    limited.namespace("mine", ENABLED)
    limited.pool("chat")
    await limited.missed("chat")
    assert {namespace for namespace, _ in limited.cluster.queries} == {"mine"}


async def test_labeled_pods_are_counted_as_before():
    world = World()
    world.namespace("team", ENABLED)
    world.pool("chat")
    world.pod("team", "new", VLLM)
    world.pod("team", "labeled", VLLM, {"kvpool.dev/inject": "true"})
    labeled = world.cluster.objects[ObjectRef("Pod", "team", "labeled")]
    labeled["metadata"]["annotations"] = {"kvpool.dev/pool": "kvpool-system/chat"}
    assert await world.missed("chat") == ["team/labeled", "team/new"]


async def test_the_event_of_such_a_pod_does_not_blame_the_webhook_alone():
    world = World()
    world.namespace("team", ENABLED)
    world.pool("chat")
    world.pod("team", "engine", VLLM)
    await world.unlabeled.refresh()
    (pod,) = count(world.pods.list(), "kvpool-system", "chat", "", {}).pods
    event = pod_event(pod, "kvpool-system/chat")
    assert event is not None
    assert "before its namespace selected it, or while the injection webhook was unavailable" in event.message
