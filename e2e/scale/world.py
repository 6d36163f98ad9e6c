"""A cluster of many: nodes and pods that kwok plays, pools, and engine pods that use them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from api import APPLY, MERGE, POOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from api import Api

GROUP = "scale.kvpool.dev/group"
POD_NETWORK = "10.64.0.0/14"
AT_ONCE = 8


@dataclass(frozen=True)
class World:
    """`pools` pools in `namespaces` namespaces; each runs on `per_pool` of the `nodes` nodes and has one engine pod."""

    pools: int
    nodes: int
    per_pool: int
    namespaces: int = 25

    @property
    def groups(self) -> int:
        return max(1, self.nodes // self.per_pool)

    @property
    def pods(self) -> int:
        """Sidecars, indexes, engines."""
        return self.pools * (self.per_pool + 2)

    def place(self, number: int) -> tuple[str, str]:
        """Namespace and name of a pool."""
        return f"team-{number % self.namespaces:02d}", f"pool-{number:03d}"

    def spec(self, number: int, patience_s: int) -> dict[str, Any]:
        """`patience_s` is what changes: the sidecars need not restart for it."""
        tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{number:03d}", "capacity": "8Gi"}}]
        return {
            "tiers": tiers,
            "nodes": {"selector": {"matchLabels": {GROUP: f"g{number % self.groups:03d}"}}},
            "preflight": "Skip",  # a look at the nodes would make as many pods once more
            "cleanupTimeout": f"{patience_s}s",
        }


def everywhere(work: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Some at a time; the first error is raised."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [threads.submit(work, n) for n in numbers]:
            done.result()


def make_nodes(api: Api, world: World) -> None:
    """kwok gives them a kubelet: they become ready, and what is bound to them runs."""

    def node(n: int) -> None:
        labels = {GROUP: f"g{n % world.groups:03d}", "kubernetes.io/os": "linux", "type": "kwok"}
        api.call("POST", "/api/v1/nodes", {"metadata": {"name": f"node-{n:03d}", "labels": labels}})
        # no controller takes the taint of a new node away here
        api.call("PATCH", f"/api/v1/nodes/node-{n:03d}", {"spec": {"taints": None}}, MERGE)

    everywhere(node, range(world.nodes))


def make_namespaces(api: Api, world: World) -> None:
    everywhere(
        lambda n: api.call("POST", "/api/v1/namespaces", {"metadata": {"name": f"team-{n:02d}"}}),
        range(world.namespaces),
    )


def apply_pool(api: Api, world: World, number: int, patience_s: int = 300) -> int:
    """Its generation afterwards."""
    ns, name = world.place(number)
    manifest = {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "namespace": ns},
        "spec": world.spec(number, patience_s),
    }
    made = api.call("PATCH", f"{POOLS}/namespaces/{ns}/kvcachepools/{name}?fieldManager=user", manifest, APPLY)
    generation: int = made["metadata"]["generation"]
    return generation


def make_engine(api: Api, world: World, number: int, life: int = 0) -> None:
    """A pod that says it was injected, as the webhook writes it."""
    ns, name = world.place(number)
    notes = {"kvpool.dev/pool": f"{ns}/{name}", "kvpool.dev/injected": "0" * 16, "kvpool.dev/injected-engine": "vllm"}
    pod = {
        "metadata": {
            "name": f"engine-{number:03d}-{life}",
            "labels": {"kvpool.dev/inject": "true", "app": "engine"},
            "annotations": notes,
        },
        "spec": {
            "nodeName": f"node-{number % world.nodes:03d}",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "engine", "image": "engine:test"}],
        },
    }
    api.call("POST", f"/api/v1/namespaces/{ns}/pods", pod)


def replace_engine(api: Api, world: World, number: int, life: int) -> None:
    """The pool's engine pods go, a new one comes."""
    ns, name = world.place(number)
    mine = f"/api/v1/namespaces/{ns}/pods"
    for pod in api.items(f"{mine}?labelSelector=app%3Dengine&resourceVersion=0"):
        if pod["metadata"]["annotations"]["kvpool.dev/pool"] == f"{ns}/{name}":
            api.delete(f"{mine}/{pod['metadata']['name']}", gracePeriodSeconds=0)
    make_engine(api, world, number, life)


def ready(api: Api) -> int:
    """Pools whose status says Ready for their present generation."""
    count = 0
    for pool in api.items(f"{POOLS}/kvcachepools?resourceVersion=0"):
        status = pool.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
        count += (
            conditions.get("Ready") == "True" and status.get("observedGeneration") == pool["metadata"]["generation"]
        )
    return count
