"""A pool with sidecars that answer requests, and one operation, in memory."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from op_pool_world import Reports
from op_samples import SECRET, MemoryCluster, pool_manifest

from kvpool_operator.errors import SidecarRejectedError, SidecarUnavailableError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.operations.reconciler import OperationReconciler
from kvpool_operator.sidecars.operation import OperationProgress, SidecarAddress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.runtime.reconciler import Result

NS = "kvpool-system"


OP = ObjectRef("KVCacheOperation", NS, "tidy")


SHARED = {"name": "cold", "shared": {"hostPath": {"path": "/mnt/cold"}, "capacity": "1Ti"}}


LOCAL = {"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "10Gi"}}


class Nodes:
    """Sidecars: each order ends at the next look, unless a test changes it."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
        self.states: dict[tuple[str, str], OperationProgress] = {}
        self.heard: list[tuple[str, str]] = []
        self.cancelled: list[tuple[str, str]] = []
        self.silent: set[str] = set()
        self.endless: set[str] = set()
        self.answers: dict[str, OperationProgress] = {}
        self.refusing: set[str] = set()

    def _hear(self, to: SidecarAddress) -> None:
        if to.node in self.silent:
            raise SidecarUnavailableError("no answer within 5 s")

    async def start(
        self, pool: PoolSecret, to: SidecarAddress, name: str, kind: str, params: Mapping[str, Any]
    ) -> OperationProgress:
        self._hear(to)
        assert pool.pool_id == SECRET.pool_id
        if to.node in self.refusing:
            raise SidecarRejectedError("this sidecar knows nothing")
        known = self.requests.setdefault((to.node, name), (kind, dict(params)))
        assert known == (kind, dict(params))
        self.heard.append((to.node, str(params.get("tier", kind))))
        return self.states.setdefault((to.node, name), OperationProgress("Running", total=10, unit="blocks"))

    async def poll(self, pool: PoolSecret, to: SidecarAddress, name: str) -> OperationProgress | None:
        self._hear(to)
        state = self.states.get((to.node, name))
        if state is not None and state.state == "Running" and to.node not in self.endless:
            state = self.states[to.node, name] = self.answers.get(
                to.node, OperationProgress("Succeeded", counts={"blocks": 2, "bytes": 100})
            )
        return state

    async def cancel(self, pool: PoolSecret, to: SidecarAddress, name: str) -> None:
        self._hear(to)
        self.cancelled.append((to.node, name))

    def restart(self, node: str) -> None:
        self.states = {k: v for k, v in self.states.items() if k[0] != node}
        self.requests = {k: v for k, v in self.requests.items() if k[0] != node}


class World:
    """A pool with its Secret and the pods of its sidecars, and one operation."""

    def __init__(self, nodes: int = 2, tiers: list[dict[str, Any]] | None = None, **spec: Any) -> None:
        self.cluster = MemoryCluster()
        self.nodes = Nodes()
        self.reports = Reports()
        self.now = datetime(2026, 11, 20, 10, tzinfo=UTC)
        raw = pool_manifest(tiers=tiers or [LOCAL])
        self.cluster.put(raw)
        files = {"pool-id": SECRET.pool_id, **SECRET.peer_files}
        data = {k: base64.b64encode(v.encode()).decode() for k, v in files.items()}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-secret", "namespace": NS}}
        self.cluster.put({**secret, "data": data})
        for n in range(nodes):
            self.pod(f"node-{n}", f"10.0.0.{n}")
        self.operation(**spec)
        self.reconciler = OperationReconciler(
            self.cluster, self.nodes, self.reports, now=lambda: self.now, clock=lambda: self.now.timestamp()
        )

    def operation(self, **spec: Any) -> None:
        wish = (
            spec
            if {"purge", "verify", "warm", "preflight", "drain", "release"} & spec.keys()
            else {"purge": {"tenant": "team-a"}, **spec}
        )
        self.cluster.put(
            {
                "apiVersion": "kvpool.dev/v1alpha1",
                "kind": "KVCacheOperation",
                "metadata": {
                    "name": "tidy",
                    "namespace": NS,
                    "creationTimestamp": "2026-11-20T10:00:00Z",
                    "generation": 1,
                    "finalizers": [],
                },
                "spec": {"poolRef": {"name": "chat"}, **wish},
            }
        )

    def pod(self, node: str, address: str) -> None:
        labels = {
            "app.kubernetes.io/name": "kvpool",
            "app.kubernetes.io/managed-by": "kvpool-operator",
            "kvpool.dev/pool": "chat",
            "app.kubernetes.io/component": "sidecar",
        }
        self.cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"chat-sidecar-{node}", "namespace": NS, "labels": labels},
                "spec": {"nodeName": node},
                "status": {"phase": "Running", "podIP": address} if address else {"phase": "Pending"},
            }
        )

    async def look(self, seconds: float = 1) -> Result:
        self.now += timedelta(seconds=seconds)
        return await self.reconciler.reconcile(NS, "tidy")

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.objects[OP].get("status", {})
        return found

    @property
    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.objects[OP]["metadata"]
        return found

    async def run(self, phase: str = "Succeeded", looks: int = 60, seconds: float = 1) -> dict[str, Any]:
        for _ in range(looks):
            await self.look(seconds)
            if self.status.get("completionTime"):
                break
        assert self.status["phase"] == phase, self.status
        return self.status
