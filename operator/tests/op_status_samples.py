"""Snapshots of a pool that serves, and readers of the status made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from op_samples import inputs, pool, pool_manifest

from kvpool_operator.api.conditions import find
from kvpool_operator.desired import build
from kvpool_operator.k8s.client import ref
from kvpool_operator.observe.snapshot import Sidecar, Snapshot
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.status import make_status
from kvpool_operator.sidecars.cache import CacheReport, LookupTokens
from kvpool_operator.sidecars.status import Fingerprint, PeerReport, SidecarStatus

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

NOW, LATER = "2026-11-20T10:00:00Z", "2026-11-20T11:00:00Z"


GOOD = SidecarStatus(
    ready=True,
    capacity_bytes=10 * 2**30,
    used_bytes=2**30,
    blocks=32,
    index_connected=True,
    index_announced=32,
    transport="TCP",
    cache=CacheReport({name: LookupTokens(800, 600, {"expired": 200}) for name in ("5m", "1h")}),
    hits={"local": 5, "peer": 3},
    bytes={"local": 100},
    misses={"absent": 2},
    peers=PeerReport(verified=1),
    fingerprints=(Fingerprint("4be1", "vllm 0.33", "llama", 2**30, connected=1),),
)


def observed(
    *, nodes: int = 2, ready: int = 2, updated: int = 2, raw: Manifest | None = None, **kwargs: Any
) -> Snapshot:
    objects = {}
    for manifest in build(inputs()):
        manifest["metadata"] |= {"generation": 1, "uid": "u"}
        if manifest["kind"] == "DaemonSet":
            manifest["status"] = {
                "observedGeneration": 1,
                "desiredNumberScheduled": nodes,
                "numberReady": ready,
                "updatedNumberScheduled": updated,
            }
        if manifest["kind"] == "StatefulSet":
            manifest["status"] = {"readyReplicas": 1}
        objects[ref(manifest)] = manifest
    sidecars = kwargs.pop("sidecars", tuple(Sidecar(f"node-{i}", i < ready, "", GOOD) for i in range(nodes)))
    return Snapshot(raw=raw or pool_manifest(), objects=objects, sidecars=sidecars, **kwargs)


def status(seen: Snapshot, progress: ReconcileOutcome | None = None, now: str = NOW, **spec: Any) -> Manifest:
    return make_status(pool(**spec), seen, progress or ReconcileOutcome(), "id-1", now)


def reported(made: Manifest, kind: str) -> tuple[str, str]:
    condition = find(made["conditions"], kind)
    assert condition is not None
    assert condition["message"]
    return condition["status"], condition["reason"]


def message(made: Manifest, kind: str) -> str:
    return str((find(made["conditions"], kind) or {})["message"])
