"""What the cluster's state means for a pool's users: conditions, numbers, one word. Pure.

Each `_..._ready` function sets one condition; `make_status` puts them together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.conditions import Condition, set_condition
from kvpool_operator.api.pool.status import (
    MAX_FINGERPRINTS,
    MAX_PODS,
    CacheStatus,
    Capacity,
    FingerprintStatus,
    IndexStatus,
    NodesStatus,
    Phase,
    PodsStatus,
    PoolStatus,
    TransportStatus,
)
from kvpool_operator.api.quantity import format_bytes
from kvpool_operator.api.reasons import Reason
from kvpool_operator.desired import names
from kvpool_operator.desired.index import memory_of
from kvpool_operator.pools.fingerprints import explain, find_gaps, group_fingerprints
from kvpool_operator.pools.upgrade_safety import rolling_update_safe
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.preflight.status import preflight_status, preflight_verdict
from kvpool_operator.text import summarize_clauses
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.observe.engine_pods import EnginePods
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.pools.fingerprints import FingerprintGroup
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["ReconcileOutcome", "invalid_status", "make_status", "worth_writing"]

NUMBERS_EVERY_S: Final = 30.0
_TYPES: Final = (
    "Ready",
    "StorageReady",
    "IndexReady",
    "InjectionReady",
    "TransportReady",
    "BlocksShareable",
    "PreflightPassed",
    "Progressing",
    "RollingUpdateSafe",
)


@dataclass(frozen=True)
class ReconcileOutcome:
    """What this pass of the operator did and could not do."""

    applied: int = 0
    waiting: str = ""
    rejections: tuple[str, ...] = ()
    watchdog: str = ""
    """Why a pod that should be made again was not."""
    gate: PreflightResult = PreflightResult("Skipped", is_open=True)
    config: str = ""
    """Digest of the configuration that the sidecars should run; empty if that is not known."""
    without_new_password: tuple[str, ...] = ()
    """Nodes that have not shown the managed index's new password yet."""


@dataclass(frozen=True)
class _Verdict:
    """A condition but for its type, generation and time."""

    status: bool | None
    reason: Reason
    message: str


def make_status(pool: KVCachePool, observed: Snapshot, progress: ReconcileOutcome, pool_id: str, now: str) -> Manifest:
    """The pool's status. `now` (RFC 3339) becomes the transition time of the conditions that flip."""
    reports = [s.report for s in observed.sidecars if s.report is not None]
    nodes = _nodes(pool, observed, progress.config)
    storage = _storage_ready(pool, observed, nodes, progress.gate)
    index = _index_ready(pool, observed, reports)
    progressing = _progressing(pool, observed, nodes, progress)
    ready = _ready(storage, index, nodes, progress)
    found = group_fingerprints(reports, observed.engines.names)
    verdicts = (
        ready,
        storage,
        index,
        _injection_ready(pool, observed, progress.watchdog),
        _transport_ready(pool, reports),
        _shared_reuse(observed.engines, reports, found),
        _Verdict(*preflight_verdict(progress.gate)),
        progressing,
        _Verdict(*rolling_update_safe(pool, observed.sidecars, nodes.desired, index_is_ready=index.status is True)),
    )
    conditions = _conditions(observed.status, pool.metadata.generation, now, dict(zip(_TYPES, verdicts, strict=True)))
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        phase=_phase(pool, observed, ready, progressing, progress),
        pool_id=pool_id,
        nodes=nodes,
        capacity=_capacity(reports),
        cache=_cache(reports),
        index=IndexStatus(
            mode="External" if pool.spec.index.external else "Managed",
            connected=f"{sum(r.index_connected for r in reports)}/{len(reports)}",
            announced=sum(r.index_announced for r in reports),
            memory=_index_memory(pool, observed),
            password=summarize_clauses(progress.without_new_password)[:253],
        ),
        transport=TransportStatus(
            effective=", ".join(sorted({r.transport for r in reports if r.transport}))[:253],
            reason="; ".join(sorted({r.transport_reason for r in reports if r.transport_reason}))[:253],
        ),
        fingerprints=_fingerprints(found),
        pods=PodsStatus(
            selected=observed.engines.selected,
            injected=observed.engines.injected,
            skipped=observed.engines.skipped,
            not_injected=observed.engines.not_injected,
            outdated=observed.engines.outdated,
        ),
        preflight=preflight_status(progress.gate),
        conditions=[Condition.model_validate(c) for c in conditions if c["type"] in _TYPES],
    ).dump()


