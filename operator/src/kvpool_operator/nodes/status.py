"""A KVCacheNode from what is seen of the node, and whether it is worth a write. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.conditions import Verdict, find, first_verdict, with_verdicts
from kvpool_operator.api.node import (
    MAX_DEVICES,
    NODE_KIND,
    DrainStatus,
    NodeCondition,
    NodeStatus,
)
from kvpool_operator.api.quantity import format_bytes
from kvpool_operator.api.reasons import Reason
from kvpool_operator.api.v1alpha1 import API_VERSION
from kvpool_operator.desired.labels import metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.observe.snapshot import Sidecar
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = [
    "COMPONENT",
    "RETAINED_FIELDS",
    "comparable_status",
    "lost_since",
    "node_manifest",
    "node_name",
    "node_status",
    "read_drain",
    "stable_part",
]

COMPONENT: Final = "node"
RETAINED_FIELDS: Final = ("capacity", "used", "blocks", "generation", "transport", "conditions")
"""Fields that a new status takes over from the previous one."""
_LONGEST: Final = 253
_LOST: Final = (Reason.NODE_NOT_FOUND.value, Reason.SIDECAR_NOT_FOUND.value)


def node_name(pool: str, node: str) -> str:
    """Name of the KVCacheNode. It is unique, because a pool's name has no dot."""
    name = f"{pool}.{node}"
    return name if len(name) <= _LONGEST else f"{name[:236]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def node_manifest(pool: KVCachePool, node: str) -> Manifest:
    """The object without its status; the pool owns it."""
    return {
        "apiVersion": API_VERSION,
        "kind": NODE_KIND,
        "metadata": metadata(pool, node_name(pool.metadata.name, node), COMPONENT),
        "spec": {"pool": pool.metadata.name, "node": node},
    }


def read_drain(status: Manifest) -> DrainStatus:
    """The drain in a status; the initial state if it cannot be parsed."""
    drain = status.get("drain")
    try:
        return DrainStatus.model_validate(drain) if isinstance(drain, dict) else DrainStatus()
    except ValueError:
        return DrainStatus()


def node_status(
    pool: KVCachePool, sidecar: Sidecar | None, *, gone: bool, drain: DrainStatus, old: Manifest, now: str
) -> Manifest:
    """The status. `sidecar` is None if the node has none; `gone`: the node no longer exists."""
    report = sidecar.report if sidecar is not None else None
    subject = _NodeInput(sidecar, gone)
    verdicts = {kind: first_verdict(chain, subject) for kind, chain in CHAINS.items()}
    conditions = with_verdicts(old.get("conditions"), verdicts, pool.metadata.generation, now, NodeCondition)
    kept: dict[str, Any] = {}
    if report is None:  # the last known values are better than none
        kept = {k: old[k] for k in RETAINED_FIELDS if k in old and k != "conditions"}
    else:
        kept = {
            "capacity": format_bytes(report.capacity_bytes),
            "used": format_bytes(report.used_bytes),
            "blocks": report.blocks,
            "generation": report.node_generation,
            "transport": report.transport[:63],
        }
    devices = [
        {"name": t.name, "path": t.local.path or "", "health": _health(t.name, report)}
        for t in pool.spec.tiers
        if t.local is not None
    ]
    return NodeStatus.model_validate(
        {
            **kept,
            "devices": devices[:MAX_DEVICES],
            "drain": drain.model_dump(by_alias=True),
            "conditions": conditions,
        }
    ).dump()


def stable_part(status: Manifest) -> Any:
    """The part of a status whose change is written immediately."""
    drain = status.get("drain") or {}
    return (
        [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or []],
        [(d["name"], d["health"]) for d in status.get("devices") or []],
        [drain.get(k) for k in ("state", "reason", "startTime")],
        [status.get(k) for k in ("generation", "transport")],
    )


def comparable_status(status: Manifest) -> Manifest:
    """The status without the pool's generation, whose change alone is no reason for a write."""
    conditions = [{k: v for k, v in c.items() if k != "observedGeneration"} for c in status.get("conditions") or []]
    return {**status, "conditions": conditions}


def lost_since(status: Manifest) -> str:
    """When the node or its sidecar disappeared (RFC 3339); empty while both exist."""
    ready = find(status.get("conditions") or [], "Ready")
    return str(ready.get("lastTransitionTime", "")) if ready and ready.get("reason") in _LOST else ""


def _health(tier: str, report: SidecarStatus | None) -> str:
    if report is None:
        return "Unknown"
    return "Failing" if tier in report.failing_drives else "OK"


@dataclass(frozen=True)
class _NodeInput:
    """Everything that the checks of a node's conditions read."""

    sidecar: Sidecar | None
    gone: bool
    """The node no longer exists."""

    @property
    def report(self) -> SidecarStatus | None:
        return self.sidecar.report if self.sidecar is not None else None


def node_not_found(i: _NodeInput) -> Verdict | None:
    if not i.gone:
        return None
    return Verdict.false(Reason.NODE_NOT_FOUND, "the node no longer exists; this object is deleted later")


def sidecar_not_found(i: _NodeInput) -> Verdict | None:
    if i.sidecar is not None:
        return None
    return Verdict.false(Reason.SIDECAR_NOT_FOUND, "the node has no sidecar of this pool")


def sidecar_not_ready(i: _NodeInput) -> Verdict | None:
    if i.sidecar is None or i.sidecar.ready:
        return None
    return Verdict.false(Reason.NODES_NOT_READY, i.sidecar.problem or "the sidecar is not ready")


def sidecar_unresponsive(i: _NodeInput) -> Verdict | None:
    if i.report is not None:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "the sidecar does not answer the operator")


def serving(_: _NodeInput) -> Verdict:
    return Verdict.true(Reason.SERVING, "the sidecar serves")


def drives_not_reported(i: _NodeInput) -> Verdict | None:
    if i.report is not None:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "the sidecar has not reported its drives")


def drive_errors(i: _NodeInput) -> Verdict | None:
    failing = i.report.failing_drives if i.report is not None else ()
    if not failing:
        return None
    return Verdict.false(Reason.DRIVE_ERRORS, f"these tiers return I/O errors and are bypassed: {', '.join(failing)}")


def drives_healthy(_: _NodeInput) -> Verdict:
    return Verdict.true(Reason.DRIVES_HEALTHY, "no drive returns errors")


def index_not_reported(i: _NodeInput) -> Verdict | None:
    if i.report is not None:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "the sidecar has not reported its connection to the index")


def index_not_connected(i: _NodeInput) -> Verdict | None:
    if i.report is None or i.report.index_connected:
        return None
    return Verdict.false(Reason.NODES_NOT_CONNECTED, "other nodes cannot find this node's blocks")


def index_connected(_: _NodeInput) -> Verdict:
    return Verdict.true(Reason.CONNECTED, "other nodes find this node's blocks")


CHAINS: Final[Mapping[str, tuple[Callable[[_NodeInput], Verdict | None], ...]]] = {
    "Ready": (node_not_found, sidecar_not_found, sidecar_not_ready, sidecar_unresponsive, serving),
    "DiskHealthy": (drives_not_reported, drive_errors, drives_healthy),
    "IndexConnected": (index_not_reported, index_not_connected, index_connected),
}
"""Policy chain of each condition type."""
