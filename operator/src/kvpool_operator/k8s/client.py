"""Kubernetes API client as the operator needs it. `rest` implements it; tests implement it in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvpool_operator.api import operation
from kvpool_operator.api.node import NODE_KIND, NODE_PLURAL
from kvpool_operator.api.tenant import TENANT_KIND, TENANT_PLURAL
from kvpool_operator.api.v1alpha1 import API_VERSION, KIND, PLURAL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = [
    "KINDS",
    "ApiClient",
    "ListPage",
    "ListWatcher",
    "Manifest",
    "NamespacedName",
    "ObjectRef",
    "ResourceKind",
    "WatchEvent",
    "ref",
]

Manifest = dict[str, Any]


@dataclass(frozen=True)
class ResourceKind:
    """A kind of object and its path in the API."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of one object, of those in a namespace, or of all. Parts must be URL-safe, as names are."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return root + within + "/".join(["", self.plural, *(p for p in (name, subresource) if p)])


_ALL: Final = (
    ResourceKind(API_VERSION, KIND, PLURAL),
    ResourceKind(API_VERSION, operation.KIND, operation.PLURAL),
    ResourceKind(API_VERSION, NODE_KIND, NODE_PLURAL),
    ResourceKind(API_VERSION, TENANT_KIND, TENANT_PLURAL),
    ResourceKind("v1", "ConfigMap", "configmaps"),
    ResourceKind("v1", "Event", "events"),
    ResourceKind("v1", "Namespace", "namespaces", namespaced=False),
    ResourceKind("v1", "Node", "nodes", namespaced=False),
    ResourceKind("v1", "PersistentVolume", "persistentvolumes", namespaced=False),
    ResourceKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ResourceKind("v1", "Pod", "pods"),
    ResourceKind("v1", "Secret", "secrets"),
    ResourceKind("v1", "Service", "services"),
    ResourceKind("v1", "ServiceAccount", "serviceaccounts"),
    ResourceKind("apps/v1", "DaemonSet", "daemonsets"),
    ResourceKind("apps/v1", "Deployment", "deployments"),
    ResourceKind("apps/v1", "StatefulSet", "statefulsets"),
    ResourceKind("coordination.k8s.io/v1", "Lease", "leases"),
    ResourceKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ResourceKind("authentication.k8s.io/v1", "TokenReview", "tokenreviews", namespaced=False),
    ResourceKind(
        "admissionregistration.k8s.io/v1",
        "MutatingWebhookConfiguration",
        "mutatingwebhookconfigurations",
        namespaced=False,
    ),
)
KINDS: Final[Mapping[str, ResourceKind]] = {k.name: k for k in _ALL}


class NamespacedName(NamedTuple):
    """Key of a namespaced object of a known kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, order=True)
class ObjectRef:
    """Which object: kind, namespace (empty for cluster-scoped ones), name."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {f'{self.namespace}/' if self.namespace else ''}{self.name}"


def ref(manifest: Manifest) -> ObjectRef:
    """The reference of an object."""
    kind, metadata = KINDS[manifest["kind"]], manifest["metadata"]
    return ObjectRef(kind.name, metadata.get("namespace", "") if kind.namespaced else "", metadata["name"])


class ListPage(NamedTuple):
    """Part of a list. `token` continues it; empty on the last page."""

    items: list[Manifest]
    resource_version: str
    token: str


class WatchEvent(NamedTuple):
    """One event of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: Manifest


class ListWatcher(Protocol):
    """Chunked lists and watches, for reflectors."""

    async def list_page(
        self, kind: str, *, namespace: str = "", labels: str = "", token: str = "", metadata_only: bool = False
    ) -> ListPage:
        """One page of a consistent list, in one namespace or in all.

        ApiUnavailableError with status 410: `token` expired.
        """
        ...

    def watch(
        self,
        kind: str,
        *,
        namespace: str = "",
        labels: str = "",
        resource_version: str,
        metadata_only: bool = False,
        idle_timeout_s: float,
    ) -> AsyncGenerator[WatchEvent]:
        """Events after `resource_version`. Ends when the server closes the stream, or after silence of
        `idle_timeout_s`. ApiUnavailableError with status 410: `resource_version` expired."""
        ...


class ApiClient(Protocol):
    """Requests of the operator. Each has a timeout and raises only the errors of `kvpool_operator.errors`."""

    async def get(self, target: ObjectRef) -> Manifest | None:
        """The current object; None if there is none."""
        ...

    async def list(
        self, kind: str, *, namespace: str = "", labels: str = "", fields: str = "", fresh: bool = False
    ) -> list[Manifest]:
        """Objects by selector, in one namespace or in all. Without `fresh`, the API server's cache may lag a moment."""
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """Create it; ConflictError if it exists."""
        ...

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Server-side apply as field manager `kvpool-operator`; takes ownership of conflicting fields."""
        ...

    async def patch(self, target: ObjectRef, patch: Manifest, *, subresource: str = "") -> Manifest:
        """JSON merge patch. If it contains metadata.resourceVersion: ConflictError if the object changed since."""
        ...

    async def delete(self, target: ObjectRef, *, uid: str = "", foreground: bool = False) -> None:
        """Delete it if it exists (and has this `uid`). Foreground: after the objects that it owns."""
        ...

    async def evict(self, target: ObjectRef, *, uid: str) -> None:
        """Evict a pod, as `kubectl drain` does. EvictionBlockedError if a PodDisruptionBudget does not allow it now;
        ConflictError if the pod is gone or has another `uid`."""
        ...