def invalid_status(meta: Metadata, observed: Snapshot, problem: str, now: str) -> Manifest:
    """The status of a pool whose spec cannot be understood: what is there stays as it is, and the sentence says why."""
    told = f"{problem}; nothing is changed until the spec is right"
    ready = _Verdict(False, Reason.INVALID_SPEC, told)
    conditions = _conditions(
        observed.status, meta.generation, now, {"Ready": ready, "Progressing": _Verdict(False, ready.reason, told)}
    )
    kept = {f.alias: observed.status.get(str(f.alias)) for f in PoolStatus.model_fields.values()}
    return {str(k): v for k, v in kept.items() if v is not None} | {
        "observedGeneration": meta.generation,
        "phase": "Failed",
        "conditions": conditions,
    }


def worth_writing(old: Manifest, new: Manifest, since_last_s: float) -> bool:
    """Numbers that only grow may wait half a minute; everything else is told at once."""
    if old == new:
        return False
    numbers = ("capacity", "cache", "fingerprints", "index")
    calm = {k: v for k, v in old.items() if k not in numbers} == {k: v for k, v in new.items() if k not in numbers}
    first = not (old.get("capacity") or {}).get("blocks") and bool((new.get("capacity") or {}).get("blocks"))
    return first or not calm or since_last_s >= NUMBERS_EVERY_S


def _conditions(old: Manifest, generation: int, now: str, verdicts: dict[str, _Verdict]) -> list[dict[str, Any]]:
    conditions = old.get("conditions")
    conditions = [c for c in conditions if isinstance(c, dict)] if isinstance(conditions, list) else []
    for kind, v in verdicts.items():
        status = "Unknown" if v.status is None else str(v.status)
        condition = Condition.model_validate(
            {
                "type": kind,
                "status": status,
                "observedGeneration": generation,
                "reason": v.reason.value,
                "message": v.message[:1024],
            }
        )
        conditions = set_condition(conditions, condition, now)
    return conditions


def _ready(storage: _Verdict, index: _Verdict, nodes: NodesStatus, progress: ReconcileOutcome) -> _Verdict:
    if progress.rejections:
        return _Verdict(False, Reason.REJECTED, f"the API server refuses: {'; '.join(progress.rejections)[:900]}")
    parts = (index, storage) if index.reason is Reason.INVALID_INDEX_CONFIG else (storage, index)
    for part in parts:
        if part.status is not True:
            return _Verdict(False, part.reason, part.message)
    return _Verdict(True, Reason.SERVING, f"{nodes.ready} nodes serve, and each finds the blocks of the others")


def _storage_ready(pool: KVCachePool, observed: Snapshot, nodes: NodesStatus, gate: PreflightResult) -> _Verdict:
    daemonset = observed.object("DaemonSet", names.sidecar(pool.metadata.name))
    if daemonset is None and not observed.refusal:
        return _not_created(pool, gate)
    if daemonset is not None and not _is_current(daemonset):
        return _Verdict(False, Reason.NOT_CREATED, "the sidecars are being made")
    if observed.refusal:
        return _Verdict(
            False,
            Reason.POD_CREATION_FAILED,
            f"the sidecars' pods are refused: {observed.refusal}; where Pod Security is enforced, label the pool's "
            "namespace pod-security.kubernetes.io/enforce=privileged",
        )
    if nodes.desired == 0:
        return _Verdict(False, Reason.NO_MATCHING_NODES, "no node fits spec.nodes: check its selector and tolerations")
    if nodes.ready < nodes.desired:
        lame = [f"{s.node or 'a pod'}: {s.problem or 'not ready yet'}" for s in observed.sidecars if not s.ready]
        lame += [] if lame else ["some pods are not there yet"]
        return _Verdict(
            False,
            Reason.NODES_NOT_READY,
            f"{nodes.ready} of {nodes.desired} nodes serve; {summarize_clauses(sorted(lame))}",
        )
    drives = [
        f"{s.node}: {', '.join(s.report.failing_drives)}"
        for s in observed.sidecars
        if s.report and s.report.failing_drives
    ]
    if drives:
        return _Verdict(
            False, Reason.DRIVE_ERRORS, f"drives return errors and are passed by: {summarize_clauses(sorted(drives))}"
        )
    away = [f"{s.node}: {s.report.shared_problem}" for s in observed.sidecars if s.report and s.report.shared_problem]
    if away:
        return _Verdict(
            False,
            Reason.SHARED_TIER_UNAVAILABLE,
            f"the shared tier is not available on {len(away)} nodes; {summarize_clauses(sorted(away))}",
        )
    return _Verdict(True, Reason.ALL_NODES_READY, f"{nodes.ready} of {nodes.desired} nodes serve")


