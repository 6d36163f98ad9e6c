"""Documents as kubectl returns them, from the documents that the operator's tests of the diagnosis change."""

from __future__ import annotations

from typing import Any

from op_diagnosis_world import NOW, UNIX, World, engine_pod
from op_samples import inputs, pool_manifest

from kvpool_cli.cluster.documents import Documents
from kvpool_operator.desired import build

SYSTEM = "kvpool-system"
_KINDS = ("DaemonSet", "StatefulSet")


def documents(world: World | None = None) -> Documents:
    """Documents of the cluster that `world` describes."""
    w = world or World()
    spec = {**w.spec}
    if "allowed_namespaces" in w.snapshot:
        selector = {"matchLabels": {"pool": "chat"}}
        spec["injection"] = {"allowedNamespaces": {"from": "Selector", "selector": selector}}
    pool = pool_manifest(**spec)
    failed = len(w.preflight)
    preflight = {"spec": "1", "state": "Done", "nodes": 2, "passed": 2 - failed, "failed": failed}
    pool["status"] = {"observedGeneration": 3, "preflight": {**preflight, "findings": w.preflight}}
    orphans = [
        engine_pod(name.partition("/")[2], "node-0", **{"kvpool.dev/pool": wanted})
        for name, wanted in w.cluster.orphans
    ]
    objects: dict[str, list[dict[str, Any]]] = {
        "pools": [pool],
        "tenants": w.tenants,
        "owned": [_with_status(o, len(w.statuses)) for o in build(inputs()) if o["kind"] in _KINDS],
        "pool_pods": [sidecar_pod(node, number) for number, node in enumerate(w.statuses)],
        "engine_pods": [*w.pods, *orphans],
        "release": [_deployment("operator"), _deployment("webhook")],
        "webhooks": [{"metadata": {"name": "kvpool-webhook"}, "webhooks": [{"clientConfig": {"caBundle": "Zm9v"}}]}],
        "namespaces": [_namespace(SYSTEM), _namespace("team-a"), _namespace("team-b", pool="chat")],
        "cluster_nodes": [_node(node) for node in w.statuses],
        "network_policies": list(w.cluster.network_policies),
        "limit_ranges": list(w.cluster.limit_ranges),
        "events": list(w.cluster.events),
        "workloads": list(w.cluster.workloads),
    }
    statuses = {
        f"{SYSTEM}/chat-sidecar-{node}": {"received": float(UNIX), "status": status}
        for node, status in w.statuses.items()
        if node not in w.silent_nodes
    }
    return Documents(objects, statuses, [], {}, NOW.timestamp())


def sidecar_pod(node: str, number: int) -> dict[str, Any]:
    """The Ready pod of a node's sidecar, with an environment."""
    labels = {"kvpool.dev/pool": "chat", "app.kubernetes.io/component": "sidecar"}
    metadata = {"name": f"chat-sidecar-{node}", "namespace": SYSTEM, "uid": f"s-{node}", "labels": labels}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T08:00:00Z"}
    environment = [{"name": "TOKEN", "value": "hunter2-in-env"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "creationTimestamp": "2026-11-20T08:00:00Z"},
        "spec": {"nodeName": node, "containers": [{"name": "server", "env": environment}]},
        "status": {"phase": "Running", "podIP": f"10.0.0.{number + 1}", "conditions": [ready]},
    }


def _with_status(manifest: dict[str, Any], nodes: int) -> dict[str, Any]:
    scheduled = ("desiredNumberScheduled", "currentNumberScheduled", "numberReady", "updatedNumberScheduled")
    status = {"readyReplicas": 1} if manifest["kind"] == "StatefulSet" else dict.fromkeys(scheduled, nodes)
    metadata = {**manifest["metadata"], "generation": 1, "uid": manifest["kind"]}
    return {**manifest, "metadata": metadata, "status": {"observedGeneration": 1, **status}}


def _deployment(component: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/component": component}
    metadata = {"name": f"kvpool-{component}", "namespace": SYSTEM, "labels": labels}
    return {"kind": "Deployment", "metadata": metadata, "spec": {}, "status": {"availableReplicas": 1}}


def _namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"kind": "Namespace", "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, **labels}}}


def _node(name: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True"}
    return {"kind": "Node", "metadata": {"name": name}, "status": {"conditions": [ready]}}
