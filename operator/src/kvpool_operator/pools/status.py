"""Status of a KVCachePool: conditions, numbers and phase, computed from a snapshot of the cluster. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.condition_types import POOL_CONDITIONS
from kvpool_operator.api.conditions import MESSAGE_LENGTH, Condition, Verdict, with_verdicts
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.pool.status import (
    MAX_FINDINGS,
    MAX_FINGERPRINTS,
    MAX_PODS,
    Capacity,
    FindingStatus,
    FingerprintStatus,
    IndexStatus,
    NodesStatus,
    PodsStatus,
    PoolStatus,
    TransportStatus,
)
from kvpool_operator.api.quantity import format_bytes
from kvpool_operator.api.reasons import Reason
from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.desired import names
from kvpool_operator.desired.index import current_index_memory
from kvpool_operator.diagnosis import ClusterObjects, Observed, diagnose
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.injection.client_image import image_problems
from kvpool_operator.observe.fingerprints import group_fingerprints
from kvpool_operator.pools.conditions import ConditionInput, evaluate_conditions
from kvpool_operator.pools.conditions.ready import phase_of
from kvpool_operator.pools.hit_rate import cache_status
from kvpool_operator.text import summarize_clauses
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.api.pool.status import ClientImageProblem
    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.diagnosis import PoolFinding
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.observe.engine_connections import EngineConnections
    from kvpool_operator.observe.engine_pods import EnginePods
    from kvpool_operator.observe.fingerprints import FingerprintGroup
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.pools.conditions import ReconcileOutcome
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["condition_input", "invalid_status", "make_status", "observed", "stable_part", "with_code"]

_COUNTERS: Final = ("capacity", "cache", "fingerprints", "index", "findings")
"""Fields that change all the time. Findings too: a sidecar may answer every other time."""


def make_status(pool: KVCachePool, snapshot: Snapshot, outcome: ReconcileOutcome, pool_id: str, now: str) -> Manifest:
    """Compute the pool's status. `now` (RFC 3339) is the transition time of conditions whose status changes."""
    reports = [s.report for s in snapshot.sidecars if s.report is not None]
    subject = condition_input(pool, snapshot, outcome)
    groups, nodes = subject.fingerprint_groups, subject.nodes
    verdicts = evaluate_conditions(subject)
    findings = diagnose(observed(subject, verdicts))
    verdicts = {kind: with_code(verdict, findings) for kind, verdict in verdicts.items()}
    conditions = with_verdicts(snapshot.status.get("conditions"), verdicts, pool.metadata.generation, now)
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        phase=phase_of(subject, verdicts),
        pool_id=pool_id,
        nodes=nodes,
        capacity=_capacity(reports),
        cache=cache_status(reports),
        index=IndexStatus(
            mode="External" if pool.spec.index.external else "Managed",
            connected=f"{sum(r.index_connected for r in reports)}/{len(reports)}",
            announced=sum(r.index_announced for r in reports),
            memory=_index_memory(pool, snapshot),
            password=summarize_clauses(outcome.without_new_password)[:253],
        ),
        transport=TransportStatus(
            effective=", ".join(sorted({r.transport for r in reports if r.transport}))[:253],
            reason="; ".join(sorted({r.transport_reason for r in reports if r.transport_reason}))[:253],
        ),
        fingerprints=_fingerprints(groups),
        pods=_pods(snapshot.engines, snapshot.connections, _image_problems(snapshot, now)),
        preflight=outcome.preflight.to_status(),
        findings=_findings(findings),
        conditions=[Condition.model_validate(c) for c in conditions if c["type"] in POOL_CONDITIONS],
    ).dump()


def condition_input(pool: KVCachePool, snapshot: Snapshot, outcome: ReconcileOutcome) -> ConditionInput:
    """What the conditions of the pool are evaluated from."""
    reports = [s.report for s in snapshot.sidecars if s.report is not None]
    groups = group_fingerprints(reports, snapshot.engines.names)
    return ConditionInput(pool, snapshot, _nodes(pool, snapshot, outcome.config_digest), outcome, tuple(groups))


def observed(
    subject: ConditionInput, verdicts: Mapping[str, Verdict], cluster: ClusterObjects | None = None
) -> Observed:
    """What the pool is diagnosed from. `cluster`: objects that the operator does not watch."""
    return Observed(
        subject.pool,
        subject.snapshot,
        verdicts,
        subject.fingerprint_groups,
        subject.outcome.preflight.findings,
        cluster or ClusterObjects(),
    )


