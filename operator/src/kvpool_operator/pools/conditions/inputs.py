"""Values that the checks of a pool's conditions read. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvpool_operator.api.conditions import Verdict
from kvpool_operator.desired import names
from kvpool_operator.preflight.gate import PreflightResult

if TYPE_CHECKING:
    from kvpool_operator.api.pool.status import NodesStatus
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.observe.fingerprints import FingerprintGroup
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["ConditionInput", "PoolCheck", "ReconcileOutcome", "is_status_current"]


@dataclass(frozen=True)
class ReconcileOutcome:
    """Result of one reconcile: what it changed, and what keeps it from finishing."""

    applied: int = 0
    """Number of objects that were applied or deleted."""
    waiting: str = ""
    """What the next step waits for; empty if nothing."""
    rejections: tuple[str, ...] = ()
    """Messages of the API server about objects that it rejected."""
    eviction_problem: str = ""
    """Why an engine pod that should be recreated was not evicted."""
    preflight: PreflightResult = PreflightResult("Skipped", is_open=True)
    config_digest: str = ""
    """Digest of the configuration that the sidecars should run; empty if unknown."""
    without_new_password: tuple[str, ...] = ()
    """Nodes that have not used the managed index's new password yet."""


@dataclass(frozen=True)
class ConditionInput:
    """Everything that a check may read."""

    pool: KVCachePool
    snapshot: Snapshot
    nodes: NodesStatus
    outcome: ReconcileOutcome
    fingerprint_groups: tuple[FingerprintGroup, ...] = ()

    @cached_property
    def reports(self) -> tuple[SidecarStatus, ...]:
        """Statuses of the sidecars that answered."""
        return tuple(s.report for s in self.snapshot.sidecars if s.report is not None)

    @property
    def daemonset(self) -> Manifest | None:
        """The DaemonSet of the sidecars; None if it does not exist."""
        return self.snapshot.object("DaemonSet", names.sidecar(self.pool.metadata.name))


PoolCheck = Callable[[ConditionInput], Verdict | None]


def is_status_current(manifest: Manifest) -> bool:
    """Whether the object's status describes its current spec."""
    observed = (manifest.get("status") or {}).get("observedGeneration", 0)
    return bool(observed >= manifest["metadata"].get("generation", 1))
