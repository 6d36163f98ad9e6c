"""Whether a node's new sidecar starts beside the old one, and how its DaemonSet rolls then (docs/how-to/upgrade.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_RESYNC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = [
    "asks_for_devices",
    "drives_of",
    "may_surge",
    "resync_metadata",
    "rolling_update",
    "surge_of",
]

_MADE: Final = "DirectoryOrCreate"


def rolling_update(inputs: Inputs) -> Manifest:
    """With surge the API server takes no maxUnavailable but 0; percentages are rounded up, to one node at least.

    What runs decides here, and never in the pod template: what is observed must not roll anything.
    """
    at_once = inputs.pool.spec.nodes.update.max_unavailable
    if may_surge(inputs.pool) and not _are_replaced(inputs):
        return {"maxSurge": at_once, "maxUnavailable": 0}
    return {"maxSurge": 0, "maxUnavailable": at_once}


def resync_metadata(inputs: Inputs) -> dict[str, Manifest]:
    """Annotation of the DaemonSet that changes while a rollover is stalled.

    The DaemonSet controller requeues a pod `minReadySeconds` after it became ready, but client-go's delaying queue
    keeps only the first of several such requeues, and with surge no other event follows: old pods would stay. Any
    change of
    the DaemonSet triggers a sync.
    """
    return {"annotations": {ANNOTATION_RESYNC: inputs.resync_token}} if inputs.resync_token else {}


def may_surge(pool: KVCachePool) -> bool:
    """By the spec. Where a node has one device, a second pod that asks for it would wait for ever."""
    return pool.spec.nodes.update.surge and not asks_for_devices(pool)


def asks_for_devices(pool: KVCachePool) -> bool:
    """Whether the sidecars' pods have device resources among their limits."""
    return pool.spec.transport.protocol != "TCP" and bool(pool.spec.transport.rdma.resources)


def surge_of(daemonset: Manifest) -> int | str:
    """How many pods more it may have while it rolls: 0 if it stops the old one first."""
    rolling = ((daemonset.get("spec") or {}).get("updateStrategy") or {}).get("rollingUpdate") or {}
    surge: int | str = rolling.get("maxSurge") or 0
    return surge


def drives_of(pods: Iterable[Manifest]) -> tuple[frozenset[str], ...]:
    """The directories of the local tiers of each sidecar's pod that has not ended."""
    return tuple(
        frozenset(
            str(v["hostPath"].get("path"))
            for v in (pod.get("spec") or {}).get("volumes") or []
            # a shared directory has type Directory: it must exist
            if str(v.get("name", "")).startswith("tier-") and (v.get("hostPath") or {}).get("type") == _MADE
        )
        for pod in pods
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    )


def _are_replaced(inputs: Inputs) -> bool:
    """Whether a sidecar is there that shares no drive with those to come: nothing would keep both from serving."""
    wanted = {t.local.path for t in inputs.pool.spec.tiers if t.local}
    return any(drives and not drives & wanted for drives in inputs.drives)
