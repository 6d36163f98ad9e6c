"""The cluster as one pass sees it: frozen values that decisions are made from. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.engine_pods import EnginePods
from kvpool_operator.preflight.results import PreflightRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.desired.inputs import ExternalIndexUrl
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import SidecarStatus
    from kvpool_operator.tenants.resolver import ResolvedTenant

__all__ = ["Sidecar", "Snapshot", "Webhook"]


@dataclass(frozen=True)
class Sidecar:
    """The pod that is a node's sidecar, and what it says of itself (None: it does not answer, or does not serve)."""

    node: str
    ready: bool
    problem: str = ""
    report: SidecarStatus | None = None
    address: str = ""
    """Of its pod; empty while it has none, or does not serve."""
    ready_delta: int = 0
    """What the DaemonSet's numberReady lacks of it (1) or has too much (-1): that goes by the node's oldest pod."""
    successor_problem: str = ""
    """Why the pod that is to take its place does not; empty when nothing is known."""


@dataclass(frozen=True)
class Webhook:
    """Whether new pods can be injected; `problem` is empty when they can."""

    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The cluster as it was a moment ago."""

    raw: Manifest
    objects: Mapping[ObjectRef, Manifest] = field(default_factory=dict)
    """The pool's objects by what they are; the Secret is among them."""
    allowed_namespaces: tuple[str, ...] = ("*",)
    external: ExternalIndexUrl | None = None
    external_problem: str = ""
    namespace_terminating: bool = False
    sidecars: tuple[Sidecar, ...] = ()
    tenants: tuple[ResolvedTenant, ...] = ()
    """The pool's KVCacheTenants, and what they come to."""
    engines: EnginePods = field(default_factory=EnginePods)
    webhook: Webhook = field(default_factory=Webhook)
    looks: PreflightRun = field(default_factory=PreflightRun)
    """What the pods of the look at the nodes answered; empty where none runs."""
    refusal: str = ""
    """Why no pod can be made for the DaemonSet, in the words of the API server."""
    successor_rejection: str = ""
    """The same of pods that are to run beside those that serve."""
    drives: tuple[frozenset[str], ...] = ()
    """Directories of the local tiers of each sidecar's pod, also of one that is on its way out."""
    stalled_rollover: str = ""
    """New sidecars' pods that have lasted long enough, while the ones before them are still there."""

    @property
    def status(self) -> Manifest:
        status = self.raw.get("status")
        return status if isinstance(status, dict) else {}

    def object(self, kind: str, name: str) -> Manifest | None:
        """The pool's object of that kind and name in its namespace."""
        return self.objects.get(ObjectRef(kind, self.raw["metadata"].get("namespace", ""), name))
