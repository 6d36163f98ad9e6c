"""Rolling update strategy of the sidecars (docs/how-to/upgrade.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_RESYNC
from kvpool_operator.desired.users import USER, Drive, server_user

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = [
    "has_ephemeral_volumes",
    "local_drives",
    "max_surge",
    "may_surge",
    "requests_devices",
    "resync_metadata",
    "rolling_update",
]

_MADE: Final = "DirectoryOrCreate"


def rolling_update(inputs: Inputs) -> Manifest:
    """Return the rollingUpdate settings. With surge, maxUnavailable must be 0; Kubernetes rounds percentages up.

    Observed state can affect these settings, but never the pod template: an observation must not start a rollout.
    """
    limit = inputs.pool.spec.nodes.update.max_unavailable
    if may_surge(inputs.pool) and not _replaces_drives(inputs):
        return {"maxSurge": limit, "maxUnavailable": 0}
    return {"maxSurge": 0, "maxUnavailable": limit}


def resync_metadata(inputs: Inputs) -> dict[str, Manifest]:
    """Annotation of the DaemonSet that changes while a rollover is stalled.

    The DaemonSet controller requeues a pod `minReadySeconds` after it became ready, but client-go's delaying queue
    keeps only the first of several such requeues, and with surge no other event follows: old pods would stay. Any
    change of the DaemonSet triggers a sync.
    """
    return {"annotations": {ANNOTATION_RESYNC: inputs.resync_token}} if inputs.resync_token else {}


def may_surge(pool: KVCachePool) -> bool:
    """Whether the spec allows surge. On a node with one device, a second pod that requests it would stay Pending.

    A second pod with an ephemeral volume would need its room a second time, and takes no blocks over.
    """
    return pool.spec.nodes.update.surge and not requests_devices(pool) and not has_ephemeral_volumes(pool)


def has_ephemeral_volumes(pool: KVCachePool) -> bool:
    """Whether sidecar pods bring volumes of their own, which the pods of a wipe or a preflight check never see."""
    return any(t.local is not None and t.local.path is None for t in pool.spec.tiers)


def requests_devices(pool: KVCachePool) -> bool:
    """Whether the sidecar pods request device resources."""
    rdma = pool.spec.transport.rdma
    return pool.spec.transport.protocol != "TCP" and bool(rdma.resources or rdma.resource_claim_template_name)


def max_surge(daemonset: Manifest) -> int | str:
    """Return maxSurge of an existing DaemonSet; 0 if it stops the old pod first."""
    rolling = ((daemonset.get("spec") or {}).get("updateStrategy") or {}).get("rollingUpdate") or {}
    surge: int | str = rolling.get("maxSurge") or 0
    return surge


def local_drives(pods: Iterable[Manifest]) -> tuple[frozenset[Drive], ...]:
    """Return the local tier directories of each sidecar pod that has not terminated, with the user of its server."""
    return tuple(
        frozenset(
            Drive(path, _user_of(pod)) for v in (pod.get("spec") or {}).get("volumes") or [] if (path := _drive_path(v))
        )
        for pod in pods
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    )


def _drive_path(volume: Manifest) -> str:
    """Return the directory of a local tier; a name of its own for a volume of the pod; empty for other volumes."""
    name, host = str(volume.get("name", "")), volume.get("hostPath") or {}
    if not name.startswith("tier-"):
        return ""
    if volume.get("ephemeral"):
        return f"ephemeral:{name}"
    return str(host.get("path")) if host.get("type") == _MADE else ""  # a shared directory has type Directory


def _user_of(pod: Manifest) -> int:
    containers = (pod.get("spec") or {}).get("containers") or []
    users = [(c.get("securityContext") or {}).get("runAsUser") for c in containers if c.get("name") == "server"]
    return int(users[0]) if users and users[0] is not None else USER


def _replaces_drives(inputs: Inputs) -> bool:
    """Whether a running sidecar has no drive in common with the new ones: then no ownership lock separates them.

    A drive of sidecars with another user is another drive: the new sidecar changes its owner before it starts.
    """
    user = server_user(inputs.pool)
    wanted = {Drive(t.local.path, user) for t in inputs.pool.spec.tiers if t.local and t.local.path}
    return any(drives and not drives & wanted for drives in inputs.drives)
