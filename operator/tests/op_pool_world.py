"""A cluster in memory with one pool, its operator, and the controllers that Kubernetes would run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from op_samples import ENV, MemoryCluster, listers, pool_manifest

from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.observer import Observer, ObserverConfig
from kvpool_operator.pools.reconciler import PoolDependencies, PoolReconciler
from kvpool_operator.sidecars.status import SidecarStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool_operator.runtime.reconciler import Result

NS, NAME = "kvpool-system", "chat"


POOL = ObjectRef("KVCachePool", NS, NAME)


WEBHOOK = {
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "kvpool-webhook"},
    "webhooks": [{"name": "pods.kvpool.dev", "clientConfig": {"caBundle": "YQ=="}}],
}


GOOD = SidecarStatus(ready=True, capacity_bytes=2**30, index_connected=True, transport="TCP")


class Reports:
    """Answers for sidecars."""

    def __init__(self) -> None:
        self.reported: dict[str, SidecarStatus] = {}
        self.looks: dict[str, Any] = {}

    async def get_all(self, addresses: Iterable[str], port: int) -> dict[str, SidecarStatus]:
        assert port == 7422
        return {a: self.reported[a] for a in addresses if a in self.reported}

    async def get_raw(self, addresses: Iterable[str], port: int) -> dict[str, Any]:
        assert port == 7422
        return {a: self.looks[a] for a in addresses if a in self.looks}


class World:
    """A cluster, an operator, and the controllers that Kubernetes would run."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = MemoryCluster()
        self.reports = Reports()
        self.now = datetime(2026, 11, 20, 10, tzinfo=UTC)
        self.clock = 0.0
        self.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NS}})
        raw = pool_manifest(**{"preflight": "Skip", **spec})
        raw["metadata"]["finalizers"] = []
        self.cluster.put(raw)
        self.start()

    def start(self, wrote: Callable[..., None] = lambda *_: None, **observed: Any) -> None:
        """An operator starts. `observed`: listers other than those of the cluster."""
        observer = Observer(
            self.cluster,
            self.reports,
            replace(listers(self.cluster), **observed),
            ObserverConfig(sidecar_image=ENV.sidecar_image, namespace=NS, webhook="kvpool-webhook"),
            clock=lambda: self.clock,
        )
        self.reconciler = PoolReconciler(
            PoolDependencies(
                self.cluster,
                observer,
                ENV,
                clock=lambda: self.clock,
                now=lambda: self.now,
                record_own_write=wrote,
            )
        )

    @property
    def pool(self) -> dict[str, Any]:
        return self.cluster.objects[POOL]

    async def look(self) -> Result:
        self.cluster.calls.clear()
        self.clock += 10
        self.now += timedelta(seconds=10)
        return await self.reconciler.reconcile(NS, NAME)

    async def settle(self) -> Result:
        for _ in range(10):
            result = await self.look()
            if result.requeue_after_s is None:
                return result
        raise AssertionError(f"does not settle: {self.cluster.writes()}")

    def run(self, nodes: int = 2, ready: int = 2) -> None:
        """What the controllers and the kubelets would do."""
        for kind, name in (("DaemonSet", "chat-sidecar"), ("DaemonSet", "chat-wipe")):
            daemonset = self.cluster.objects.get(ObjectRef(kind, NS, name))
            if daemonset is not None:
                daemonset["status"] = {
                    "observedGeneration": 1,
                    "desiredNumberScheduled": nodes,
                    "currentNumberScheduled": nodes,
                    "updatedNumberScheduled": nodes,
                    "numberReady": ready,
                }
        redis = self.cluster.objects.get(ObjectRef("StatefulSet", NS, "chat-index"))
        if redis is not None:
            redis["status"] = {"readyReplicas": 1}
        for i in range(nodes):
            self.cluster.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"chat-sidecar-{i}",
                        "namespace": NS,
                        "labels": {"kvpool.dev/pool": NAME, "app.kubernetes.io/component": "sidecar"},
                    },
                    "spec": {"nodeName": f"node-{i}"},
                    "status": {
                        "phase": "Running",
                        "podIP": f"10.0.0.{i}",
                        "conditions": [{"type": "Ready", "status": "True" if i < ready else "False"}],
                    },
                }
            )
            self.reports.reported[f"10.0.0.{i}"] = GOOD

    def condition(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = next(c for c in self.pool["status"]["conditions"] if c["type"] == kind)
        return found

    def phase_events(self) -> list[str]:
        """What Events say of the pool's phase, without the causes."""
        events = [o for r, o in self.cluster.objects.items() if r.kind == "Event" and o["reason"] == "PhaseChanged"]
        return [e["message"].partition(":")[0] for e in events]

    def delete(self) -> None:
        self.pool["metadata"]["deletionTimestamp"] = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
