"""Documents of a cluster that the diagnosis of pools needs, read through kubectl or from a file."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool_cli.errors import CliError, ForbiddenError, NotFoundError, UnreachableError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool_cli.kubectl import Kubectl

FORMAT = "kvpool.dev/documents/1"
_THREADS = 12
_MAX_STATUSES = 512
_HTTP_PORT = 7422
_OURS = "app.kubernetes.io/managed-by=kvpool-operator"
_RELEASE = "app.kubernetes.io/name=kvpool"


class Query(NamedTuple):
    """One list of a cluster."""

    name: str
    kinds: str
    labels: str = ""
    fields: str = ""
    required: bool = False


QUERIES = (
    Query("pools", "kvcachepools.kvpool.dev", required=True),
    Query("tenants", "kvcachetenants.kvpool.dev"),
    Query("nodes", "kvcachenodes.kvpool.dev"),
    Query("operations", "kvcacheoperations.kvpool.dev"),
    Query("owned", "daemonsets.apps,statefulsets.apps", labels=_OURS),
    Query("pool_pods", "pods", labels=_OURS),
    Query("engine_pods", "pods", labels="kvpool.dev/inject=true"),
    Query("release", "deployments.apps", labels=_RELEASE),
    Query("webhooks", "mutatingwebhookconfigurations.admissionregistration.k8s.io", labels=_RELEASE),
    Query("namespaces", "namespaces"),
    Query("cluster_nodes", "nodes"),
    Query("network_policies", "networkpolicies.networking.k8s.io"),
    Query("limit_ranges", "limitranges"),
    Query("events", "events", fields="type=Warning,reason=FailedCreate"),
    Query("workloads", "deployments.apps,statefulsets.apps,replicasets.apps,daemonsets.apps,jobs.batch"),
)


@dataclass
class Documents:
    """Objects by the name of their query, and `/status` of sidecars by `namespace/pod`."""

    objects: dict[str, list[dict[str, Any]]]
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`{"received": Unix time, "status": JSON}`; a sidecar that did not answer is absent."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, and why."""
    denied: dict[str, str] = field(default_factory=dict)
    """Rights that the user lacks, as `verb resource`, by the name of the query or `namespace/pod` of the sidecar."""
    read_at: float = 0.0

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a query; empty if they could not be read."""
        return self.objects.get(name, [])

    def dump(self) -> dict[str, Any]:
        """Return JSON values."""
        kept = {"objects": self.objects, "statuses": self.statuses, "notes": self.notes, "readAt": self.read_at}
        return {"format": FORMAT, **kept, "denied": self.denied}


def read(kubectl: Kubectl) -> Documents:
    """Read all documents. Raises UnreachableError if the pools cannot be read; other gaps become notes."""
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = list(pool.map(lambda query: _query(kubectl, query), QUERIES))
        found = Documents({}, read_at=time.time())
        for query, (items, problem) in zip(QUERIES, answers, strict=True):
            found.objects[query.name] = items
            if problem is not None and query.required:
                raise problem if not isinstance(problem, NotFoundError) else UnreachableError(str(problem))
            if problem is not None:
                found.notes.append(f"{query.kinds} could not be read: {problem}")
            if isinstance(problem, ForbiddenError):
                found.denied[query.name] = f"list {query.kinds.replace(',', ', ')}"
        sidecars = [pod for pod in found.of("pool_pods") if _is_sidecar(pod)][:_MAX_STATUSES]
        for key, answer in pool.map(lambda pod: _status(kubectl, pod), sidecars):
            if "status" in answer:
                found.statuses[key] = answer
            else:
                found.notes.append(f"/status of {key} could not be read: {answer['problem']}")
            if answer.get("denied"):
                found.denied[key] = f"get pods/proxy in namespace {key.partition('/')[0]}"
    return found


def load(path: Path) -> Documents:
    """Return the documents of a file that `report` wrote. Raises UsageError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read: {e}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{path} is no file of documents: `kubectl kvpool report` writes documents.json")
    return Documents(
        found["objects"], found["statuses"], found["notes"], found.get("denied") or {}, float(found["readAt"])
    )


def _query(kubectl: Kubectl, query: Query) -> tuple[list[dict[str, Any]], CliError | None]:
    try:
        found = kubectl.get(query.kinds, everywhere=True, labels=query.labels, fields=query.fields)
    except CliError as e:
        if isinstance(e, UsageError):
            raise
        return [], e
    items = found.get("items")
    return (items if isinstance(items, list) else []), None


def _is_sidecar(pod: dict[str, Any]) -> bool:
    labels = (pod.get("metadata") or {}).get("labels") or {}
    running = (pod.get("status") or {}).get("phase") == "Running"
    return running and labels.get("app.kubernetes.io/component") == "sidecar"


def _status(kubectl: Kubectl, pod: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    key = f"{namespace}/{name}"
    try:
        status = kubectl.raw(f"/api/v1/namespaces/{namespace}/pods/{name}:{_HTTP_PORT}/proxy/status")
    except CliError as e:
        return key, {"problem": str(e), "denied": isinstance(e, ForbiddenError)}
    return key, {"received": time.time(), "status": status}