def _not_created(pool: KVCachePool, gate: PreflightResult) -> _Verdict:
    if pool.spec.mode == "DryRun":
        return _Verdict(False, Reason.DRY_RUN, "spec.mode is DryRun: no sidecars are made")
    if gate.is_running:
        _, reason, told = preflight_verdict(gate)
        return _Verdict(False, reason, told)
    return _Verdict(False, Reason.NOT_CREATED, "the sidecars are being made")


def _index_ready(pool: KVCachePool, observed: Snapshot, reports: Sequence[SidecarStatus]) -> _Verdict:
    if observed.external_problem:
        return _Verdict(False, Reason.INVALID_INDEX_CONFIG, observed.external_problem)
    if pool.spec.index.external is None:
        redis = observed.object("StatefulSet", names.index(pool.metadata.name))
        if not ((redis or {}).get("status") or {}).get("readyReplicas"):
            return _Verdict(
                False, Reason.INDEX_NOT_RUNNING, "the index is not running; nodes find their own and shared blocks only"
            )
    if not reports:
        return _Verdict(None, Reason.STATUS_UNAVAILABLE, "no sidecar has told yet whether it reaches the index")
    connected = sum(r.index_connected for r in reports)
    told = f"{connected} of {len(reports)} nodes reach the index"
    if connected < len(reports):
        return _Verdict(False, Reason.NODES_NOT_CONNECTED, f"{told}; the others find their own and shared blocks only")
    return _Verdict(True, Reason.CONNECTED, told)


def _index_memory(pool: KVCachePool, observed: Snapshot) -> str:
    memory = memory_of(observed.object("StatefulSet", names.index(pool.metadata.name)))
    return format_bytes(memory) if memory and pool.spec.index.external is None else ""


def _injection_ready(pool: KVCachePool, observed: Snapshot, watchdog: str) -> _Verdict:
    engines = observed.engines
    if not pool.spec.injection.enabled:
        return _Verdict(False, Reason.DISABLED, "spec.injection.enabled is false: new pods start without the pool")
    if observed.webhook.problem:
        return _Verdict(
            False, Reason.WEBHOOK_UNAVAILABLE, f"{observed.webhook.problem}: new pods start without the pool"
        )
    restarts = pool.spec.injection.watchdog == "Restart" and pool.spec.mode == "Enforce"
    what = watchdog or ("their owners make them again, one after the other" if restarts else "make them again")
    if engines.not_injected:
        return _Verdict(
            False,
            Reason.PODS_NOT_INJECTED,
            f"{engines.not_injected} opted-in pods were created while the webhook was unavailable and run without the "
            f"pool; {what}: "
            f"{summarize_clauses(engines.not_injected_names, total=engines.not_injected)}",
        )
    told = f"{engines.injected} pods use the pool, {engines.skipped} were skipped"
    if engines.outdated:
        told += f"; {engines.outdated} of them carry an older client or configuration and work: {what}"
    return _Verdict(True, Reason.INJECTING, told)


