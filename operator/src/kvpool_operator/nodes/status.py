"""A KVCacheNode from what is seen of the node, and whether it is worth a write. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.conditions import find, set_condition
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
"""What a status is told of the one before."""
_LONGEST: Final = 253
_LOST: Final = (Reason.NODE_NOT_FOUND.value, Reason.SIDECAR_NOT_FOUND.value)


def node_name(pool: str, node: str) -> str:
    """Name of the KVCacheNode. A pool's name has no dot, so no two of them meet."""
    name = f"{pool}.{node}"
    return name if len(name) <= _LONGEST else f"{name[:236]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def node_manifest(pool: KVCachePool, node: str) -> Manifest:
    """The object but for its status; it goes with the pool."""
    return {
        "apiVersion": API_VERSION,
        "kind": NODE_KIND,
        "metadata": metadata(pool, node_name(pool.metadata.name, node), COMPONENT),
        "spec": {"pool": pool.metadata.name, "node": node},
    }


def read_drain(status: Manifest) -> DrainStatus:
    """The drain of a status that the operator wrote; none where it makes no sense."""
    drain = status.get("drain")
    try:
        return DrainStatus.model_validate(drain) if isinstance(drain, dict) else DrainStatus()
    except ValueError:
        return DrainStatus()


def node_status(
    pool: KVCachePool, sidecar: Sidecar | None, *, gone: bool, drain: DrainStatus, old: Manifest, now: str
) -> Manifest:
    """The status. `sidecar` is None where the node has none; `gone`: there is no such node any more."""
    report = sidecar.report if sidecar is not None else None
    conditions = [c for c in old.get("conditions") or [] if isinstance(c, dict)]
    for kind, status, reason, message in (
        _ready(sidecar, gone=gone),
        _disk_healthy(sidecar),
        _index_connected(sidecar),
    ):
        condition = NodeCondition.model_validate(
            {
                "type": kind,
                "status": status,
                "observedGeneration": pool.metadata.generation,
                "reason": reason.value,
                "message": message[:1024],
            }
        )
        conditions = set_condition(conditions, condition, now)
    kept: dict[str, Any] = {}
    if report is None:  # what was known last is better than nothing
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
        {"name": t.name, "path": t.local.path, "health": _health(t.name, report)}
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
    """The part of a status whose change is told at once."""
    drain = status.get("drain") or {}
    return (
        [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or []],
        [(d["name"], d["health"]) for d in status.get("devices") or []],
        [drain.get(k) for k in ("state", "reason", "startTime")],
        [status.get(k) for k in ("generation", "transport")],
    )


def comparable_status(status: Manifest) -> Manifest:
    """All of a status that is worth a write; that the pool's generation is another one says nothing of the node."""
    conditions = [{k: v for k, v in c.items() if k != "observedGeneration"} for c in status.get("conditions") or []]
    return {**status, "conditions": conditions}


def lost_since(status: Manifest) -> str:
    """Since when there is no node or no sidecar there (RFC 3339); empty while there is one."""
    ready = find(status.get("conditions") or [], "Ready")
    return str(ready.get("lastTransitionTime", "")) if ready and ready.get("reason") in _LOST else ""


def _health(tier: str, report: SidecarStatus | None) -> str:
    if report is None:
        return "Unknown"
    return "Failing" if tier in report.failing_drives else "OK"


def _ready(sidecar: Sidecar | None, *, gone: bool) -> tuple[str, str, Reason, str]:
    if gone:
        return (
            "Ready",
            "False",
            Reason.NODE_NOT_FOUND,
            "there is no such node any more; this object goes, too, in a while",
        )
    if sidecar is None:
        return "Ready", "False", Reason.SIDECAR_NOT_FOUND, "the node has no sidecar of this pool"
    if not sidecar.ready:
        return "Ready", "False", Reason.NODES_NOT_READY, sidecar.problem or "its sidecar is not ready"
    if sidecar.report is None:
        return "Ready", "Unknown", Reason.STATUS_UNAVAILABLE, "its sidecar does not answer the operator"
    return "Ready", "True", Reason.SERVING, "its sidecar serves"


def _disk_healthy(sidecar: Sidecar | None) -> tuple[str, str, Reason, str]:
    if sidecar is None or sidecar.report is None:
        return "DiskHealthy", "Unknown", Reason.STATUS_UNAVAILABLE, "nothing was told of the drives"
    failing = sidecar.report.failing_drives
    if failing:
        return (
            "DiskHealthy",
            "False",
            Reason.DRIVE_ERRORS,
            f"passed by for errors: {', '.join(failing)}",
        )
    return "DiskHealthy", "True", Reason.DRIVES_HEALTHY, "no drive returns errors"


def _index_connected(sidecar: Sidecar | None) -> tuple[str, str, Reason, str]:
    if sidecar is None or sidecar.report is None:
        return "IndexConnected", "Unknown", Reason.STATUS_UNAVAILABLE, "nothing was told of the index"
    if not sidecar.report.index_connected:
        return "IndexConnected", "False", Reason.NODES_NOT_CONNECTED, "others do not find this node's blocks"
    return "IndexConnected", "True", Reason.CONNECTED, "others find this node's blocks"