def invalid_status(meta: Metadata, snapshot: Snapshot, problem: str, now: str) -> Manifest:
    """The status of a pool with an invalid spec: the previous one, with conditions that name the problem."""
    verdict = Verdict.false(Reason.INVALID_SPEC, f"{problem}; nothing is changed until the spec is valid")
    found = make(Code.INVALID_SPEC, f"{KIND} {meta.namespace}/{meta.name}", problem)
    verdict = with_code(verdict, (found,))
    verdicts = {"Ready": verdict, "Progressing": verdict}
    previous = {str(f.alias): snapshot.status.get(str(f.alias)) for f in PoolStatus.model_fields.values()}
    return {k: v for k, v in previous.items() if v is not None} | {
        "observedGeneration": meta.generation,
        "phase": "Failed",
        "findings": [one.model_dump(by_alias=True, mode="json") for one in _findings((found,)) or ()],
        "conditions": with_verdicts(snapshot.status.get("conditions"), verdicts, meta.generation, now),
    }


def stable_part(status: Manifest) -> Manifest:
    """The part of a status whose change is written immediately: all but counters, and whether any block is stored."""
    has_blocks = bool((status.get("capacity") or {}).get("blocks"))
    return {k: v for k, v in status.items() if k not in _COUNTERS} | {"hasBlocks": has_blocks}


def with_code(verdict: Verdict, findings: Sequence[PoolFinding]) -> Verdict:
    """Append the code of the most severe finding that explains the reason to the message."""
    found = next((f for f in findings if verdict.reason in f.code.reasons), None)
    if found is None:
        return verdict
    return replace(verdict, message=f"{verdict.message[: MESSAGE_LENGTH - 16]} [{found.code.value}]")


def _findings(findings: Sequence[PoolFinding]) -> list[FindingStatus] | None:
    """The most severe ones; None if there are none."""
    rows = [
        FindingStatus(code=f.code.value, severity=f.severity, subject=f.subject, summary=f.summary, fix=f.fix)
        for f in findings[:MAX_FINDINGS]
    ]
    return rows or None


def _index_memory(pool: KVCachePool, snapshot: Snapshot) -> str:
    memory = current_index_memory(snapshot.object("StatefulSet", names.index(pool.metadata.name)))
    return format_bytes(memory) if memory and pool.spec.index.external is None else ""


def _image_problems(snapshot: Snapshot, now: str) -> list[ClientImageProblem]:
    pods = [pod for pod in snapshot.engines.pods if pod.waits_for_image and not pod.leaving]
    waiting = [(pod.namespace, pod.waits_for_image.partition(" (")[0]) for pod in pods]
    return image_problems(snapshot.status, waiting, now)


def _pods(engines: EnginePods, connections: EngineConnections, problems: list[ClientImageProblem]) -> PodsStatus:
    return PodsStatus(
        skip_reasons=dict(engines.skip_reasons),
        connected=connections.connected,
        silent=len(connections.silent),
        selected=engines.selected,
        injected=engines.injected,
        skipped=engines.skipped,
        not_injected=engines.not_injected,
        outdated=engines.outdated,
        client_image_problems=problems,
    )


def _nodes(pool: KVCachePool, snapshot: Snapshot, config_digest: str) -> NodesStatus:
    """A node is updated when its pod has the current template and its sidecar runs the current configuration."""
    daemonset = snapshot.object("DaemonSet", names.sidecar(pool.metadata.name))
    status = (daemonset or {}).get("status") or {}
    desired, ready = int(status.get("desiredNumberScheduled", 0)), int(status.get("numberReady", 0))
    ready = max(0, min(ready + sum(s.ready_delta for s in snapshot.sidecars), desired))
    digests = [s.report.config for s in snapshot.sidecars if s.report and s.report.config]
    outdated = sum(digest != config_digest for digest in digests) if config_digest else 0
    return NodesStatus(
        desired=desired,
        ready=ready,
        updated=max(0, min(int(status.get("updatedNumberScheduled", 0)), desired - outdated)),
        summary=f"{ready}/{desired}",
    )


def _capacity(reports: Sequence[SidecarStatus]) -> Capacity:
    total, used = sum(r.capacity_bytes for r in reports), sum(r.used_bytes for r in reports)
    return Capacity(
        total=format_bytes(total),
        used=format_bytes(used),
        used_percent=round(100 * used / total) if total else 0,
        blocks=sum(r.blocks for r in reports),
    )


def _fingerprints(groups: Sequence[FingerprintGroup]) -> list[FingerprintStatus]:
    return [
        FingerprintStatus(
            digest=group.digest,
            engine=group.engine,
            model=group.model,
            size=format_bytes(group.bytes),
            connected=group.in_use_by,
            pods=[*group.connected, *group.others][:MAX_PODS],
            last_seen=_time(group.last_seen) if not group.in_use_by and group.last_seen else "",
            tested=group.is_tested,
        )
        for group in groups[:MAX_FINGERPRINTS]
    ]


def _time(seconds: int) -> str:
    """RFC 3339; empty for a time outside of the calendar."""
    try:
        return rfc3339(datetime.fromtimestamp(seconds, UTC))
    except (OverflowError, OSError, ValueError):
        return ""
