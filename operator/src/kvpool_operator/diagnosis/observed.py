"""What analyzers read: the snapshot of a pool, its verdicts, and objects that only a user's command lists. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpool_operator.sidecars.cache import sum_reports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.api.conditions import Verdict
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.observe.fingerprints import FingerprintGroup
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.preflight.results import Finding as PreflightFinding
    from kvpool_operator.sidecars.cache import CacheReport
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["ClusterObjects", "Observed"]

Manifests = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ClusterObjects:
    """Objects as JSON that the operator does not watch; empty in the operator."""

    workloads: Manifests = ()
    """Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and others with a pod template."""
    events: Manifests = ()
    """Warning Events."""
    limit_ranges: Manifests = ()
    network_policies: Manifests = ()
    nodes: Manifests = ()
    pools: tuple[str, ...] = ()
    """All KVCachePools as namespace/name."""
    orphans: tuple[tuple[str, str], ...] = ()
    """Pods as namespace/name that opted in to a pool that does not exist, with the pool's name."""
    operator_problem: str = ""
    """Why the operator does not work; empty if it does."""


@dataclass(frozen=True)
class Observed:
    """Everything that an analyzer may read."""

    pool: KVCachePool
    snapshot: Snapshot
    verdicts: Mapping[str, Verdict]
    """The pool's conditions by type, evaluated from the same snapshot."""
    groups: tuple[FingerprintGroup, ...] = ()
    preflight: tuple[PreflightFinding, ...] = ()
    cluster: ClusterObjects = field(default_factory=ClusterObjects)

    @property
    def subject(self) -> str:
        """The pool as the subject of a finding."""
        return f"KVCachePool {self.pool.key}"

    @cached_property
    def reports(self) -> tuple[tuple[str, SidecarStatus], ...]:
        """Node and status of each sidecar that answered."""
        return tuple((s.node, s.report) for s in self.snapshot.sidecars if s.report is not None)

    @cached_property
    def cache(self) -> CacheReport:
        """Lookups of all nodes."""
        return sum_reports(report.cache for _, report in self.reports)