def _transport_ready(pool: KVCachePool, reports: Sequence[SidecarStatus]) -> _Verdict:
    asked, used = pool.spec.transport.protocol, {r.transport for r in reports if r.transport}
    if not used:
        return _Verdict(None, Reason.STATUS_UNAVAILABLE, "no sidecar has told yet how it reads from others")
    why = _why_tcp(reports)
    if asked == "Auto" or used == {asked}:
        over = " and ".join(sorted(used))
        return _Verdict(
            True, Reason.PROTOCOL_MATCHED, f"blocks travel between nodes over {over}{why if asked == 'Auto' else ''}"
        )
    return _Verdict(
        False, Reason.PROTOCOL_MISMATCH, f"{asked} is asked for, and used are: {', '.join(sorted(used))}{why}"
    )


def _why_tcp(reports: Sequence[SidecarStatus]) -> str:
    reasons = sorted({r.transport_reason for r in reports if r.transport_reason})
    return f" ({'; '.join(reasons)})"[:500] if reasons else ""


def _shared_reuse(engines: EnginePods, reports: Sequence[SidecarStatus], found: Sequence[FingerprintGroup]) -> _Verdict:
    """Whether engines find each other's blocks. It says nothing about the pool's own health."""
    by_digest = {kind.digest: kind for kind in found}
    apart = [explain(split, by_digest) for split in find_gaps(found)]
    if engines.alone:
        who = summarize_clauses(engines.alone_names, total=engines.alone)
        who += " run an engine without a remote tier (Dynamo's KVBM)"
        advice = "their blocks stay on their nodes; to share them, run vLLM without KVBM (docs/how-to/engines/index.md)"
        return _Verdict(False, Reason.NO_REMOTE_TIER, "; ".join([f"{who}: {advice}", *apart]))
    if apart:
        return _Verdict(False, Reason.FINGERPRINTS_DIFFER, "; ".join(apart))
    pods = sum(kind.in_use_by for kind in found)
    if not reports:
        return _Verdict(None, Reason.STATUS_UNAVAILABLE, "no sidecar has told yet which engines it serves")
    if not pods:
        return _Verdict(None, Reason.NO_ENGINES_CONNECTED, "no engine is connected")
    models = len({kind.model for kind in found if kind.in_use_by})
    return _Verdict(True, Reason.FINGERPRINTS_MATCH, f"the engines of each of {models} models share their blocks")


def _progressing(pool: KVCachePool, observed: Snapshot, nodes: NodesStatus, progress: ReconcileOutcome) -> _Verdict:
    if pool.metadata.deletion_timestamp:
        return _Verdict(True, Reason.DELETING, f"waiting for {progress.waiting}" if progress.waiting else "cleaning up")
    if pool.spec.mode == "Paused":
        return _Verdict(False, Reason.PAUSED, "spec.mode is Paused: the operator only watches")
    if progress.rejections:
        return _Verdict(False, Reason.REJECTED, f"the API server refuses: {'; '.join(progress.rejections)[:900]}")
    if pool.spec.mode == "DryRun" and not progress.waiting:
        shown = names.rendered(pool.metadata.name)
        told = f"spec.mode is DryRun: ConfigMap {shown} says what would be made, changed and deleted"
        return _Verdict(False, Reason.DRY_RUN, told)
    if observed.external_problem:
        return _Verdict(False, Reason.INVALID_INDEX_CONFIG, f"nothing is changed: {observed.external_problem}")
    if progress.applied or progress.waiting:
        return _Verdict(
            True, Reason.APPLYING, progress.waiting or f"{progress.applied} objects were brought up to date"
        )
    if progress.gate.state == "Held":
        _, reason, told = preflight_verdict(progress.gate)
        return _Verdict(False, reason, told)
    daemonset = observed.object("DaemonSet", names.sidecar(pool.metadata.name))
    if daemonset is not None and (not _is_current(daemonset) or nodes.updated < nodes.desired):
        told = f"{nodes.updated} of {nodes.desired} nodes run the present spec"
        stuck = _stuck(observed)
        if stuck:
            return _Verdict(True, Reason.ROLLOUT_STUCK, f"{told}; {stuck}")
        return _Verdict(True, Reason.ROLLING_OUT, told)
    return _Verdict(False, Reason.UP_TO_DATE, "the cluster is as the spec says")


