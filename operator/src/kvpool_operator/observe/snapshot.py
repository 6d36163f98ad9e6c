"""Snapshot of the cluster: the frozen input of one reconcile. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.engine_connections import EngineConnections
from kvpool_operator.observe.engine_pods import EnginePods
from kvpool_operator.preflight.results import PreflightRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.desired.inputs import ExternalIndexUrl
    from kvpool_operator.desired.users import Drive
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import SidecarStatus
    from kvpool_operator.tenants.resolver import ResolvedTenant

__all__ = ["Sidecar", "Snapshot", "Webhook"]


@dataclass(frozen=True)
class Sidecar:
    """The active sidecar of a node. `report` is None if it does not answer or does not serve."""

    node: str
    ready: bool
    problem: str = ""
    report: SidecarStatus | None = None
    address: str = ""
    """IP of its pod; empty while it has none or does not serve."""
    ready_delta: int = 0
    """Correction of the DaemonSet's numberReady, which counts the node's oldest pod: 1 if it misses this sidecar, -1 if
    it counts a pod that is not ready to serve."""
    successor_problem: str = ""
    """Why the pod that should replace it does not; empty if no cause is known."""


@dataclass(frozen=True)
class Webhook:
    """Whether new pods can be injected; `problem` is empty if they can."""

    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """State of the cluster that concerns one pool."""

    raw: Manifest
    objects: Mapping[ObjectRef, Manifest] = field(default_factory=dict)
    """Objects that the operator created for the pool, the Secrets included."""
    allowed_namespaces: tuple[str, ...] = ("*",)
    external: ExternalIndexUrl | None = None
    external_problem: str = ""
    namespace_terminating: bool = False
    sidecars: tuple[Sidecar, ...] = ()
    tenants: tuple[ResolvedTenant, ...] = ()
    """The pool's KVCacheTenants, resolved."""
    engines: EnginePods = field(default_factory=EnginePods)
    connections: EngineConnections = field(default_factory=EngineConnections)
    webhook: Webhook = field(default_factory=Webhook)
    preflight_run: PreflightRun = field(default_factory=PreflightRun)
    """Results of the preflight run's pods; empty if none runs."""
    rejection: str = ""
    """Why the API server rejects the DaemonSet's pods, in its words."""
    successor_rejection: str = ""
    """The same for pods that should start alongside active ones."""
    drives: tuple[frozenset[Drive], ...] = ()
    """Directories of the local tiers of each sidecar's pod, also of a pod that is being deleted."""
    stalled_rollover: str = ""
    """Token that changes while the DaemonSet controller should delete old pods; see `active_sidecar`."""

    @property
    def status(self) -> Manifest:
        status = self.raw.get("status")
        return status if isinstance(status, dict) else {}

    def object(self, kind: str, name: str) -> Manifest | None:
        """The pool's object of this kind and name in the pool's namespace."""
        return self.objects.get(ObjectRef(kind, self.raw["metadata"].get("namespace", ""), name))
