"""Removes from documents what the diagnosis does not read: environments, command lines, certificates. Pure.

What stays names namespaces, pods, nodes and models. Each kind has a list of what is kept, so that new fields of an API
are not in a report by accident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.documents import Documents
from kvpool_operator.observe.engine_pods import slim_engine_pod

if TYPE_CHECKING:
    from collections.abc import Callable

Manifest = dict[str, Any]
_METADATA = (
    *("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp"),
    *("resourceVersion", "finalizers"),
)
_LABELS = ("kvpool.dev/", "app.kubernetes.io/", "pod-security.kubernetes.io/", "kubernetes.io/metadata.name")


def redact(documents: Documents) -> Documents:
    """Return the documents without what the diagnosis does not need."""
    kept = {name: [_KEEP.get(name, _own)(item) for item in items] for name, items in documents.objects.items()}
    return Documents(kept, documents.statuses, documents.notes, documents.denied, documents.read_at)


def _metadata(item: Manifest) -> Manifest:
    metadata = item.get("metadata") or {}
    labels = {k: v for k, v in (metadata.get("labels") or {}).items() if k.startswith(_LABELS)}
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k.startswith("kvpool.dev/")}
    owners = [
        {k: o.get(k) for k in ("apiVersion", "kind", "name", "uid", "controller")}
        for o in metadata.get("ownerReferences") or []
    ]
    kept = {k: metadata[k] for k in _METADATA if k in metadata}
    kept |= {"labels": labels} if labels else {}
    notes.pop("kvpool.dev/connector-config", None)
    kept |= {"annotations": notes} if notes else {}
    return kept | ({"ownerReferences": owners} if owners else {})


def _base(item: Manifest, *parts: str) -> Manifest:
    base = {k: item[k] for k in ("apiVersion", "kind") if k in item}
    return base | {"metadata": _metadata(item)} | {part: item[part] for part in parts if part in item}


def _own(item: Manifest) -> Manifest:
    """Objects of KVPool's own kinds: they refer to Secrets and hold none."""
    return _base(item, "spec", "status")


def _engine_pod(item: Manifest) -> Manifest:
    slim = slim_engine_pod(item)
    labels = {k: v for k, v in (item["metadata"].get("labels") or {}).items() if k.startswith("kvpool.dev/")}
    return {"kind": "Pod", **slim, "metadata": {**slim["metadata"], "labels": labels}}


def _pool_pod(item: Manifest) -> Manifest:
    spec = item.get("spec") or {}
    return {**_base(item, "status"), "spec": {k: spec[k] for k in ("nodeName", "affinity") if k in spec}}


def _workload(item: Manifest) -> Manifest:
    spec = item.get("spec") or {}
    template = spec.get("template") or {}
    pod = template.get("spec") or {}
    kept: Manifest = {k: spec[k] for k in ("replicas", "minReadySeconds", "updateStrategy") if k in spec}
    if template:
        containers = {
            part: [{k: c[k] for k in ("name", "image", "resources") if k in c} for c in pod.get(part) or []]
            for part in ("containers", "initContainers")
        }
        kept["template"] = {"metadata": _metadata(template), "spec": containers}
    status = item.get("status") or {}
    kept_status = {k: v for k, v in status.items() if k != "conditions"}
    return {**_base(item), "spec": kept, "status": kept_status}


def _webhook(item: Manifest) -> Manifest:
    hooks = [
        {"name": h.get("name"), "clientConfig": {"caBundle": bool((h.get("clientConfig") or {}).get("caBundle"))}}
        for h in item.get("webhooks") or []
    ]
    return {**_base(item), "webhooks": hooks}


def _namespace(item: Manifest) -> Manifest:
    labels = (item.get("metadata") or {}).get("labels") or {}
    kept = _base(item)
    kept["metadata"]["labels"] = labels  # selectors of pools and tenants read them
    return kept


def _node(item: Manifest) -> Manifest:
    status = item.get("status") or {}
    return {**_base(item), "status": {k: status[k] for k in ("conditions", "nodeInfo") if k in status}}


def _event(item: Manifest) -> Manifest:
    parts = ("reason", "message", "type", "involvedObject", "firstTimestamp", "lastTimestamp", "count")
    return _base(item, *parts)


_KEEP: dict[str, Callable[[Manifest], Manifest]] = {
    "engine_pods": _engine_pod,
    "pool_pods": _pool_pod,
    "owned": _workload,
    "workloads": _workload,
    "release": _workload,
    "webhooks": _webhook,
    "namespaces": _namespace,
    "cluster_nodes": _node,
    "network_policies": lambda item: _base(item, "spec"),
    "limit_ranges": lambda item: _base(item, "spec"),
    "events": _event,
}