def _stuck(observed: Snapshot) -> str:
    """Why new sidecars do not take over from those that serve; empty when nothing is known."""
    lame = [
        f"{s.node or 'a node'}: its new sidecar: {s.successor_problem}"
        for s in observed.sidecars
        if s.successor_problem
    ]
    if observed.successor_rejection:
        lame = [f"new sidecars' pods are refused: {observed.successor_rejection}"]
    if not lame:
        return ""
    advice = "the old ones serve; where two have no room, spec.nodes.update.surge: false stops the old one first"
    return f"{summarize_clauses(sorted(lame))}; {advice}"


def _phase(
    pool: KVCachePool, observed: Snapshot, ready: _Verdict, progressing: _Verdict, progress: ReconcileOutcome
) -> Phase:
    if pool.metadata.deletion_timestamp:
        return "Deleting"
    if pool.spec.mode == "Paused":
        return "Paused"
    if progress.rejections:
        return "Failed"
    if pool.spec.mode == "DryRun":
        return "DryRun"
    if ready.status:
        return "Updating" if progressing.status else "Ready"
    if observed.status.get("phase") in ("Ready", "Degraded", "Updating"):
        return "Updating" if progressing.status else "Degraded"
    return "Provisioning" if observed.objects else "Pending"


def _nodes(pool: KVCachePool, observed: Snapshot, config: str) -> NodesStatus:
    """A node is up to date when its pod is of the present template and it has taken what it takes as it runs."""
    daemonset = observed.object("DaemonSet", names.sidecar(pool.metadata.name))
    status = (daemonset or {}).get("status") or {}
    desired, ready = int(status.get("desiredNumberScheduled", 0)), int(status.get("numberReady", 0))
    ready = max(0, min(ready + sum(s.ready_delta for s in observed.sidecars), desired))
    told = [s.report.config for s in observed.sidecars if s.report and s.report.config]
    behind = sum(one != config for one in told) if config else 0
    return NodesStatus(
        desired=desired,
        ready=ready,
        updated=max(0, min(int(status.get("updatedNumberScheduled", 0)), desired - behind)),
        summary=f"{ready}/{desired}",
    )


def _is_current(manifest: Manifest) -> bool:
    """Whether the object's status speaks of its present spec."""
    seen = (manifest.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= manifest["metadata"].get("generation", 1))


def _capacity(reports: Sequence[SidecarStatus]) -> Capacity:
    total, used = sum(r.capacity_bytes for r in reports), sum(r.used_bytes for r in reports)
    return Capacity(
        total=format_bytes(total),
        used=format_bytes(used),
        used_percent=round(100 * used / total) if total else 0,
        blocks=sum(r.blocks for r in reports),
    )


def _cache(reports: Sequence[SidecarStatus]) -> CacheStatus:
    hits, sizes = _sum(r.hits for r in reports), _sum(r.bytes for r in reports)
    misses = _sum(r.misses for r in reports)
    asked = sum(hits.values()) + sum(misses.values())
    return CacheStatus(
        hit_rate=f"{sum(hits.values()) / asked:.2f}" if asked else "", hits=hits, bytes=sizes, miss_reasons=misses
    )


def _sum(many: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in many:
        total.update(one)
    return dict(sorted(total.items())[:32])


def _fingerprints(found: Sequence[FingerprintGroup]) -> list[FingerprintStatus]:
    return [
        FingerprintStatus(
            digest=kind.digest,
            engine=kind.engine,
            model=kind.model,
            size=format_bytes(kind.bytes),
            connected=kind.in_use_by,
            pods=[*kind.connected, *kind.others][:MAX_PODS],
            last_seen=_time(kind.last_seen) if not kind.in_use_by and kind.last_seen else "",
        )
        for kind in found[:MAX_FINGERPRINTS]
    ]


def _time(seconds: int) -> str:
    """RFC 3339, or nothing for a time that no calendar has."""
    try:
        return rfc3339(datetime.fromtimestamp(seconds, UTC))
    except (OverflowError, OSError, ValueError):
        return ""
